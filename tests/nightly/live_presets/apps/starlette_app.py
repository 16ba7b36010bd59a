"""A model behind plain Starlette, on uvicorn."""

import asyncio
import os

import uvicorn
from gate import noted
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


async def predict(request: Request) -> JSONResponse:
    payload = await request.json()
    if "prompt" not in payload:
        return JSONResponse({"error": "prompt is missing"}, 400)
    if payload["prompt"] == "boom":
        raise RuntimeError("told to fail")
    with noted(payload["prompt"]):
        await asyncio.sleep(payload.get("sleep", 0))
    return JSONResponse({"image": payload["prompt"].upper()})


if __name__ == "__main__":
    app = Starlette(routes=[Route("/predict", predict, methods=["POST"])])
    uvicorn.run(app, port=int(os.environ["PORT"]), log_level="warning")
