"""MXFP4 expert matrices as gpt-oss checkpoints store them, to and from packed arrays, without unpacking a code.

A checkpoint holds `[E, N, K / 32, 16]` bytes of codes, the earlier of two in the low nibble, and `[E, N, K / 32]` E8M0
bytes: four bytes are one word of `Fp4Array`, which has the output axis last.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Shaped, UInt8

from kernels_pallas.arrays import Fp4Array
from kernels_pallas.formats import MXFP4, ROW_EXPONENT_BIAS

BLOCK_BYTES = MXFP4.block // 2


def from_blocks(
    blocks: UInt8[Array, "..."] | UInt8[np.ndarray, "..."],
    scales: UInt8[Array, "..."] | UInt8[np.ndarray, "..."],
) -> Fp4Array:
    """Packed matrices `[E, K, N]`, one row per matrix, of a checkpoint's tensors.

    Args:
        blocks: `[E, N, K / 32, 16]`.
        scales: `[E, N, K / 32]`.

    Codes and scales are those of the checkpoint, but for -0 (code 8): it becomes 0, since no quantizer here writes it,
    and a trainer that rounds the same values would seem to differ. Every dequantized value is equal.

    Raises:
        ValueError: shapes that do not fit together.
    """
    if blocks.shape != (*scales.shape, BLOCK_BYTES):
        raise ValueError(
            f"blocks {blocks.shape} and scales {scales.shape} do not fit; expected [E, N, K / 32, {BLOCK_BYTES}] and "
            "[E, N, K / 32]"
        )
    experts, columns, _ = scales.shape
    words = lax.bitcast_convert_type(jnp.asarray(blocks).reshape(experts, columns, -1, 4), jnp.uint32)
    words = without_negative_zero(words)
    return Fp4Array(
        words=jnp.swapaxes(words, 1, 2),
        scales=jnp.swapaxes(jnp.asarray(scales), 1, 2),
        row_exponent=jnp.full(experts, ROW_EXPONENT_BIAS, jnp.uint8),
        format=MXFP4,
        axis=-2,
    )


def to_blocks(w: Fp4Array) -> tuple[UInt8[Array, "E N blocks bytes"], UInt8[Array, "E N blocks"]]:
    """Inverse of `from_blocks`.

    Raises:
        ValueError: `w` is not MXFP4 of `[E, K, N]` matrices along K.
    """
    if w.format != MXFP4 or w.axis != -2 or w.ndim != 3:
        raise ValueError(
            f"cannot store {w.format.name} of shape {w.shape} along axis {w.axis} as MXFP4 blocks; expected mxfp4 "
            "[E, K, N] along -2"
        )
    scales = jnp.swapaxes(w.scales, 1, 2)
    raw = lax.bitcast_convert_type(jnp.swapaxes(w.words, 1, 2), jnp.uint8)
    return raw.reshape(*scales.shape, BLOCK_BYTES), scales


def without_negative_zero(words: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """uint32 words of 8 codes, each code 8 (-0) replaced by 0."""
    nonzero = (words | words >> jnp.uint32(1) | words >> jnp.uint32(2)) & jnp.uint32(0x11111111)
    return words & (jnp.uint32(0x77777777) | nonzero << jnp.uint32(3))


def split_pairs(
    x: Shaped[Array, "..."] | Shaped[np.ndarray, "..."], axis: int
) -> Shaped[Array, "..."] | Shaped[np.ndarray, "..."]:
    """Interleaved gate and up columns (g0, u0, g1, u1, ...) along `axis` as all gates, then all ups."""
    if x.shape[axis] % 2:
        raise ValueError(f"axis {axis} of {x.shape} has an odd size; expected pairs of gate and up columns")
    order = np.arange(x.shape[axis]).reshape(-1, 2).T.reshape(-1)
    return x.take(order, axis)


def join_pairs(
    x: Shaped[Array, "..."] | Shaped[np.ndarray, "..."], axis: int
) -> Shaped[Array, "..."] | Shaped[np.ndarray, "..."]:
    """Inverse of `split_pairs`."""
    order = np.arange(x.shape[axis]).reshape(2, -1).T.reshape(-1)
    return x.take(order, axis)
