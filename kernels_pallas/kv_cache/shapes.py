"""Realistic shapes, by name, for benchmarks and tests."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheShape:
    """A cache [batch, length, kv_heads, head_dim] and how many tokens a step appends.

    With a `page_size` the sequences lie in pages of that many entries; `length` is a multiple of it.
    """

    batch: int
    length: int
    kv_heads: int
    head_dim: int
    tokens: int = 1
    page_size: int | None = None


SHAPES = {
    "tiny": CacheShape(batch=3, length=24, kv_heads=2, head_dim=32, tokens=5),
    "qwen3_30b_a3b_decode": CacheShape(batch=256, length=8192, kv_heads=4, head_dim=128),
    "qwen3_30b_a3b_decode_paged": CacheShape(batch=256, length=8192, kv_heads=4, head_dim=128, page_size=64),
    "gpt_oss_20b_decode": CacheShape(batch=256, length=8192, kv_heads=8, head_dim=64),
    "qwen3_30b_a3b_prefill": CacheShape(batch=8, length=8192, kv_heads=4, head_dim=128, tokens=2048),
}
