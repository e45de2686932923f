"""Attention of new tokens over the KV cache."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from kernels_pallas.decode_attention import reference
from kernels_pallas.implementations import Implementation, select
from kernels_pallas.kv_cache.cache import KVCache

IMPLEMENTATIONS = {"reference": Implementation(run=reference.attention)}


def attend(
    q: Float[Array, "b t hq d"],
    k: Float[Array, "b s h d"],
    v: Float[Array, "b s h dv"],
    mask: Bool[Array, "b t s"],
    *,
    scale: float | None = None,
) -> Float[Array, "b t hq dv"]:
    """Grouped-query attention of q over k and v where `mask`; what the trainer runs.

    Scores and softmax in FP32, probabilities cast to the dtype of `q` for the second GEMM, FP32 accumulation.
    Query heads hq = g x h are grouped by KV head (query head i uses KV head i // g). A query whose mask is
    all False gives zeros. `scale` multiplies the scores, d^-0.5 unless stated. Differentiable; backward GEMMs
    have operands of the dtype of `q`.
    """
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads cannot share {k.shape[2]} KV heads; expected a multiple")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; expected one dtype: cast them")
    return reference.attend(q, k, v, mask, scale=scale)


def attention(
    q: Float[Array, "b t hq d"],
    cache: KVCache,
    positions: Shaped[Array, "b t"],
    *,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "b t hq d"]:
    """Attention of `q` at `positions` (int32) over cache entries s <= position, its own entry included.

    FP4 entries are dequantized exactly to BF16. The arithmetic is that of a decode kernel: see `reference`.
    ValueError or TypeError for shapes or dtypes that do not fit.
    """
    if q.shape[0] != cache.k.shape[0] or q.shape[3] != cache.k.shape[3] or q.shape[2] % cache.k.shape[2]:
        raise ValueError(f"q {q.shape} [B, T, Hq, Dh] does not fit the cache {cache.k.shape} [B, S, H, Dh]")
    if positions.dtype != jnp.int32:
        raise TypeError(f"positions is {positions.dtype}; expected int32")
    run = select("decode_attention", implementation, IMPLEMENTATIONS, q, cache, positions, scale=scale)
    return run(q, cache, positions, scale=scale)
