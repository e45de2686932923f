"""Matmuls of rows, grouped or not, with tiled FP4 weights: the calls of the kernels in `triton_matmul`."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas import triton_bridge
from kernels_pallas.activations import Activation, ClampedSwiglu
from kernels_pallas.arrays import Fp4Array, Stacked
from kernels_pallas.formats import Fp4Format
from kernels_pallas.quantize.reference import operand, quantize
from kernels_pallas.tiled import TiledFp4Array, tile


def launch(
    x: Any,
    w: Any,
    group_sizes: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Activation | None = None,
    split: int = 1,
    columns: int = 128,
) -> Float[Array, "s r n"]:
    """The kernel on weights that are BF16 or tiled: the result, or `split` partial sums over parts of K, to which no
    bias and no activation apply yet.
    """
    from kernels_pallas.triton_matmul import grouped_kernel

    matrices = w.array if isinstance(w, Stacked) else w
    rows, (groups, k, n) = x.shape[0], w.shape
    scaled = isinstance(x, Fp4Array) and x.format.has_row_scale
    exponents = x.row_exponent if scaled else group_sizes
    x = operand(x) if isinstance(x, Fp4Array) else x
    if isinstance(matrices, TiledFp4Array):
        arrays = [x, exponents, matrices.words, matrices.scales, matrices.row_exponent]
        format, padded = matrices.format.name, matrices.padded
    else:
        arrays = [x, exponents, matrices, group_sizes, group_sizes]
        format, padded = "bf16", (k, n)
    clamped = isinstance(activation, ClampedSwiglu)
    tiles = _tiles(rows, groups, format != "bf16", columns)
    # Every group may end in a block that is not full; rows of no group are a group too.
    row_blocks = (rows + min(groups + 1, rows) * (tiles["BLOCK_M"] - 1)) // tiles["BLOCK_M"]
    return triton_bridge.call(
        grouped_kernel,
        *arrays,
        group_sizes,
        w.layer if isinstance(w, Stacked) else group_sizes,
        group_sizes if bias is None else bias,
        outputs=[jax.ShapeDtypeStruct((split, rows, n if activation is None else n // 2), jnp.float32)],
        grid=(row_blocks * -(-padded[1] // tiles["BLOCK_N"]), split),
        num_warps=tiles["WARPS"],
        num_stages=tiles["STAGES"],
        ROWS=rows,
        N=n,
        K=k,
        N_PADDED=padded[1],
        K_PADDED=padded[0],
        GROUPS=groups,
        GROUPS_POW2=1 << groups.bit_length(),
        FORMAT=format,
        GATED=activation is not None,
        X_SCALED=scaled,
        LAYERED=isinstance(w, Stacked),
        BIASED=bias is not None,
        CLAMPED=clamped,
        ALPHA=float(activation.alpha) if clamped else 0.0,
        LIMIT=float(activation.limit) if clamped else 0.0,
        SPLIT=split,
        **tiles,
    )[0]


def _tiles(rows: int, groups: int, fp4: bool, columns: int) -> dict[str, int]:
    """Tile sizes by the mean group, measured on an H200. None changes in which order a sum is taken."""
    mean = -(-rows // groups)
    if mean <= 64:
        height = 16 if mean <= 16 else 32 if mean <= 32 else 64
        deep = {"BLOCK_M": height, "BLOCK_K": 128 if fp4 or height == 16 else 64, "WARPS": 4}
    else:
        deep = {"BLOCK_M": 256 if mean > 128 else 128, "BLOCK_K": 64, "WARPS": 8}
    deep["WARPS"] = min(deep["WARPS"], columns // 16)
    # Words of 64 values of K at a time: more of them, decoded, do not fit a thread's registers.
    stages = 4 if fp4 and not 16 < mean <= 64 else 3
    return {"BLOCK_N": columns, "PARTS": deep["BLOCK_K"] // 64, "STAGES": stages, **deep}


def decoded(w: TiledFp4Array) -> Float[Array, "n2 k2"]:
    """Operand of a matrix, code x block scale in BF16, transposed and filled up; `w.row_exponent` is left to apply."""
    from kernels_pallas.triton_matmul import operand_kernel

    k, n = w.padded
    return triton_bridge.call(
        operand_kernel,
        w.words,
        w.scales,
        outputs=[jax.ShapeDtypeStruct((n, k), jnp.bfloat16)],
        grid=(n // 64, k // 128),
        num_warps=4,
        K_PADDED=k,
        FORMAT=w.format.name,
        BLOCK_N=64,
        BLOCK_K=128,
        WARPS=4,
    )[0]


def tiled_weights(format: Fp4Format, gated: bool, w: Float[Array, "... k n"]) -> TiledFp4Array:
    """Quantized weights, one row scale per matrix, tiled."""
    return tile(quantize(w, format, axis=-2, row_axes=(-2, -1)), gated=gated)
