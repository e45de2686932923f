"""The KV cache, in FP4 or BF16."""

from kernels_pallas.kv_cache.api import append
from kernels_pallas.kv_cache.cache import KVCache, init_cache
from kernels_pallas.kv_cache.latent import LatentCache, append_latent, in_rows, init_latent_cache

__all__ = ["KVCache", "LatentCache", "append", "append_latent", "in_rows", "init_cache", "init_latent_cache"]
