"""FP4-weight matmul on TPUs: weights stay in 4 bits until they are in VMEM, tile by tile along K."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32

from kernels_pallas import target
from kernels_pallas.arrays import Fp4Array, Stacked
from kernels_pallas.contraction import COLUMNS, Contraction
from kernels_pallas.gradients import with_gradient_of
from kernels_pallas.implementations import empty_refusal
from kernels_pallas.matmul import reference
from kernels_pallas.quantize.reference import operand
from kernels_pallas.tiled import TiledFp4Array

ROWS, LEAST_ROWS = 256, 16


def refusal(
    x: jax.Array | jax.ShapeDtypeStruct | Fp4Array,
    w: jax.Array | jax.ShapeDtypeStruct | Fp4Array | TiledFp4Array | Stacked,
    *,
    mode: str,
) -> str | None:
    """Why this kernel does not serve these arguments, None if it does."""
    if isinstance(w, TiledFp4Array):
        return "its weights are not tiled, that is for GPUs"
    if isinstance(w, Stacked):
        return "XLA multiplies layers of a stack of arrays"
    if not isinstance(w, Fp4Array):
        return "its weights are FP4; XLA multiplies plain arrays"
    if not isinstance(x, Fp4Array) and x.dtype != jnp.bfloat16:
        return f"it multiplies BF16 or FP4 rows, not {x.dtype}"
    return empty_refusal(x, w)


@with_gradient_of(reference.matmul)
def matmul(x: Float[Array, "..."] | Fp4Array, w: Fp4Array, *, mode: str) -> Float32[Array, "..."]:
    """See `api.matmul`. Tiles and the order of sums do not depend on the rows: both modes are one."""
    rows = operand(x) if isinstance(x, Fp4Array) else x
    contraction = Contraction(size=w.shape[0], format=w.format, generation=target.current().generation)
    out = _multiply(rows.reshape(-1, rows.shape[-1]), w, contraction)
    out = out.reshape(*rows.shape[:-1], w.shape[1]) * jnp.float32(contraction.unit)
    return reference.with_row_scales(out, x, w)


def _multiply(x: jax.Array, w: Fp4Array, contraction: Contraction) -> jax.Array:
    (rows, _), columns = x.shape, w.shape[1]
    tile = min(ROWS, pl.cdiv(rows, LEAST_ROWS) * LEAST_ROWS)
    chunks = contraction.step_chunks
    weights = contraction.weights(w)
    return pl.pallas_call(
        functools.partial(_kernel, contraction=contraction),
        grid=(pl.cdiv(rows, tile), pl.cdiv(columns, COLUMNS), contraction.steps),
        in_specs=[
            pl.BlockSpec((chunks, tile, contraction.chunk), lambda m, n, k: (k, m, 0)),
            *(pl.BlockSpec((size, COLUMNS), lambda m, n, k: (k, n)) for _, size in weights),
        ],
        out_specs=pl.BlockSpec((tile, COLUMNS), lambda m, n, k: (m, n)),
        scratch_shapes=contraction.scratch(COLUMNS),
        out_shape=jax.ShapeDtypeStruct((rows, columns), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=target.interpreted(),
        name=f"matmul_{w.format.name}",
    )(contraction.arranged(x), *(array for array, _ in weights))


def _kernel(x_ref, words_ref, scales_ref, out_ref, staged, *, contraction: Contraction):
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)

    contraction.accumulate(x_ref, (words_ref, scales_ref), (staged,), out_ref, step)
