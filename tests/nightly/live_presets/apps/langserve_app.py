"""A model behind LangServe, which streams."""

import asyncio
import os
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI
from langchain_core.runnables import RunnableGenerator
from langserve import add_routes


async def say(texts: AsyncIterator[str]) -> AsyncIterator[str]:
    async for text in texts:
        if text == "boom":
            raise RuntimeError("told to fail")
        for word in text.split():
            await asyncio.sleep(2 if word == "slow" else 0.01)
            yield f"{word} "


if __name__ == "__main__":
    app = FastAPI()
    add_routes(app, RunnableGenerator(say), path="/parrot", input_type=str, output_type=str)
    uvicorn.run(app, port=int(os.environ["PORT"]), log_level="warning")
