"""A model behind Cog."""

import time

from cog import BasePredictor


class Predictor(BasePredictor):
    def predict(self, prompt: str, sleep: float = 0.0) -> str:
        if prompt == "boom":
            raise RuntimeError("told to fail")
        until = time.monotonic() + sleep
        while time.monotonic() < until:  # In one sleep it would hear of no cancel.
            time.sleep(0.05)
        return prompt.upper()
