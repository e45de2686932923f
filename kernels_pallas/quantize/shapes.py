"""Realistic shapes, by name, for benchmarks and tests."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeShape:
    """A tensor to quantize: its shape, contraction axis and row axes."""

    shape: tuple[int, ...]
    axis: int = -1
    row_axes: tuple[int, ...] = (-1,)


SHAPES = {
    "tiny_tokens": QuantizeShape(shape=(24, 128)),
    "qwen3_30b_a3b_tokens_train": QuantizeShape(shape=(8192, 2048)),
    "qwen3_30b_a3b_tokens_decode": QuantizeShape(shape=(256, 2048)),
    "qwen3_30b_a3b_kv_decode": QuantizeShape(shape=(256, 1, 4, 128)),
    "qwen3_30b_a3b_gate_up": QuantizeShape(shape=(128, 2048, 1536), axis=-2, row_axes=(-2, -1)),
    "gpt_oss_20b_down": QuantizeShape(shape=(32, 2880, 2880), axis=-2, row_axes=(-2, -1)),
}
