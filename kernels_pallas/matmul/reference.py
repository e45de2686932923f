"""Matmul of BF16 and FP4 operands in plain JAX."""

from jaxtyping import Array, Float

from kernels_pallas import dots, formats
from kernels_pallas.arrays import Fp4Array, Stacked
from kernels_pallas.quantize.reference import operand
from kernels_pallas.tiled import TiledFp4Array


def operands(
    x: Float[Array, "..."] | Fp4Array, w: Float[Array, "..."] | Fp4Array
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """GEMM operands of one dtype: FP4 as code x block scale (exact in BF16), in the other operand's dtype."""
    if isinstance(x, Fp4Array) and isinstance(w, Fp4Array):
        return operand(x), operand(w)
    if isinstance(x, Fp4Array):
        return operand(x).astype(w.dtype), w
    if isinstance(w, Fp4Array):
        return x, operand(w).astype(x.dtype)
    return x, w


def row_scale(a: Float[Array, "..."] | Fp4Array | TiledFp4Array) -> Float[Array, "..."] | None:
    """Row scales to apply to the accumulator, in the shape of `row_exponent`; None if there are none."""
    if isinstance(a, Fp4Array | TiledFp4Array) and a.format.has_row_scale:
        return formats.row_scale(a.row_exponent)
    return None


def matmul(
    x: Float[Array, "..."] | Fp4Array,
    w: Float[Array, "..."] | Fp4Array | TiledFp4Array | Stacked,
    *,
    mode: str,
) -> Float[Array, "..."]:
    """See `api.matmul`."""
    del mode  # XLA's business
    w = w.slice() if isinstance(w, Stacked) else w
    w = w.untile() if isinstance(w, TiledFp4Array) else w
    left, right = operands(x, w)
    flat = left.reshape(-1, left.shape[-1])
    out = dots.einsum("mk,kn->mn", flat, right).reshape(left.shape[:-1] + right.shape[-1:])
    return with_row_scales(out, x, w)


def with_row_scales(
    out: Float[Array, "... n"], x: Float[Array, "..."] | Fp4Array, w: Float[Array, "..."] | Fp4Array
) -> Float[Array, "... n"]:
    """The accumulator of x times w under the row scales of both."""
    x_scale, w_scale = row_scale(x), row_scale(w)
    if x_scale is not None:
        out = out * x_scale[..., None]
    if w_scale is not None:
        out = out * w_scale.reshape((1,) * (out.ndim - w_scale.ndim) + w_scale.shape)
    return out
