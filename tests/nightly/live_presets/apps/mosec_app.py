"""A model behind mosec."""

import time
from typing import Any

from gate import noted
from mosec import Server, Worker
from mosec.errors import ValidationError


class Cat(Worker):
    def forward(self, data: dict[str, Any]) -> dict[str, Any]:
        if "prompt" not in data:
            raise ValidationError("prompt is missing")
        if data["prompt"] == "boom":
            raise RuntimeError("told to fail")
        with noted(data["prompt"]):
            time.sleep(data.get("sleep", 0))
        return {"image": data["prompt"].upper()}


if __name__ == "__main__":
    server = Server()
    server.append_worker(Cat, num=1, max_batch_size=1)
    server.run()
