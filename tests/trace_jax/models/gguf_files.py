"""GGUF files of a small Llama model, written tensor by tensor."""

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 2, 64, 4, 2, 16, 96, 10
SHAPES = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (MLP, HIDDEN),
    "ffn_up": (MLP, HIDDEN),
    "ffn_down": (HIDDEN, MLP),
}


def random_tensors(rng):
    shapes = {f"blk.{n}.{name}.weight": shape for n in range(LAYERS) for name, shape in SHAPES.items()}
    shapes |= {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write(path, tensors, architecture="llama", types=(), **entries):
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {
        "vocab_size": VOCAB,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    }
    for name, value in (numbers | entries).items():
        if value is not None:
            writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.rope.freq_base", 1e5)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for name, tensor in tensors.items():
        kind = dict(types).get(name)
        data = tensor if kind is None else gguf.quants.quantize(tensor, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
