"""Which implementation of each op serves this machine, and why not the others."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas import decode_attention, grouped_matmul, guided_round, kv_cache, matmul, quantize
from kernels_pallas.arrays import Stacked
from kernels_pallas.formats import NVFP4
from kernels_pallas.implementations import Implementation, explain
from kernels_pallas.kv_cache import init_cache


class Call(NamedTuple):
    """A call of an op at shapes of a real model."""

    op: str
    what: str
    table: Mapping[str, Implementation]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def shape(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def calls() -> Iterator[Call]:
    """What a rollout and a trainer of Qwen3-30B-A3B call."""
    tokens, heads = shape(256, 2048), shape(256, 1, 4, 128)
    rows = {"axis": -1, "row_axes": (-1,), "scale_rule": "amax"}
    matrices = {"axis": -2, "row_axes": (-2, -1), "scale_rule": "amax"}
    experts = shape(128, 2048, 1536)
    packed = jax.eval_shape(
        lambda w: quantize.quantize(w, NVFP4, axis=-2, row_axes=(-2, -1), implementation="reference"), experts
    )
    stack = jax.tree.map(lambda leaf: shape(48, *leaf.shape, dtype=leaf.dtype), packed)
    cache = jax.eval_shape(lambda: init_cache(256, 8192, 4, 128, NVFP4))
    sizes = shape(128, dtype=jnp.int32)
    layer = Stacked(array=stack, layer=shape(dtype=jnp.int32))
    at, valid = shape(256, 1, dtype=jnp.int32), shape(256, 1, dtype=jnp.bool_)
    nothing = {"layer": None, "page_table": None}
    q = quantize.api
    yield Call("quantize", "tokens 256 x 2048", q.IMPLEMENTATIONS, (tokens, NVFP4), rows)
    yield Call("quantize", "weights, one scale a matrix", q.IMPLEMENTATIONS, (experts, NVFP4), matrices)
    yield Call("quantize_recorded", "tokens 256 x 2048", q.RECORDED_IMPLEMENTATIONS, (tokens, NVFP4), {})
    gain = shape(2048)
    yield Call(
        "rms_norm_quantize", "tokens 256 x 2048", q.NORM_IMPLEMENTATIONS, (tokens, gain, 1e-6, NVFP4), {}
    )
    yield Call(
        "guided_round",
        "codes, for reports",
        guided_round.api.IMPLEMENTATIONS,
        (tokens, None, NVFP4),
        {"axis": -1, "row_axes": (-1,)},
    )
    yield Call(
        "guided_values",
        "tokens 256 x 2048",
        guided_round.api.VALUES_IMPLEMENTATIONS,
        (tokens, None, NVFP4),
        {},
    )
    dense = jax.tree.map(lambda leaf: shape(*leaf.shape[1:], dtype=leaf.dtype), packed)
    yield Call("matmul", "FP4 weights", matmul.api.IMPLEMENTATIONS, (tokens, dense), {"mode": "invariant"})
    for what, w in (("FP4 experts of a layer", layer), ("BF16 experts of a trainer", experts)):
        yield Call(
            "grouped_matmul",
            what,
            grouped_matmul.api.IMPLEMENTATIONS,
            (tokens, w, sizes),
            {"activation": "swiglu"},
        )
    yield Call(
        "kv_cache", "append a token", kv_cache.api.IMPLEMENTATIONS, (cache, heads, heads, at, valid), nothing
    )
    for what, count in (("decode", 1), ("prefill of 512 tokens", 512)):
        yield Call(
            "decode_attention",
            what,
            decode_attention.api.IMPLEMENTATIONS,
            (shape(256, count, 32, 128), cache, shape(256, count, dtype=jnp.int32)),
            {"scale": None, **nothing, "window": None, "sinks": None},
        )


def describe() -> str:
    """Per call, the implementation that serves it and what is against the others."""
    lines = [f"default backend: {jax.default_backend()}, {jax.devices()[0].device_kind}"]
    for call in calls():
        against = explain(call.table, *call.arguments, **call.options)
        chosen = next(name for name, reason in against.items() if reason is None)
        lines.append(f"{call.op} ({call.what}): {chosen}")
        lines += [f"    not {name}: {reason}" for name, reason in against.items() if reason is not None]
        lines += [f"    also {name}" for name, reason in against.items() if reason is None and name != chosen]
    return "\n".join(lines)
