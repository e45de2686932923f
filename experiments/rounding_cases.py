"""Rounding, and writes to a cache, beside copies: cases of `experiments.bench_kernels`."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from experiments.kernel_cases import Case, attention_arguments, normal, weight_bytes
from kernels_pallas.formats import MXFP4, NVFP4, Fp4Format
from kernels_pallas.guided_round import Guide, guided_values
from kernels_pallas.kv_cache import KVCache, append
from kernels_pallas.quantize import quantize, quantize_recorded, rms_norm_quantize


def rounding_cases() -> Iterator[Case]:
    """One pass over rows, against a copy of as many bytes."""
    rows, width = 65536, 2048
    values = rows * width
    for format in (NVFP4, MXFP4):
        packed = weight_bytes(format, rows, width) + rows
        for op, run, extra in (
            ("quantize", functools.partial(quantize, format=format), 0),
            ("quantize and record", functools.partial(quantize_recorded, format=format), values // 8),
            (
                "RMSNorm, quantize and record",
                lambda x, format=format: rms_norm_quantize(x, jnp.ones(width), 1e-6, format),
                values // 8 + 2 * values,
            ),
        ):
            recorded = op == "quantize and record"
            yield Case(
                op=op,
                shape=f"{format.name} {rows} x {width}",
                ours=run,
                arguments=lambda: (normal(rows, width),),
                bytes=2 * values + packed + extra,
                must=0.6 if recorded else None,
                aim=0.8 if recorded else None,
                bandwidth=True,
            )
        yield Case(
            op="guided rounding",
            shape=f"{format.name} {rows} x {width}, 1 bit",
            ours=functools.partial(_guided, format),
            arguments=lambda format=format: (
                normal(rows, width),
                *_record(format, normal(rows, width, seed=1)),
            ),
            bytes=4 * values + values // 8 + values // format.block + 2 * rows,
            bandwidth=True,
        )
    for format in (NVFP4, MXFP4):
        yield Case(
            op="append",
            shape=f"qwen3_30b_a3b {format.name} 1 token x batch 256",
            ours=_append,
            arguments=functools.partial(_append_arguments, format),
            baselines={"bf16 cache": _append},
            baseline_arguments=functools.partial(_append_arguments, None),
            bytes=2 * 256 * (2 * 4 * 128 + 4 * weight_bytes(format, 128)),
            carried=True,
            must=1 / 1.5,
            aim=1 / 1.1,
        )


def _record(format: Fp4Format, x: jax.Array) -> tuple[Any, ...]:
    q, mantissa = jax.jit(functools.partial(quantize_recorded, format=format))(x)
    return q.scales, q.row_exponent, mantissa


def _guided(format: Fp4Format, x: jax.Array, scales: jax.Array, exponent: jax.Array, mantissa: jax.Array):
    valid = jnp.ones(exponent.shape, bool)
    guide = Guide(scales=scales, row_exponent=exponent, mantissa=mantissa, valid=valid, mode="mantissa")
    return guided_values(x, guide, format)


def _append_arguments(format: Fp4Format | None) -> tuple[Any, ...]:
    _, cache, _ = attention_arguments(format, 256, 1024, 4, 32, 128)
    positions = jnp.arange(256, dtype=jnp.int32)[:, None]
    return cache, normal(256, 1, 4, 128), positions, jnp.ones(positions.shape, bool)


def _append(cache: KVCache, new: jax.Array, positions: jax.Array, valid: jax.Array) -> KVCache:
    return append(cache, new, new, positions, valid)[0]
