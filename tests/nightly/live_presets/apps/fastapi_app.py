"""A model behind plain FastAPI, whose handlers run in threads."""

import os
import time
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException
from gate import noted

app = FastAPI()


@app.post("/predict")
def predict(payload: dict[str, Any]) -> dict[str, str]:
    if "prompt" not in payload:
        raise HTTPException(400, "prompt is missing")
    if payload["prompt"] == "boom":
        raise RuntimeError("told to fail")
    with noted(payload["prompt"]):
        time.sleep(payload.get("sleep", 0))
    return {"image": payload["prompt"].upper()}


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ["PORT"]), log_level="warning")
