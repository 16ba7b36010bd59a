"""A model behind Cog."""

import sys
import time
from pathlib import Path

from cog import BasePredictor

sys.path.append(str(Path(__file__).parent))  # It is loaded by its file's name.
from gate import noted, pass_through


class Predictor(BasePredictor):
    def predict(self, prompt: str, sleep: float = 0.0, gate: str = "") -> str:
        if prompt == "boom":
            raise RuntimeError("told to fail")
        with noted(prompt):
            until = time.monotonic() + sleep
            while time.monotonic() < until:  # A single long sleep would not notice a cancel.
                time.sleep(0.05)
            pass_through(gate)
        return prompt.upper()
