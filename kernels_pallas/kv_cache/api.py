"""Append to the KV cache."""

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from kernels_pallas.arrays import Fp4Array
from kernels_pallas.implementations import Implementation, select
from kernels_pallas.kv_cache import reference
from kernels_pallas.kv_cache.cache import KVCache

IMPLEMENTATIONS = {"reference": Implementation(run=reference.append)}


def append(
    cache: KVCache,
    k: Shaped[Array, "b t h d"],
    v: Shaped[Array, "b t h d"],
    positions: Shaped[Array, "..."],
    valid: Shaped[Array, "..."],
    *,
    implementation: str | None = None,
) -> tuple[KVCache, Fp4Array | None, Fp4Array | None]:
    """Quantize new keys and values and write them at their positions.

    Args:
      cache: one layer's cache, [B, S, H, Dh].
      k, v: [B, T, H, Dh], bfloat16 or float32, after norm and RoPE. Each (token, head) is one row.
      positions: int32 [B, T], the entry that each token is written to.
      valid: bool [B, T]; tokens that are not valid, or whose position lies outside the cache, are not
        written.

    Returns:
      The cache, and the quantized rows as Fp4Array [B, T, H, Dh] for the guidance record (None for a BF16
      cache).

    Raises:
      TypeError or ValueError for shapes or dtypes that do not fit the cache.
    """
    batch, _, heads, dim = cache.k.shape
    tokens = k.shape[1]
    if k.shape != (batch, tokens, heads, dim) or v.shape != k.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} do not fit the cache {cache.k.shape} [B, S, H, Dh]")
    if positions.shape != (batch, tokens) or valid.shape != (batch, tokens):
        raise ValueError(
            f"positions {positions.shape} and valid {valid.shape}; expected {(batch, tokens)} [B, T]"
        )
    if positions.dtype != jnp.int32 or valid.dtype != jnp.bool_:
        raise TypeError(f"positions is {positions.dtype} and valid is {valid.dtype}; expected int32 and bool")
    return select("kv_cache", implementation, IMPLEMENTATIONS, cache, k, v, positions, valid)(
        cache, k, v, positions, valid
    )
