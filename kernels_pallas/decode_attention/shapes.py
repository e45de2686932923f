"""Realistic shapes, by name, for benchmarks and tests: a cache and the query heads over it."""

import dataclasses

from kernels_pallas.kv_cache.shapes import SHAPES as CACHE_SHAPES
from kernels_pallas.kv_cache.shapes import CacheShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Query heads over a cache; `cache.tokens` queries per sequence."""

    cache: CacheShape
    q_heads: int


SHAPES = {
    "tiny": AttentionShape(cache=CACHE_SHAPES["tiny"], q_heads=6),
    "qwen3_30b_a3b_decode": AttentionShape(cache=CACHE_SHAPES["qwen3_30b_a3b_decode"], q_heads=32),
    "gpt_oss_20b_decode": AttentionShape(cache=CACHE_SHAPES["gpt_oss_20b_decode"], q_heads=64),
}
