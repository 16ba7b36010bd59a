"""A tiny model with random weights behind llama.cpp's server, in the build that xllamacpp brings.

python llama_app.py              # completions
python llama_app.py embedding
"""

import os
import sys
import tempfile
import threading
from pathlib import Path

import numpy
import xllamacpp
from gguf import GGUFWriter, TokenType

CONTEXT, WIDTH, HIDDEN, HEADS, BLOCKS = 32_768, 64, 128, 4, 2
LETTERS = range(ord("a"), ord("z") + 1)


def write_model(path: Path) -> None:
    """It says nothing but letters, and never ends by itself."""
    of = numpy.random.default_rng(1)
    special = [("<unk>", TokenType.UNKNOWN), ("<s>", TokenType.CONTROL), ("</s>", TokenType.CONTROL)]
    tokens = special + [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)]
    file = GGUFWriter(str(path), "llama")
    file.add_context_length(CONTEXT)
    file.add_embedding_length(WIDTH)
    file.add_block_count(BLOCKS)
    file.add_feed_forward_length(HIDDEN)
    file.add_head_count(HEADS)
    file.add_head_count_kv(HEADS)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_dimension_count(WIDTH // HEADS)
    file.add_vocab_size(len(tokens))
    file.add_tokenizer_model("llama")
    file.add_token_list([text for text, _ in tokens])
    file.add_token_scores([0.0] * len(tokens))
    file.add_token_types([int(kind) for _, kind in tokens])
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_chat_template("{% for it in messages %}{{ it.content }}{% endfor %}")

    def tensor(name: str, *shape: int) -> None:
        file.add_tensor(name, of.standard_normal(shape).astype(numpy.float32) * 0.1)

    tensor("token_embd.weight", len(tokens), WIDTH)
    file.add_tensor("output_norm.weight", numpy.ones(WIDTH, numpy.float32))
    output = numpy.zeros((len(tokens), WIDTH), numpy.float32)
    for letter in LETTERS:
        output[len(special) + letter] = of.standard_normal(WIDTH)
    file.add_tensor("output.weight", output)
    for n in range(BLOCKS):
        file.add_tensor(f"blk.{n}.attn_norm.weight", numpy.ones(WIDTH, numpy.float32))
        file.add_tensor(f"blk.{n}.ffn_norm.weight", numpy.ones(WIDTH, numpy.float32))
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensor(f"blk.{n}.{part}.weight", WIDTH, WIDTH)
        for part, shape in (("ffn_gate", (HIDDEN, WIDTH)), ("ffn_up", (HIDDEN, WIDTH)), ("ffn_down", (WIDTH, HIDDEN))):
            tensor(f"blk.{n}.{part}.weight", *shape)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny.gguf"
        write_model(model)
        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.hostnames, params.port = ["127.0.0.1"], int(os.environ["PORT"])
        params.n_ctx, params.n_parallel = CONTEXT, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.endpoint_metrics = True
        if "embedding" in sys.argv:
            params.embedding, params.pooling_type = True, xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
        server = xllamacpp.Server(params)
        threading.Event().wait()
