"""Realistic shapes, by name, for benchmarks and tests: a cache and the query heads over it."""

import dataclasses

from kernels_pallas.kv_cache.shapes import SHAPES as CACHE_SHAPES
from kernels_pallas.kv_cache.shapes import CacheShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Query heads over a cache; `cache.tokens` queries per sequence, options as in `attention`."""

    cache: CacheShape
    q_heads: int
    window: int | None = None
    sinks: bool = False


SHAPES = {
    "tiny": AttentionShape(cache=CACHE_SHAPES["tiny"], q_heads=6),
    "qwen3_30b_a3b_decode": AttentionShape(cache=CACHE_SHAPES["qwen3_30b_a3b_decode"], q_heads=32),
    "qwen3_30b_a3b_decode_paged": AttentionShape(
        cache=CACHE_SHAPES["qwen3_30b_a3b_decode_paged"], q_heads=32
    ),
    "gpt_oss_20b_decode": AttentionShape(cache=CACHE_SHAPES["gpt_oss_20b_decode"], q_heads=64, sinks=True),
    "gpt_oss_20b_decode_window": AttentionShape(
        cache=CACHE_SHAPES["gpt_oss_20b_decode"], q_heads=64, window=128, sinks=True
    ),
}
