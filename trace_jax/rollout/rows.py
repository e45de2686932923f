"""Rows as byte strings: everything a fed row leaves behind, side by side in one array.

A row's record is dozens of small arrays (per layer: bits, scales, exponents). Moving and placing them one by one costs
the host far more than their bytes do. As one string per row they cross to the host in one copy and are put into place
by one indexed assignment; unpacking gives views, not copies.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Field:
    """One leaf of a row: `layers` values of `shape`; `layers` is None for a leaf without a layer axis."""

    dtype: np.dtype
    layers: int | None
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return (1 if self.layers is None else self.layers) * math.prod(self.shape) * self.dtype.itemsize


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRows:
    """`data` uint8 `[..., R]`; the static rest says what the R bytes of a row are: the leaves of `treedef` in order."""

    data: Any
    treedef: Any = dataclasses.field(metadata={"static": True})
    fields: tuple[Field, ...] = dataclasses.field(metadata={"static": True})

    def offset(self, index: int) -> slice:
        """Bytes of leaf `index`."""
        start = sum(field.nbytes for field in self.fields[:index])
        return slice(start, start + self.fields[index].nbytes)


def pack_rows(by_layer: Any, plain: Any) -> PackedRows:
    """Packs rows inside a jitted function.

    Args:
        by_layer: tree of leaves `[L, B, T, ...]`.
        plain: tree of leaves `[B, T, ...]`.

    Returns:
        Rows `[B, T, R]` of the tree `(by_layer, plain)`.
    """
    parts, fields = [], []
    for tree, has_layers in ((by_layer, True), (plain, False)):
        for leaf in jax.tree.leaves(tree):
            layers, rows = (leaf.shape[0], jnp.moveaxis(leaf, 0, 2)) if has_layers else (None, leaf)
            fields.append(Field(np.dtype(leaf.dtype), layers, tuple(leaf.shape[3 if has_layers else 2 :])))
            if rows.dtype.itemsize > 1:
                rows = jax.lax.bitcast_convert_type(rows, jnp.uint8)
            parts.append(rows.reshape(*rows.shape[:2], -1))
    return PackedRows(jnp.concatenate(parts, axis=-1), jax.tree.structure((by_layer, plain)), tuple(fields))


def unpack_rows(rows: np.ndarray, packed: PackedRows) -> Any:
    """The tree `(by_layer, plain)` of views into host `rows` uint8 `[N, S, R]`, laid out like `packed`."""
    leaves = []
    for index, field in enumerate(packed.fields):
        part = rows[..., packed.offset(index)].view(field.dtype)
        if field.layers is None:
            leaves.append(part.reshape(*rows.shape[:2], *field.shape))
        else:
            part = part.reshape(*rows.shape[:2], field.layers, *field.shape)
            leaves.append(np.moveaxis(part, 2, 0))
    return jax.tree.unflatten(packed.treedef, leaves)
