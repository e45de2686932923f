"""Attention in plain JAX; rollout and trainer run the same `attend`."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kernels_pallas import dots
from kernels_pallas.arrays import Fp4Array
from kernels_pallas.kv_cache.cache import KVCache
from kernels_pallas.quantize.reference import dequantize


def attend(
    q: Float[Array, "b t hq d"],
    k: Float[Array, "b s h d"],
    v: Float[Array, "b s h dv"],
    mask: Bool[Array, "b t s"],
    *,
    scale: float | None = None,
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
    weights = jnp.exp(scores - jnp.where(peak == -jnp.inf, 0.0, peak))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0.0, 1.0, total)  # a query that sees nothing gives zeros
    out = dots.einsum("bhgts,bshd->bthgd", weights.astype(q.dtype), v)
    return out.reshape(batch, tokens, q_heads, v.shape[-1]).astype(q.dtype)


def attention(
    q: Float[Array, "b t hq d"], cache: KVCache, positions: Int32[Array, "b t"], *, scale: float | None = None
) -> Float[Array, "b t hq d"]:
    """See `api.attention`."""

    def entries(a):
        return (dequantize(a) if isinstance(a, Fp4Array) else a).astype(q.dtype)

    mask = jnp.arange(cache.length, dtype=jnp.int32)[None, None] <= positions[:, :, None]
    return attend(q, entries(cache.k), entries(cache.v), mask, scale=scale)
