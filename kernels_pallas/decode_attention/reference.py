"""Attention in plain JAX: `attend` for whole sequences, `attention` over the cache.

`attention` is arithmetic of a decode kernel (flash-decoding): the context in splits of a fixed size, weights
relative to each split's own maximum and unnormalised when they are cast for the second GEMM, one division at the end.
`attend` normalises first. The two agree to BF16 rounding, which is how far a trainer and a rollout engine are apart.

Both hold the scores of a block of queries at a time, at most `MAX_SCORES` unless one token of each sequence has more.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from kernels_pallas import dots
from kernels_pallas.arrays import Fp4Array
from kernels_pallas.kv_cache.cache import KVCache
from kernels_pallas.quantize.reference import dequantize

SPLIT = 128
"""Cache entries per split. Fixed, so that a row's result does not depend on the batch or on the cache's length."""
MAX_SCORES = 2**28
"""Scores that are held at a time, in FP32: 1 GiB."""


def query_blocks(
    scores: int, *arrays: Shaped[Array, "b t *_"]
) -> tuple[Shaped[Array, "blocks b size *_"], ...]:
    """`arrays` in equal blocks of tokens, of which each has at most MAX_SCORES of the `scores`, or is one token; the
    last token is repeated to fill the last block.
    """
    tokens = arrays[0].shape[1]
    largest = max(1, tokens * MAX_SCORES // scores)
    blocks = -(-tokens // largest)
    size = -(-tokens // blocks)

    def cut(a):
        a = jnp.pad(
            a, [(0, blocks * size - tokens) if i == 1 else (0, 0) for i in range(a.ndim)], mode="edge"
        )
        return jnp.moveaxis(a.reshape(a.shape[0], blocks, size, *a.shape[2:]), 1, 0)

    return tuple(map(cut, arrays))


def over_blocks(
    run: Callable[..., Shaped[Array, "b size *_"]],
    blocks: tuple[Shaped[Array, "blocks b size *_"], ...],
    tokens: int,
) -> Shaped[Array, "b t *_"]:
    """`run` of one block after another, put together again."""
    out = jnp.moveaxis(lax.map(lambda block: run(*block), blocks), 0, 1)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :tokens]


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
    tokens, q_heads = q.shape[1:3]
    # Entries that no query sees (unwritten or stale) must not reach the output even if NaN: 0 x NaN is NaN.
    v = jnp.where(mask.any(axis=1)[:, :, None, None], v, jnp.zeros((), v.dtype))

    def run(q, mask):
        return _attend(q, k, v, mask, scale=scale, sinks=sinks)

    if mask.size * q_heads <= MAX_SCORES or tokens == 1:
        return run(q, mask)
    # In a wider dtype the blocks' gradients are added up before they are rounded; the values are the same.
    k, v = (a.astype(dots.accumulator_dtype(a.dtype)) for a in (k, v))
    return over_blocks(jax.checkpoint(run), query_blocks(mask.size * q_heads, q, mask), tokens)


def _attend(q, k, v, mask, *, scale, sinks):
    """Attention over k and v that are cast to the dtype of q."""
    batch, tokens, q_heads, dim = q.shape
    heads = k.shape[2]
    grouped = q.reshape(batch, tokens, heads, q_heads // heads, dim)
    scores = dots.einsum("bthgd,bshd->bhgts", grouped, k, q.dtype) * (dim**-0.5 if scale is None else scale)
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
    out = dots.einsum("bhgts,bshd->bthgd", weights.astype(q.dtype), v, q.dtype)
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
    batch, tokens, q_heads, _ = q.shape
    k, v = entries(cache.k), entries(cache.v)
    capacity = k.shape[1] * size

    def visible(positions):
        index = jnp.arange(capacity, dtype=jnp.int32)[None, None]
        mask = (index <= positions[:, :, None]) & (index < cache.length)
        if window is not None:
            mask &= index > positions[:, :, None] - window
        if page_table is not None:
            mapped = jnp.repeat(page_table >= 0, page_size, axis=1)
            mask &= jnp.pad(mapped, ((0, 0), (0, capacity - cache.length)))[:, None]
        return mask

    def run(q, positions):
        return _attention(q, k, v, visible(positions), scale=scale, sinks=sinks)

    scores = batch * q_heads * tokens * capacity
    blocks = query_blocks(scores, q, positions) if scores > MAX_SCORES and tokens > 1 else None
    # As in `attend`, stale entries must not reach the output.
    if blocks is None:
        seen = visible(positions).any(axis=1)
    else:
        nothing = jnp.zeros((batch, capacity), bool)
        seen, _ = lax.scan(lambda seen, p: (seen | visible(p).any(axis=1), None), nothing, blocks[1])
    v = jnp.where(seen.reshape(*v.shape[:3], 1, 1), v, jnp.zeros((), v.dtype))
    return run(q, positions) if blocks is None else over_blocks(run, blocks, tokens)


def _attention(q, k, v, mask, *, scale, sinks):
    """Attention over splits k and v [B, splits, size, H, D]; mask [B, T, splits x size]."""
    batch, tokens, q_heads, dim = q.shape
    splits, size, heads = k.shape[1:4]
    mask = mask.reshape(batch, tokens, splits, size)
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
