"""Where the entries of a cache lie: in one row per sequence, or in pages that a table names."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, Shaped

from kernels_pallas.arrays import Fp4Array
from kernels_pallas.kv_cache.cache import KVCache


def check_cache(
    cache: KVCache,
    batch: int,
    layer: Shaped[Array, "..."] | None,
    page_table: Shaped[Array, "..."] | None,
) -> None:
    """TypeError or ValueError unless cache, layer and page table fit together and hold `batch` sequences."""
    shape = cache.k.shape
    kinds = [
        (a.format.name if isinstance(a, Fp4Array) else str(a.dtype), a.shape) for a in (cache.k, cache.v)
    ]
    if kinds[0] != kinds[1]:
        raise ValueError(f"the cache's k is {kinds[0]} and its v {kinds[1]}; expected the same twice")
    if batch == 0 or 0 in shape:
        raise ValueError(f"{batch} sequences over a cache {shape}; expected no axis of size 0")
    expected = "[P, page_size, H, Dh]" if page_table is not None else "[B, S, H, Dh]"
    if layer is not None:
        expected = f"[L, {expected[1:]}"
        if layer.dtype != jnp.int32 or layer.shape != ():
            raise TypeError(f"layer is {layer.dtype} of shape {layer.shape}; expected an int32 scalar")
    if len(shape) != expected.count(",") + 1:
        raise ValueError(f"cache {shape} has {len(shape)} axes; expected {expected}")
    if page_table is None:
        if shape[-4] != batch:
            raise ValueError(f"{batch} sequences do not fit the cache {shape}; expected {expected}")
        return
    if page_table.dtype != jnp.int32:
        raise TypeError(f"page_table is {page_table.dtype}; expected int32")
    if page_table.ndim != 2 or page_table.shape[0] != batch or page_table.shape[1] == 0:
        raise ValueError(
            f"page_table has shape {page_table.shape}; expected [{batch}, pages], at least one page"
        )


def entry_index(
    positions: Int32[Array, "b t"],
    valid: Bool[Array, "b t"],
    page_table: Int32[Array, "b pages"] | None,
    shape: tuple[int, ...],
) -> tuple[Int32[Array, "b _"], Int32[Array, "b t"]]:
    """Indices into the leading axes (rows or pages, entries) of a cache of `shape` for writing.

    Scatters wrap negative indices around: whatever must not be written goes past the end, to be dropped.
    """
    rows, size = shape[:2]
    if page_table is None:
        index = jnp.where(valid & (positions >= 0) & (positions < size), positions, size)
        return jnp.arange(rows, dtype=jnp.int32)[:, None], index
    capacity = page_table.shape[1] * size
    inside = valid & (positions >= 0) & (positions < capacity)
    position = jnp.clip(positions, 0, capacity - 1)
    page = jnp.take_along_axis(page_table, position // size, axis=1)
    return jnp.where(inside & (page >= 0), page, rows), position % size


def write(
    cache: Any,
    rows: Any,
    index: tuple[Int32[Array, "b _"], Int32[Array, "b t"]],
    layer: Int32[Array, ""] | None,
) -> Any:
    """The cache with `rows`, a tree like it, written at `index` in plain JAX; of `layer` only, if it is stacked."""

    def put(old, row):
        if layer is None:
            return old.at[index].set(row, mode="drop")
        if old.dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
            # XLA:CPU scatters BF16 by way of a float32 copy of the operand: of one layer, not of the whole stack.
            alone = lax.dynamic_index_in_dim(old, layer, keepdims=False).at[index].set(row, mode="drop")
            return lax.dynamic_update_index_in_dim(old, alone, layer, 0)
        return old.at[layer, *index].set(row, mode="drop")

    return jax.tree.map(put, cache, rows)
