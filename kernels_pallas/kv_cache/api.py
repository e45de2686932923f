"""Append to the KV cache."""

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from kernels_pallas.arrays import check_float
from kernels_pallas.implementations import Implementation, select
from kernels_pallas.kv_cache import pallas_tpu, reference, triton
from kernels_pallas.kv_cache.cache import AppendedRows, KVCache
from kernels_pallas.kv_cache.pages import check_cache

IMPLEMENTATIONS = {
    "pallas_tpu": Implementation(run=pallas_tpu.append, refusal=pallas_tpu.refusal, platform="tpu"),
    "triton": Implementation(run=triton.append, refusal=triton.refusal, platform="gpu"),
    "reference": Implementation(run=reference.append),
}


def append(
    cache: KVCache,
    k: Shaped[Array, "b t h d"],
    v: Shaped[Array, "b t h d"],
    positions: Shaped[Array, "..."],
    valid: Shaped[Array, "..."],
    *,
    layer: Shaped[Array, "..."] | None = None,
    page_table: Shaped[Array, "..."] | None = None,
    implementation: str | None = None,
) -> tuple[KVCache, AppendedRows | None, AppendedRows | None]:
    """Quantize new keys and values and write them at their positions.

    Args:
      cache: one layer's cache, [B, S, H, Dh], one row per sequence; with `page_table` a pool of pages
        [P, page_size, H, Dh]; with `layer` either with a leading axis of layers.
      k, v: [B, T, H, Dh], bfloat16 or float32, after norm and RoPE. Each (token, head) is one row.
      positions: int32 [B, T], the entry that each token is written to.
      valid: bool [B, T]; tokens that are not valid, or whose position lies outside the cache or in an unmapped
        page, are not written.
      layer: int32 scalar in [0, L); only this layer of the stacked cache is written, in place where the caller's buffer
        allows. It is not checked, since it is traced.
      page_table: int32 [B, pages]; entry s of sequence b lies in page page_table[b, s // page_size], at
        s % page_size. A negative page is unmapped, others must be below P, and two sequences may share a page only
        for entries that neither writes.

    Returns:
      The cache, and for the guidance record of keys and of values: the quantized rows as Fp4Array [B, T, H, Dh] and
      the low bits of their codes, uint8 [B, T, H, Dh / 8] (None for a BF16 cache).

    Raises:
      TypeError or ValueError for shapes or dtypes that do not fit the cache.
    """
    batch, tokens = k.shape[:2]
    heads, dim = cache.k.shape[-2:]
    if k.shape != (batch, tokens, heads, dim) or v.shape != k.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} do not fit the cache {cache.k.shape} [..., H, Dh]")
    check_float("k", k)
    check_float("v", v)
    check_cache(cache, batch, layer, page_table)
    if positions.shape != (batch, tokens) or valid.shape != (batch, tokens):
        raise ValueError(
            f"positions {positions.shape} and valid {valid.shape}; expected {(batch, tokens)} [B, T]"
        )
    if positions.dtype != jnp.int32 or valid.dtype != jnp.bool_:
        raise TypeError(f"positions is {positions.dtype} and valid is {valid.dtype}; expected int32 and bool")
    arguments, options = (cache, k, v, positions, valid), {"layer": layer, "page_table": page_table}
    return select("kv_cache", implementation, IMPLEMENTATIONS, *arguments, **options)(*arguments, **options)
