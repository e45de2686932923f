"""Grouped matmul on TPUs: a grid step is one visit of a group to a tile of rows that holds some of its rows.

Groups are sorted, so the visits of a tile follow each other and its output stays in VMEM until the last one; the visits
of a group follow each other too, so its weights are fetched once where all of K fits a step. A visit multiplies the
whole tile and keeps its own rows by a select: what another group's weights hold never reaches them, NaN included.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

from kernels_pallas import target
from kernels_pallas.activations import Activation, activated, gated
from kernels_pallas.arrays import Fp4Array, Stacked
from kernels_pallas.contraction import COLUMNS, Contraction
from kernels_pallas.gradients import with_gradient_of
from kernels_pallas.grouped_matmul import reference
from kernels_pallas.implementations import empty_refusal
from kernels_pallas.matmul.reference import row_scale
from kernels_pallas.quantize.reference import operand
from kernels_pallas.tiled import TiledFp4Array
from kernels_pallas.tiles import LANES

LEAST_ROWS, MOST_ROWS = 16, 128


def refusal(
    x: jax.Array | jax.ShapeDtypeStruct | Fp4Array,
    w: jax.Array | jax.ShapeDtypeStruct | Fp4Array | Stacked,
    group_sizes: jax.Array | jax.ShapeDtypeStruct,
    bias: jax.Array | jax.ShapeDtypeStruct | None = None,
    *,
    activation: Activation | None = None,
) -> str | None:
    """Why this kernel does not serve these arguments, None if it does."""
    if isinstance(w, Stacked):
        w = w.array
    if isinstance(w, TiledFp4Array):
        return "its weights are not tiled, that is for GPUs"
    for name, a in (("x", x), ("w", w)):
        if not isinstance(a, Fp4Array) and a.dtype != jnp.bfloat16:
            return f"it multiplies BF16 and FP4; {name} is {a.dtype}"
    if isinstance(w, Fp4Array) and len(w.row_exponent.shape) != len(w.shape) - 2:
        return "its FP4 weights have one row scale per matrix, not one per column"
    return empty_refusal(x, w)


class Visits(NamedTuple):
    """Which group meets which tile of rows in each grid step; steps past the last visit repeat it, idle.

    `tile`, `group`, `active`: int32 [steps]. `start`, `end`: int32 [groups + 1], the rows of each group; the last
    group is that of rows past the sum of the sizes, whose visits leave zeros.
    """

    tile: Int32[Array, " steps"]
    group: Int32[Array, " steps"]
    active: Int32[Array, " steps"]
    start: Int32[Array, " groups"]
    end: Int32[Array, " groups"]


def visits(group_sizes: Int32[Array, " e"], rows: int, tile_rows: int) -> Visits:
    """The visits of `rows` rows, sorted by group, in tiles of `tile_rows`."""
    groups = group_sizes.shape[0] + 1
    sizes = jnp.append(group_sizes, rows - jnp.sum(group_sizes))
    end = jnp.cumsum(sizes)
    start = end - sizes
    first_tile = start // tile_rows
    counts = jnp.where(sizes > 0, (end - 1) // tile_rows - first_tile + 1, 0)
    visit_end = jnp.cumsum(counts)
    # A tile has a visit more than it has boundaries between groups.
    step = jnp.arange(pl.cdiv(rows, tile_rows) + min(groups, rows) - 1, dtype=jnp.int32)
    visit = jnp.minimum(step, visit_end[-1] - 1)
    group = jnp.sum(visit[:, None] >= visit_end[None], axis=1, dtype=jnp.int32)
    tile = first_tile[group] + visit - (visit_end - counts)[group]
    active = (step == visit) & (group < groups - 1)
    return Visits(tile, group, active.astype(jnp.int32), start, end)


def tile_rows(rows: int, groups: int) -> int:
    """Rows of a tile: the power of two at or above the mean group, within limits. Results do not depend on it."""
    size = LEAST_ROWS
    while size < MOST_ROWS and size * groups < rows:
        size *= 2
    return size


def tile_columns(columns: int) -> int | None:
    """Columns of a tile of gates and of one of ups, None if there is no whole number of such tiles."""
    return next((size for size in (COLUMNS, 384, 256, LANES) if columns % size == 0), None)


@with_gradient_of(reference.grouped_matmul)
def grouped_matmul(
    x: Float[Array, "r k"] | Fp4Array,
    w: Float[Array, "e k n"] | Fp4Array | Stacked,
    group_sizes: Int32[Array, " e"],
    bias: Float[Array, "e n"] | None = None,
    *,
    activation: Activation | None = None,
) -> Float32[Array, "r _"]:
    """See `api.grouped_matmul`."""
    stack, layer = (w.array, w.layer) if isinstance(w, Stacked) else (jax.tree.map(lambda a: a[None], w), 0)
    _, groups, size, columns = stack.shape
    rows = x.shape[0]
    halves = 2 if activation is not None and tile_columns(columns // 2) else 1
    width = tile_columns(columns // 2) if halves == 2 else COLUMNS
    out_columns = columns // halves
    contraction = Contraction(
        size=size,
        format=stack.format if isinstance(stack, Fp4Array) else None,
        generation=target.current().generation,
    )
    plan = visits(group_sizes, rows, tile_rows(rows, groups))
    height, chunks = tile_rows(rows, groups), contraction.step_chunks
    layer = jnp.asarray(layer, jnp.int32)
    w_scale = row_scale(stack)
    w_scale = jnp.ones(groups, jnp.float32) if w_scale is None else w_scale[layer]
    x_scale = row_scale(x)
    shift = out_columns // width  # column tiles from a gate to its up

    def weight_spec(shape, half):
        def index(n, v, k, tile, group, *_):
            return _[-1][0], jnp.minimum(group[v], groups - 1), k, n + half * shift

        return pl.BlockSpec((pl.squeezed, pl.squeezed, shape, width), index)

    def bias_spec(half):
        def index(n, v, k, tile, group, *_):
            return jnp.minimum(group[v], groups - 1), 0, n + half * shift

        return pl.BlockSpec((pl.squeezed, 1, width), index)

    weights = contraction.weights(target.left_in_hbm(stack) if isinstance(w, Stacked) else stack)
    inputs = [contraction.arranged(operand(x) if isinstance(x, Fp4Array) else x)]
    in_specs = [pl.BlockSpec((chunks, height, contraction.chunk), lambda n, v, k, tile, *_: (k, tile[v], 0))]
    if x_scale is not None:
        inputs.append(x_scale[:, None])
        in_specs.append(pl.BlockSpec((height, 1), lambda n, v, k, tile, *_: (tile[v], 0)))
    for half in range(halves):
        inputs += [array for array, _ in weights]
        in_specs += [weight_spec(step_rows, half) for _, step_rows in weights]
    if bias is not None:  # rows of FP32, each a block: its group's
        inputs += [bias.astype(jnp.float32)[:, None]] * halves
        in_specs += [bias_spec(half) for half in range(halves)]
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            contraction=contraction,
            scaled=x_scale is not None,
            biased=bias is not None,
            halves=halves,
            activation=activation if halves == 2 else None,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=7,
            grid=(pl.cdiv(out_columns, width), plan.tile.shape[0], contraction.steps),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((height, width), lambda n, v, k, tile, *_: (tile[v], n)),
            scratch_shapes=[pltpu.VMEM((height, width), jnp.float32)] * halves + contraction.scratch(width),
        ),
        out_shape=jax.ShapeDtypeStruct((rows, out_columns), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=target.interpreted(),
        name=f"grouped_matmul_{contraction.format.name if contraction.format else 'bf16'}_{halves}",
    )(*plan, w_scale * jnp.float32(contraction.unit), layer[None], *inputs)
    return activated(out, activation) if halves == 1 else out


def _kernel(
    tile,
    group,
    active,
    start,
    end,
    w_scale,
    _,
    x_ref,
    *refs,
    contraction: Contraction,
    scaled: bool,
    biased: bool,
    halves: int,
    activation: Activation | None,
):
    x_scale, refs = (refs[0], refs[1:]) if scaled else (None, refs)
    arrays = 1 if contraction.format is None else 2
    weights, refs = refs[: arrays * halves], refs[arrays * halves :]
    biases, (out_ref, *scratch) = (refs[:halves], refs[halves:]) if biased else ((), refs)
    accumulators, staged = scratch[:halves], scratch[halves:]
    visit, step = pl.program_id(1), pl.program_id(2)
    last = step == pl.num_programs(2) - 1

    @pl.when((step == 0) & ((visit == 0) | (tile[visit] != tile[jnp.maximum(visit - 1, 0)])))
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when(active[visit] == 1)
    def _():
        for half, accumulator in enumerate(accumulators):

            @pl.when(step == 0)
            def _(accumulator=accumulator):
                accumulator[...] = jnp.zeros_like(accumulator)

            half_weights = weights[half * arrays : (half + 1) * arrays]
            contraction.accumulate(x_ref, half_weights, staged, accumulator, step)

        @pl.when(last)
        def _():
            scale = w_scale[group[visit]]
            products = [accumulator[...] * scale for accumulator in accumulators]
            if scaled:
                products = [product * x_scale[...] for product in products]
            if biased:
                products = [product + bias[...] for product, bias in zip(products, biases, strict=True)]
            result = products[0] if activation is None else gated(activation, *products)
            row = tile[visit] * out_ref.shape[0] + lax.broadcasted_iota(jnp.int32, result.shape, 0)
            own = (row >= start[group[visit]]) & (row < end[group[visit]])
            out_ref[...] = jnp.where(own, result, out_ref[...])
