"""A model behind LitServe."""

import os
import time
from typing import Any

import litserve
from gate import noted


class Cat(litserve.LitAPI):
    def setup(self, device: str) -> None:
        pass

    def decode_request(self, request: dict[str, Any]) -> dict[str, Any]:
        return request

    def predict(self, payload: dict[str, Any]) -> dict[str, Any]:
        if payload["prompt"] == "boom":
            raise RuntimeError("told to fail")
        with noted(payload["prompt"]):
            time.sleep(payload.get("sleep", 0))
        return {"image": payload["prompt"].upper()}

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        return output


if __name__ == "__main__":
    server = litserve.LitServer(Cat(), accelerator="cpu")
    server.run(port=int(os.environ["PORT"]), host="127.0.0.1", generate_client_file=False, num_api_servers=1)
