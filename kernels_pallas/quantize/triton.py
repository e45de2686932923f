"""Quantize rows on NVIDIA GPUs: one pass, a thread per block. The kernels are in `triton_kernels`."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Shaped, UInt8

from kernels_pallas import formats, triton_bridge
from kernels_pallas.arrays import Fp4Array
from kernels_pallas.formats import MXFP4, NVFP4, Fp4Format
from kernels_pallas.implementations import empty_refusal
from kernels_pallas.quantize.rows import options_refusal
from kernels_pallas.triton_bridge import CompileCase

MAX_ROW = 16384  # values: a program holds whole rows in registers
VALUES = 64  # of a thread; with fewer the work on each row weighs more, with more fewer threads fit
MAX_WARPS = 8
FEW_VALUES = 2**21  # up to here programs are made small, since there are too few to fill the device


class Tile(NamedTuple):
    """What one program works on: `rows` x `blocks`, powers of two; `masked` if not all of them exist."""

    rows: int
    blocks: int
    num_warps: int
    masked: bool


def row_tile(rows: int, size: int, block: int, values: int) -> Tile:
    """The tile for `rows` rows of `size` values in blocks, `values` a thread."""
    count = size // block
    blocks = 1 << (count - 1).bit_length()
    per_warp = 32 * max(1, values // block)
    tile_rows = max(1, per_warp // blocks)
    num_warps = min(max(1, blocks // per_warp), MAX_WARPS)
    return Tile(tile_rows, blocks, num_warps, bool(rows % tile_rows) or blocks != count)


def row_refusal(x: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why kernels over rows of `x` do not serve it, or anything here; None if they do."""
    if x.shape[-1] > MAX_ROW:
        return f"a row of {x.shape[-1]} values exceeds its {MAX_ROW}"
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it takes bfloat16 and float32, not {x.dtype}"
    return empty_refusal(x) or triton_bridge.unavailable()


def rounded_rows(x: Shaped[Array, "..."]) -> BFloat16[Array, "rows k"]:
    """`x` as BF16 rows. What a kernel reads is in memory, so no rounding before it is dropped."""
    if x.dtype != jnp.bfloat16:
        x = formats.round_to_bf16(x).astype(jnp.bfloat16)
    return x.reshape(-1, x.shape[-1])


def refusal(
    x: jax.Array | jax.ShapeDtypeStruct,
    format: Fp4Format,
    *,
    axis: int,
    row_axes: tuple[int, ...],
    scale_rule: str,
) -> str | None:
    """Why `quantize` does not serve these arguments, None if it does."""
    return options_refusal(axis=axis, row_axes=row_axes, scale_rule=scale_rule) or row_refusal(x)


def recorded_refusal(x: jax.Array | jax.ShapeDtypeStruct, format: Fp4Format) -> str | None:
    """Why `quantize_recorded` does not serve these arguments, None if it does."""
    return row_refusal(x)


def norm_refusal(
    x: jax.Array | jax.ShapeDtypeStruct,
    gain: jax.Array | jax.ShapeDtypeStruct,
    eps: float,
    format: Fp4Format,
) -> str | None:
    """Why `rms_norm_quantize` does not serve these arguments, None if it does."""
    if x.dtype != jnp.bfloat16:
        return f"it normalises bfloat16, not {x.dtype}"
    return row_refusal(x)


def quantize(
    x: Shaped[Array, "..."], format: Fp4Format, *, axis: int, row_axes: tuple[int, ...], scale_rule: str
) -> Fp4Array:
    """See `api.quantize`."""
    del axis, row_axes, scale_rule  # `refusal` admits one value of each
    return _quantize(x, format, record=False)[0]


def quantize_recorded(x: Shaped[Array, "..."], format: Fp4Format) -> tuple[Fp4Array, UInt8[Array, "..."]]:
    """See `api.quantize_recorded`."""
    return _quantize(x, format, record=True)


def rms_norm_quantize(
    x: Shaped[Array, "..."], gain: Shaped[Array, " k"], eps: float, format: Fp4Format
) -> tuple[BFloat16[Array, "..."], Fp4Array, UInt8[Array, "..."]]:
    """See `api.rms_norm_quantize`."""
    from kernels_pallas.quantize.triton_kernels import rms_norm_quantize_kernel

    lead, size = x.shape[:-1], x.shape[-1]
    flat = x.reshape(-1, size)
    rows = flat.shape[0]
    # The order of a row's sum follows from the tile: it must not depend on how many rows there are.
    tile = row_tile(rows, size, format.block, VALUES)
    h, *leaves, mantissa = triton_bridge.call(
        rms_norm_quantize_kernel,
        flat,
        gain.astype(jnp.bfloat16),
        rows,
        outputs=[jax.ShapeDtypeStruct((rows, size), jnp.bfloat16), *fp4_shapes(rows, size, format, True)],
        EPS=float(eps),
        **launch_options(rows, size, format.block, tile),
    )
    return h.reshape(x.shape), fp4_array(leaves, lead, format), mantissa.reshape(*lead, size // 8)


def _quantize(x: Array, format: Fp4Format, record: bool) -> tuple[Fp4Array, Array | None]:
    from kernels_pallas.quantize.triton_kernels import quantize_kernel

    lead, size = x.shape[:-1], x.shape[-1]
    x = rounded_rows(x)
    rows = x.shape[0]
    parts = triton_bridge.call(
        quantize_kernel,
        x,
        rows,
        outputs=fp4_shapes(rows, size, format, record),
        RECORD=record,
        **({} if record else {"mantissa_ptr": None}),
        **launch_options(rows, size, format.block, small_tile(rows, size, format.block)),
    )
    return fp4_array(parts[:3], lead, format), parts[3].reshape(*lead, size // 8) if record else None


def small_tile(rows: int, size: int, block: int) -> Tile:
    """`row_tile`, smaller for few rows: for kernels whose result does not depend on it."""
    return row_tile(rows, size, block, block if rows * size <= FEW_VALUES else VALUES)


def launch_options(rows: int, size: int, block: int, tile: Tile) -> dict:
    """Grid, warps and the constants that kernels over tiles of rows have in common."""
    return {
        "grid": (-(-rows // tile.rows),),
        "num_warps": tile.num_warps,
        "SIZE": size,
        "BLOCK": block,
        "ROWS": tile.rows,
        "BLOCKS": tile.blocks,
        "MASKED": tile.masked,
    }


def fp4_shapes(rows: int, size: int, format: Fp4Format, record: bool) -> list[jax.ShapeDtypeStruct]:
    """Words, scales and row exponents of FP4 rows; with `record` the low bits of their codes too."""
    shapes = [
        jax.ShapeDtypeStruct((rows, size // 8), jnp.uint32),
        jax.ShapeDtypeStruct((rows, size // format.block), jnp.uint8),
        jax.ShapeDtypeStruct((rows,), jnp.uint8),
    ]
    return [*shapes, jax.ShapeDtypeStruct((rows, size // 8), jnp.uint8)] if record else shapes


def fp4_array(leaves: list[Array], lead: tuple[int, ...], format: Fp4Format) -> Fp4Array:
    """Rows with their leading axes `lead` back."""
    words, scales, row_exponent = leaves
    return Fp4Array(
        words=words.reshape(*lead, -1),
        scales=scales.reshape(*lead, -1),
        row_exponent=row_exponent.reshape(lead),
        format=format,
    )


def compile_cases() -> Iterator[CompileCase]:
    """Every kernel at widths that make its tiles different."""
    for format in (NVFP4, MXFP4):
        for rows, size in ((8192, 2048), (64, 2880), (65536, 128), (1000, 64), (512, 8192), (16, 768)):
            x = jax.ShapeDtypeStruct((rows, size), jnp.bfloat16)
            name = f"quantize_recorded_{format.name}_{rows}x{size}"
            yield CompileCase(name, functools.partial(quantize_recorded, format=format), (x,))
        x, gain = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((2048,), jnp.float32)
        run = functools.partial(_quantize, format=format, record=False)
        yield CompileCase(f"quantize_{format.name}", run, (x,))
        run = functools.partial(rms_norm_quantize, eps=1e-6, format=format)
        yield CompileCase(f"rms_norm_quantize_{format.name}", run, (x, gain))
