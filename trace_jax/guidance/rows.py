"""Rows as byte strings: everything a fed row leaves behind, side by side in one array.

A row's record is dozens of small arrays (per layer: bits, scales, exponents). Moving and placing them one by one costs
the host far more than their bytes do. As one string per layer they leave a layer in one write, as one string per row
they cross to the host and back in one copy and are put into place by one indexed assignment; unpacking gives views.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Leaf = tuple[np.dtype, tuple[int, ...]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerRows:
    """One layer's share of the rows: `data` uint8 `[B, T, R]`, or `[L, B, T, R]` once layers are stacked.

    The static rest says what the R bytes are: the leaves of `treedef`, dtype and shape of one value each.
    """

    data: Any
    treedef: Any = dataclasses.field(metadata={"static": True})
    leaves: tuple[Leaf, ...] = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Field:
    """Where one leaf lies in a row: a value of `shape` at byte `start + layer * pitch + offset`, for every layer.

    `layers` is None for a leaf without a layer axis.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    layers: int | None
    start: int
    pitch: int
    offset: int

    @property
    def count(self) -> int:
        """Values side by side."""
        return 1 if self.layers is None else self.layers

    @property
    def nbytes(self) -> int:
        """Bytes of one value."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def bytes(self) -> slice:
        """The bytes of a row that hold this leaf's layers and whatever lies between them."""
        return slice(self.start, self.start + self.count * self.pitch)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRows:
    """`data` uint8 `[..., R]`; the static rest says what the R bytes of a row are: the leaves of `treedef` in order."""

    data: Any
    treedef: Any = dataclasses.field(metadata={"static": True})
    fields: tuple[Field, ...] = dataclasses.field(metadata={"static": True})


def pack_layer(tree: Any) -> LayerRows:
    """Packs one layer's leaves `[B, T, ...]` inside a jitted function."""
    leaves = jax.tree.leaves(tree)
    data = jnp.concatenate([_to_bytes(leaf, 2) for leaf in leaves], axis=-1)
    shapes = tuple((np.dtype(leaf.dtype), tuple(leaf.shape[2:])) for leaf in leaves)
    return LayerRows(data, jax.tree.structure(tree), shapes)


def pack_rows(by_layer: Any, plain: Any) -> PackedRows:
    """Packs rows inside a jitted function.

    Args:
        by_layer: tree of leaves `[L, B, T, ...]`, or of stacked LayerRows in their place.
        plain: tree of leaves `[B, T, ...]`.

    Returns:
        Rows `[B, T, R]` of the tree `(by_layer, plain)`.
    """
    parts, fields, start = [], [], 0
    for tree, has_layers in ((by_layer, True), (plain, False)):
        for leaf in jax.tree.leaves(tree, is_leaf=_is_layer_rows):
            lead = 3 if has_layers else 2
            if _is_layer_rows(leaf):
                data, members = leaf.data, leaf.leaves
            else:
                data, members = _to_bytes(leaf, lead), ((np.dtype(leaf.dtype), tuple(leaf.shape[lead:])),)
            layers, pitch, offset = data.shape[0] if has_layers else None, data.shape[-1], 0
            for dtype, shape in members:
                fields.append(Field(dtype, shape, layers, start, pitch, offset))
                offset += fields[-1].nbytes
            rows = jnp.moveaxis(data, 0, 2) if has_layers else data
            parts.append(rows.reshape(*rows.shape[:2], -1))
            start += parts[-1].shape[-1]
    whole = jax.tree.map(_expanded, (by_layer, plain), is_leaf=_is_layer_rows)
    return PackedRows(jnp.concatenate(parts, axis=-1), jax.tree.structure(whole), tuple(fields))


def unpack_rows(rows: np.ndarray | jax.Array, packed: PackedRows) -> Any:
    """The tree `(by_layer, plain)` of `rows` uint8 `[N, S, R]`, laid out like `packed`.

    Leaves are `[L, N, S, ...]` and `[N, S, ...]`: views if the rows are on the host, new arrays if they are traced.
    """
    lead, leaves = rows.shape[:2], []
    for field in packed.fields:
        layers = field.count
        part = rows[..., field.bytes].reshape(*lead, layers, field.pitch)
        part = _from_bytes(part[..., field.offset : field.offset + field.nbytes], field.dtype)
        part = part.reshape(*lead, layers, *field.shape)
        if field.layers is None:
            leaves.append(part[:, :, 0])
        else:
            leaves.append(
                np.moveaxis(part, 2, 0) if isinstance(part, np.ndarray) else jnp.moveaxis(part, 2, 0)
            )
    return jax.tree.unflatten(packed.treedef, leaves)


def is_backed(tree: Any, rows: Any) -> bool:
    """Whether the arrays of `tree` are exactly the views in `rows`, a tree of views of the same structure."""
    if jax.tree.structure(tree) != jax.tree.structure(rows):
        return False
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(rows), strict=True)
    return all(isinstance(a, np.ndarray) and a.__array_interface__ == b.__array_interface__ for a, b in pairs)


def _is_layer_rows(leaf: Any) -> bool:
    return isinstance(leaf, LayerRows)


def _expanded(leaf: Any) -> Any:
    return jax.tree.unflatten(leaf.treedef, range(len(leaf.leaves))) if _is_layer_rows(leaf) else 0


def _to_bytes(leaf: jax.Array, lead: int) -> jax.Array:
    """`[lead axes, ...]` as bytes `[lead axes, R]`."""
    if leaf.dtype.itemsize > 1:
        leaf = jax.lax.bitcast_convert_type(leaf, jnp.uint8)
    return leaf.reshape(*leaf.shape[:lead], math.prod(leaf.shape[lead:]))  # -1 is undefined without any layer


def _from_bytes(part: np.ndarray | jax.Array, dtype: np.dtype) -> np.ndarray | jax.Array:
    """`[..., bytes]` as `[..., values]` of `dtype`."""
    if isinstance(part, np.ndarray):
        return part.view(dtype)
    if dtype.itemsize > 1:
        part = part.reshape(*part.shape[:-1], -1, dtype.itemsize)
    return jax.lax.bitcast_convert_type(part, dtype)
