"""The KV cache, in FP4 or BF16."""

from kernels_pallas.kv_cache.api import append
from kernels_pallas.kv_cache.cache import KVCache, init_cache

__all__ = ["KVCache", "append", "init_cache"]
