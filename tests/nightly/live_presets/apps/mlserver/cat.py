"""A model behind MLServer: {"prompt": number}, where a negative one fails."""

import asyncio

from mlserver import MLModel
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput


class Cat(MLModel):
    async def load(self) -> bool:
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        number = payload.inputs[0].data[0]
        if number < 0:
            raise RuntimeError("told to fail")
        await asyncio.sleep(max(number - 100, 0))
        output = ResponseOutput(name="y", shape=[1], datatype="FP32", data=[number * 2])
        return InferenceResponse(model_name=self.name, outputs=[output])
