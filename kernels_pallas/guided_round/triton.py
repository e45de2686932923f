"""Guided values on NVIDIA GPUs: one pass over rows, a thread per block. The kernel is in `triton_kernels`."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from kernels_pallas import triton_bridge
from kernels_pallas.formats import MXFP4, NVFP4, Fp4Format
from kernels_pallas.guided_round.guide import MODES, Guide
from kernels_pallas.quantize.triton import launch_options, rounded_rows, row_refusal, small_tile
from kernels_pallas.triton_bridge import CompileCase


def values_refusal(x: jax.Array | jax.ShapeDtypeStruct, guide: Guide | None, format: Fp4Format) -> str | None:
    """Why `guided_values` does not serve these arguments, None if it does."""
    return row_refusal(x)


def guided_values(x: Shaped[Array, "..."], guide: Guide | None, format: Fp4Format) -> Shaped[Array, "..."]:
    """See `api.guided_values`."""
    from kernels_pallas.guided_round.triton_kernels import guided_values_kernel

    flat = rounded_rows(x)
    rows, size = flat.shape
    mode, compact = ("own", False) if guide is None else (guide.mode, guide.compact)
    unused = flat  # in the place of what a mode does not read
    scales = row_exponent = valid = record = unused
    if guide is not None:
        scales = guide.scales.reshape(rows, -1)
        row_exponent, valid = guide.row_exponent.reshape(rows), guide.valid.reshape(rows)
        if mode != "scale":
            record = (guide.mantissa if mode == "mantissa" else guide.words).reshape(rows, -1)
    (values,) = triton_bridge.call(
        guided_values_kernel,
        flat,
        scales,
        row_exponent,
        valid,
        record,
        rows,
        outputs=[jax.ShapeDtypeStruct((rows, size), jnp.bfloat16)],
        MODE=mode,
        COMPACT=compact,
        **launch_options(rows, size, format.block, small_tile(rows, size, format.block)),
    )
    return values.astype(x.dtype).reshape(x.shape)  # values are exact in BF16


def compile_cases() -> Iterator[CompileCase]:
    """Every mode of the kernel, without and with lanes that have no values."""

    def shape(*shape, dtype=jnp.uint8):
        return jax.ShapeDtypeStruct(shape, dtype)

    for format in (NVFP4, MXFP4):
        for rows, size in ((8192, 2048), (512, 2880)):
            x, count = shape(rows, size, dtype=jnp.bfloat16), size // format.block
            run = functools.partial(guided_values, format=format)
            yield CompileCase(f"own_values_{format.name}_{size}", functools.partial(run, guide=None), (x,))
            for mode, compact in [(mode, compact) for mode in MODES for compact in (False, True)]:
                guide = Guide(
                    scales=shape(rows, -(-count // 4) if compact else count),
                    row_exponent=shape(rows),
                    mantissa=shape(rows, size // 8),
                    words=shape(rows, size // 8, dtype=jnp.uint32),
                    valid=shape(rows, dtype=jnp.bool_),
                    mode=mode,
                    compact=compact,
                )
                name = f"guided_values_{format.name}_{size}_{mode}{'_compact' * compact}"
                yield CompileCase(name, run, (x, guide))
