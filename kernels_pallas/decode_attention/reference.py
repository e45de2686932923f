"""Attention in plain JAX: `attend` for whole sequences, `attention` over the cache.

`attention` is arithmetic of a decode kernel (flash-decoding): the context in splits of a fixed size, weights
relative to each split's own maximum and unnormalised when they are cast for the second GEMM, one division at the end.
`attend` normalises first. The two agree to BF16 rounding, which is how far a trainer and a rollout engine are apart.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from kernels_pallas import dots
from kernels_pallas.arrays import Fp4Array
from kernels_pallas.kv_cache.cache import KVCache
from kernels_pallas.quantize.reference import dequantize

SPLIT = 128
"""Cache entries per split. Fixed, so that a row's result does not depend on the batch or on the cache's length."""


def attend(
    q: Float[Array, "b t hq d"],
    k: Float[Array, "b s h d"],
    v: Float[Array, "b s h dv"],
    mask: Bool[Array, "b t s"],
    *,
    scale: float | None = None,
    sinks: Float[Array, " hq"] | None = None,
) -> Float[Array, "b t hq dv"]:
    """See `api.attend`."""
    batch, tokens, q_heads, dim = q.shape
    heads = k.shape[2]
    # Entries that no query sees (unwritten or stale) must not reach the output even if NaN: 0 x NaN is NaN.
    v = jnp.where(mask.any(axis=1)[:, :, None, None], v, jnp.zeros((), v.dtype))
    grouped = q.reshape(batch, tokens, heads, q_heads // heads, dim)
    scores = dots.einsum("bthgd,bshd->bhgts", grouped, k) * (dim**-0.5 if scale is None else scale)
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.reshape(1, heads, -1, 1, 1)
        peak = jnp.maximum(peak, sinks)
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - peak)
    weights = weights / jnp.where(total == 0.0, 1.0, total)  # a query that sees nothing gives zeros
    out = dots.einsum("bhgts,bshd->bthgd", weights.astype(q.dtype), v)
    return out.reshape(batch, tokens, q_heads, v.shape[-1]).astype(q.dtype)


def sequences(
    cache: KVCache, layer: Int32[Array, ""] | None, page_table: Int32[Array, "b pages"] | None
) -> KVCache:
    """The cache [B, S, H, Dh] of one layer, pages put side by side; unmapped ones hold anything."""

    def select(leaf):
        if page_table is None:
            return leaf if layer is None else lax.dynamic_index_in_dim(leaf, layer, keepdims=False)
        pages = jnp.maximum(page_table, 0)
        leaf = leaf[pages] if layer is None else leaf[layer, pages]
        return leaf.reshape(leaf.shape[0], -1, *leaf.shape[3:])

    return jax.tree.map(select, cache)


def attention(
    q: Float[Array, "b t hq d"],
    cache: KVCache,
    positions: Int32[Array, "b t"],
    *,
    scale: float | None = None,
    layer: Int32[Array, ""] | None = None,
    page_table: Int32[Array, "b pages"] | None = None,
    window: int | None = None,
    sinks: Float32[Array, " hq"] | None = None,
) -> Float[Array, "b t hq d"]:
    """See `api.attention`."""

    def entries(a):
        a = (dequantize(a) if isinstance(a, Fp4Array) else a).astype(q.dtype)
        a = jnp.pad(a, ((0, 0), (0, -cache.length % size), (0, 0), (0, 0)))
        return a.reshape(a.shape[0], -1, size, *a.shape[2:])

    page_size = cache.length
    cache = sequences(cache, layer, page_table)
    size = min(SPLIT, cache.length)  # a short cache is one split, not padded to a whole one
    batch, tokens, q_heads, dim = q.shape
    k, v = entries(cache.k), entries(cache.v)
    splits, heads = k.shape[1], k.shape[3]
    index = jnp.arange(splits * size, dtype=jnp.int32)[None, None]
    mask = (index <= positions[:, :, None]) & (index < cache.length)
    if window is not None:
        mask &= index > positions[:, :, None] - window
    if page_table is not None:
        mapped = jnp.repeat(page_table >= 0, page_size, axis=1)
        mask &= jnp.pad(mapped, ((0, 0), (0, splits * size - cache.length)))[:, None]
    mask = mask.reshape(batch, tokens, splits, size)
    seen = mask.any(axis=1)[..., None, None]
    v = jnp.where(seen, v, jnp.zeros((), v.dtype))  # as in `attend`: stale entries must not reach the output
    grouped = q.reshape(batch, tokens, heads, q_heads // heads, dim)
    scores = dots.einsum("bthgd,bnshd->bhgtns", grouped, k) * (dim**-0.5 if scale is None else scale)
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(peak == -jnp.inf, 0.0, peak))
    partial = dots.einsum("bhgtns,bnshd->bhgtnd", weights.astype(q.dtype), v)
    # Combine the splits: each has its own maximum.
    top = jnp.max(peak, axis=-2, keepdims=True)
    if sinks is not None:
        sinks = sinks.reshape(1, heads, -1, 1, 1, 1)
        top = jnp.maximum(top, sinks)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    share = jnp.exp(peak - top)
    total = jnp.sum(share * jnp.sum(weights, axis=-1, keepdims=True), axis=-2)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)[..., 0, :]
    out = jnp.sum(share * partial, axis=-2) / jnp.where(total == 0.0, 1.0, total)
    return jnp.moveaxis(out, 3, 1).reshape(batch, tokens, q_heads, dim).astype(q.dtype)
