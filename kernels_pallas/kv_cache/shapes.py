"""Realistic shapes, by name, for benchmarks and tests."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheShape:
    """A cache [batch, length, kv_heads, head_dim] and how many tokens a step appends."""

    batch: int
    length: int
    kv_heads: int
    head_dim: int
    tokens: int = 1


SHAPES = {
    "tiny": CacheShape(batch=3, length=24, kv_heads=2, head_dim=32, tokens=5),
    "qwen3_30b_a3b_decode": CacheShape(batch=256, length=8192, kv_heads=4, head_dim=128),
    "gpt_oss_20b_decode": CacheShape(batch=256, length=8192, kv_heads=8, head_dim=64),
    "qwen3_30b_a3b_prefill": CacheShape(batch=8, length=8192, kv_heads=4, head_dim=128, tokens=2048),
}
