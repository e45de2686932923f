"""Grouped matmul in plain JAX: each group's rows are padded to whole blocks, the blocks are one batched GEMM.

`jax.lax.ragged_dot` is a dense fallback outside TPUs (every expert times every row); this does a bounded
multiple of the useful work, and a block never meets another expert's weights, so a NaN there stays there.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kernels_pallas import dots
from kernels_pallas.activations import Activation, activated
from kernels_pallas.arrays import Fp4Array, Stacked
from kernels_pallas.matmul.reference import operands, row_scale
from kernels_pallas.tiled import TiledFp4Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where each row lies in blocks of `size` rows that belong to one group each.

    Attributes:
      row: int32 [blocks, size], the row in each slot (clipped; see `filled`).
      filled: bool [blocks, size], whether the slot holds a row.
      group: int32 [blocks], the group of each block (the last group for unused blocks).
      slot: int32 [R], the flat slot of each row (0 for rows of no group).
      row_group: int32 [R], the group of each row (clipped).
      in_group: bool [R], whether the row belongs to a group.
    """

    row: Int32[Array, "b m"]
    filled: Bool[Array, "b m"]
    group: Int32[Array, " b"]
    slot: Int32[Array, " r"]
    row_group: Int32[Array, " r"]
    in_group: Bool[Array, " r"]


def block_rows(rows: int, groups: int) -> int:
    """Rows per block: the power of two at or above the mean group, between 8 and 64."""
    size = 8
    while size < 64 and size * groups < rows:
        size *= 2
    return size


def block_layout(group_sizes: Int32[Array, " e"], rows: int) -> Layout:
    """Assign `rows` rows, sorted by group, to blocks. Their number is static: enough for any group sizes."""
    groups = group_sizes.shape[0]
    size = block_rows(rows, groups)
    blocks = (rows + min(groups, rows) * (size - 1)) // size
    row_end = jnp.cumsum(group_sizes)
    group_blocks = (group_sizes + size - 1) // size
    block_end = jnp.cumsum(group_blocks)
    row_start, block_start = row_end - group_sizes, block_end - group_blocks

    def owner(index, end):  # the group whose interval, ending before `end`, holds `index`
        return jnp.minimum(jnp.sum(index[:, None] >= end[None, :], axis=1, dtype=jnp.int32), groups - 1)

    block = jnp.arange(blocks, dtype=jnp.int32)
    group = owner(block, block_end)
    within = (block - block_start[group])[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]
    index = jnp.arange(rows, dtype=jnp.int32)
    row_group = owner(index, row_end)
    in_group = index < row_end[-1]
    return Layout(
        row=jnp.clip(row_start[group][:, None] + within, 0, rows - 1),
        filled=(within < group_sizes[group][:, None]) & (block < block_end[-1])[:, None],
        group=group,
        slot=jnp.where(in_group, block_start[row_group] * size + index - row_start[row_group], 0),
        row_group=row_group,
        in_group=in_group,
    )


def to_blocks(x: Float[Array, "r n"], layout: Layout) -> Float[Array, "b m n"]:
    """Rows in their slots, zeros in slots without a row."""
    return jnp.where(layout.filled[..., None], x[layout.row], jnp.zeros((), x.dtype))


def from_blocks(blocks: Float[Array, "b m n"], layout: Layout) -> Float[Array, "r n"]:
    """Slots back to rows, zeros for rows of no group."""
    rows = blocks.reshape(-1, blocks.shape[-1])[layout.slot]
    return jnp.where(layout.in_group[:, None], rows, jnp.zeros((), blocks.dtype))


@jax.custom_vjp
def _grouped(x: Array, w: Array, group_sizes: Array) -> Array:
    layout = block_layout(group_sizes, x.shape[0])
    return from_blocks(dots.einsum("bmk,bkn->bmn", to_blocks(x, layout), w[layout.group]), layout)


def _grouped_forward(x, w, group_sizes):
    return _grouped(x, w, group_sizes), (x, w, group_sizes)


def _grouped_backward(residuals, g):
    x, w, group_sizes = residuals
    layout = block_layout(group_sizes, x.shape[0])
    g_blocks = to_blocks(g.astype(x.dtype), layout)
    dx = from_blocks(dots.einsum("bmn,bkn->bmk", g_blocks, w[layout.group]), layout)
    per_block = dots.einsum("bmk,bmn->bkn", to_blocks(x, layout), g_blocks)
    # The groups are sorted, but saying so makes XLA:GPU unroll a whole matrix per block: minutes of compilation.
    dw = jax.ops.segment_sum(per_block, layout.group, num_segments=w.shape[0])
    return dx.astype(x.dtype), dw.astype(w.dtype), None


_grouped.defvjp(_grouped_forward, _grouped_backward)


@jax.custom_vjp
def _biased(out: Array, bias: Array, group_sizes: Array) -> Array:
    layout = block_layout(group_sizes, out.shape[0])
    rows = bias[layout.row_group].astype(out.dtype)
    return out + jnp.where(layout.in_group[:, None], rows, jnp.zeros((), out.dtype))


def _biased_forward(out, bias, group_sizes):
    return _biased(out, bias, group_sizes), (bias, group_sizes)


def _biased_backward(residuals, g):
    bias, group_sizes = residuals
    layout = block_layout(group_sizes, g.shape[0])
    # Block by block in the place of autodiff's scatter-add, in which thousands of rows contend for a few addresses,
    # unordered; and by a select in the place of a GEMM with zeros and ones, which would hand a NaN to every group.
    per_block = jnp.sum(to_blocks(g, layout), axis=1)
    own = layout.group[None] == jnp.arange(bias.shape[0], dtype=jnp.int32)[:, None]
    summed = jnp.sum(jnp.where(own[..., None], per_block[None], jnp.zeros((), g.dtype)), axis=1)
    return g, summed.astype(bias.dtype), None


_biased.defvjp(_biased_forward, _biased_backward)


def grouped_matmul(
    x: Float[Array, "r k"] | Fp4Array,
    w: Float[Array, "e k n"] | Fp4Array | TiledFp4Array | Stacked,
    group_sizes: Int32[Array, " e"],
    bias: Float[Array, "e n"] | None = None,
    *,
    activation: Activation | None = None,
) -> Float[Array, "r f"]:
    """See `api.grouped_matmul`."""
    if isinstance(w, Stacked):
        w = w.slice()
    if isinstance(w, TiledFp4Array):
        w = w.untile()
    rows, groups = x.shape[0], w.shape[0]
    layout = block_layout(group_sizes, rows)
    if isinstance(w, Fp4Array) and layout.group.shape[0] < groups:
        # Fewer blocks than experts (decode): take the blocks' packed weights first and decode only those.
        x_operand, w_blocks = operands(x, jax.tree.map(lambda leaf: leaf[layout.group], w))
        out = from_blocks(dots.einsum("bmk,bkn->bmn", to_blocks(x_operand, layout), w_blocks), layout)
    else:
        out = _grouped(*operands(x, w), group_sizes)
    x_scale, w_scale = row_scale(x), row_scale(w)
    if x_scale is not None:
        out = out * x_scale[:, None]
    if w_scale is not None:
        scale = w_scale[layout.row_group]
        out = out * (scale[:, None] if scale.ndim == 1 else scale)
    if bias is not None:
        out = _biased(out, bias, group_sizes)
    return activated(out, activation)
