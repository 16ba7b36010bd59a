"""A model behind Gradio."""

import os
import time
from typing import Any

import gradio
from gate import noted


def paint(prompt: str, sleep: float) -> dict[str, Any]:
    if prompt == "boom":
        raise gradio.Error("told to fail")
    with noted(prompt):
        time.sleep(sleep)
    return {"image": prompt.upper()}


if __name__ == "__main__":
    page = gradio.Interface(paint, [gradio.Textbox(), gradio.Number(value=0)], gradio.JSON(), api_name="paint")
    page.launch(server_name="127.0.0.1", server_port=int(os.environ["PORT"]), show_error=True, quiet=True)
