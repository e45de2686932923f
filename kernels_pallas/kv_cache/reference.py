"""Writes to the KV cache in plain JAX."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from kernels_pallas.kv_cache.cache import AppendedRows, KVCache
from kernels_pallas.kv_cache.pages import entry_index
from kernels_pallas.quantize.reference import quantize_recorded


def append(
    cache: KVCache,
    k: Float[Array, "b t h d"],
    v: Float[Array, "b t h d"],
    positions: Int32[Array, "b t"],
    valid: Bool[Array, "b t"],
    *,
    layer: Int32[Array, ""] | None = None,
    page_table: Int32[Array, "b pages"] | None = None,
) -> tuple[KVCache, AppendedRows | None, AppendedRows | None]:
    """See `api.append`."""
    index = entry_index(positions, valid, page_table, cache.k.shape[-4:])

    def put(old, row):
        if layer is None:
            return old.at[index].set(row, mode="drop")
        if old.dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
            # XLA:CPU scatters BF16 by way of a float32 copy of the operand: of one layer, not of the whole stack.
            alone = lax.dynamic_index_in_dim(old, layer, keepdims=False).at[index].set(row, mode="drop")
            return lax.dynamic_update_index_in_dim(old, alone, layer, 0)
        return old.at[layer, *index].set(row, mode="drop")

    def write(entries, new):
        return jax.tree.map(put, entries, new)

    if cache.format is None:
        k, v = k.astype(cache.k.dtype), v.astype(cache.v.dtype)
        return KVCache(k=write(cache.k, k), v=write(cache.v, v)), None, None
    k_rows, v_rows = quantize_recorded(k, cache.format), quantize_recorded(v, cache.format)
    return KVCache(k=write(cache.k, k_rows[0]), v=write(cache.v, v_rows[0])), k_rows, v_rows
