"""A model behind LitServe that speaks OpenAI's API, and streams."""

import os
import time
from collections.abc import Iterator
from typing import Any

import litserve
from gate import pass_through


class Parrot(litserve.LitAPI):
    def setup(self, device: str) -> None:
        pass

    def predict(self, request: Any) -> Iterator[str]:
        text = request.messages[-1].content
        if text == "boom":
            raise RuntimeError("told to fail")
        pass_through(text.partition("gate:")[2])
        for n, word in enumerate(text.split(" ")):
            time.sleep(2 if text == "slow" else 0.01)
            yield word if n == 0 else f" {word}"


if __name__ == "__main__":
    server = litserve.LitServer(Parrot(spec=litserve.OpenAISpec()), accelerator="cpu")
    server.run(port=int(os.environ["PORT"]), host="127.0.0.1", generate_client_file=False, num_api_servers=1)
