"""Writes to the KV cache in plain JAX."""

from jaxtyping import Array, Bool, Float, Int32

from kernels_pallas.arrays import Fp4Array
from kernels_pallas.kv_cache.cache import KVCache
from kernels_pallas.kv_cache.pages import entry_index, write
from kernels_pallas.quantize.reference import quantize


def append(
    cache: KVCache,
    k: Float[Array, "b t h d"],
    v: Float[Array, "b t h d"],
    positions: Int32[Array, "b t"],
    valid: Bool[Array, "b t"],
    *,
    layer: Int32[Array, ""] | None = None,
    page_table: Int32[Array, "b pages"] | None = None,
) -> tuple[KVCache, Fp4Array | None, Fp4Array | None]:
    """See `api.append`."""
    index = entry_index(positions, valid, page_table, cache.k.shape[-4:])
    if cache.format is None:
        k, v = k.astype(cache.k.dtype), v.astype(cache.v.dtype)
        return write(cache, KVCache(k=k, v=v), index, layer), None, None
    k_q, v_q = quantize(k, cache.format), quantize(v, cache.format)
    return write(cache, KVCache(k=k_q, v=v_q), index, layer), k_q, v_q
