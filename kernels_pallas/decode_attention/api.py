"""Attention of new tokens over the KV cache."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from kernels_pallas.arrays import check_float
from kernels_pallas.decode_attention import pallas_tpu, reference, triton
from kernels_pallas.implementations import Implementation, select
from kernels_pallas.kv_cache.cache import KVCache
from kernels_pallas.kv_cache.pages import check_cache

IMPLEMENTATIONS = {
    "pallas_tpu": Implementation(run=pallas_tpu.attention, refusal=pallas_tpu.refusal, platform="tpu"),
    "triton": Implementation(run=triton.attention, refusal=triton.refusal, platform="gpu"),
    "reference": Implementation(run=reference.attention),
}


def attend(
    q: Float[Array, "b t hq d"],
    k: Float[Array, "b s h d"],
    v: Float[Array, "b s h dv"],
    mask: Bool[Array, "b t s"],
    *,
    scale: float | None = None,
    sinks: Shaped[Array, "..."] | None = None,
) -> Float[Array, "b t hq dv"]:
    """Grouped-query attention of q over k and v where `mask`; what the trainer runs.

    Scores and softmax in FP32, probabilities cast to the dtype of `q` for the second GEMM, FP32 accumulation.
    Query heads hq = g x h are grouped by KV head (query head i uses KV head i // g). A query whose mask is
    all False gives zeros. `scale` multiplies the scores, d^-0.5 unless stated. `sinks`, FP32 or wider, as in
    `attention`. Differentiable; backward GEMMs have operands of the dtype of `q`.
    """
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads cannot share {k.shape[2]} KV heads; expected a multiple")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; expected one dtype: cast them")
    if sinks is not None and sinks.shape != q.shape[2:3]:
        raise ValueError(f"sinks has shape {sinks.shape}; expected {q.shape[2:3]} [Hq]")
    return reference.attend(q, k, v, mask, scale=scale, sinks=sinks)


def attention(
    q: Shaped[Array, "b t hq d"],
    cache: KVCache,
    positions: Shaped[Array, "..."],
    *,
    scale: float | None = None,
    layer: Shaped[Array, "..."] | None = None,
    page_table: Shaped[Array, "..."] | None = None,
    window: int | None = None,
    sinks: Shaped[Array, "..."] | None = None,
    implementation: str | None = None,
) -> Float[Array, "b t hq d"]:
    """Attention of `q` over the cache entries s <= position, its own entry included.

    FP4 entries are dequantized exactly to BF16. The arithmetic is that of a decode kernel: see `reference`.

    Args:
      q: [B, T, Hq, Dh]; query head i uses KV head i // (Hq / H).
      cache, layer, page_table: as in `kv_cache.append`. Entries in unmapped pages are not attended to.
      positions: int32 [B, T], of each query in its sequence; a negative one sees nothing.
      scale: multiplies the scores, Dh^-0.5 unless stated.
      window: entries that a query sees at most, its own included: only s > position - window.
      sinks: float32 [Hq], a logit per query head, scaled already, that joins the softmax's denominator and has no
        value (attention sinks of gpt-oss, arXiv 2508.10925).

    Returns:
      [B, T, Hq, Dh] in the dtype of `q`; zeros for a query that sees nothing.

    Raises:
      ValueError or TypeError for shapes or dtypes that do not fit.
    """
    heads, dim = cache.k.shape[-2:]
    if q.shape[3] != dim or q.shape[2] == 0 or q.shape[2] % heads:
        raise ValueError(f"q {q.shape} [B, T, Hq, Dh] does not fit the cache {cache.k.shape} [..., H, Dh]")
    check_float("q", q)
    check_cache(cache, q.shape[0], layer, page_table)
    if positions.dtype != jnp.int32:
        raise TypeError(f"positions is {positions.dtype}; expected int32")
    if positions.shape != q.shape[:2]:
        raise ValueError(f"positions has shape {positions.shape}; expected {q.shape[:2]} [B, T]")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; expected at least 1, the query's own entry")
    if sinks is not None and (sinks.dtype != jnp.float32 or sinks.shape != q.shape[2:3]):
        raise TypeError(f"sinks is {sinks.dtype} {sinks.shape}; expected float32 {q.shape[2:3]} [Hq]")
    options = {"scale": scale, "layer": layer, "page_table": page_table, "window": window, "sinks": sinks}
    run = select("decode_attention", implementation, IMPLEMENTATIONS, q, cache, positions, **options)
    return run(q, cache, positions, **options)
