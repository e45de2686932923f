"""Realistic shapes, by name, for benchmarks and tests."""

import dataclasses

from kernels_pallas.activations import Activation, ClampedSwiglu

GPT_OSS = ClampedSwiglu(alpha=1.702, limit=7.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedMatmulShape:
    """[rows, k] in `experts` groups times [experts, k, n]; `activation` as in `grouped_matmul`, with biases before."""

    rows: int
    experts: int
    k: int
    n: int
    activation: Activation | None = None
    biased: bool = False


SHAPES = {
    "tiny": GroupedMatmulShape(rows=48, experts=6, k=64, n=48),
    "tiny_decode": GroupedMatmulShape(rows=4, experts=16, k=64, n=48),
    "qwen3_30b_a3b_gate_up_decode": GroupedMatmulShape(
        rows=512, experts=128, k=2048, n=1536, activation="swiglu"
    ),
    "qwen3_30b_a3b_down_decode": GroupedMatmulShape(rows=512, experts=128, k=768, n=2048),
    "qwen3_30b_a3b_gate_up_train": GroupedMatmulShape(
        rows=65536, experts=128, k=2048, n=1536, activation="swiglu"
    ),
    "gpt_oss_20b_gate_up_decode": GroupedMatmulShape(
        rows=256, experts=32, k=2880, n=5760, activation=GPT_OSS, biased=True
    ),
    "gpt_oss_20b_down_decode": GroupedMatmulShape(rows=256, experts=32, k=2880, n=2880, biased=True),
    # Halves of 2880 columns are no whole tiles of a TPU. These are, so that the kernel computes the activation.
    "gpt_oss_20b_filled_gate_up_decode": GroupedMatmulShape(
        rows=256, experts=32, k=2880, n=6144, activation=GPT_OSS, biased=True
    ),
}
