"""FP4 tensors as pytrees: unpacked codes for arithmetic, packed 4-bit words for storage.

Layout, shared by both: values are grouped along one axis (`axis`, -1 or -2), the contraction axis.
`row_exponent` has one byte per row; how many trailing axes form a row follows from its rank: one fewer axis
than the tensor when a row runs along `axis` only (activations, K and V), two fewer when it is a whole matrix
(weights, one scale per expert).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from kernels_pallas.formats import Fp4Format, pack_codes, unpack_codes


def pytree_dataclass(*, static: tuple[str, ...] = ()):
    """Class decorator: register a dataclass as a pytree; `static` fields are part of the tree's structure.

    Unflattening skips `__init__` and so its checks: transformations put placeholders of every kind into
    leaves.
    """

    def register(cls):
        leaves = tuple(f.name for f in dataclasses.fields(cls) if f.name not in static)

        def flatten(tree):
            return tuple(getattr(tree, n) for n in leaves), tuple(getattr(tree, n) for n in static)

        def flatten_with_keys(tree):
            children, structure = flatten(tree)
            return tuple(
                (jax.tree_util.GetAttrKey(n), c) for n, c in zip(leaves, children, strict=True)
            ), structure

        def unflatten(structure, children):
            tree = object.__new__(cls)
            for name, value in zip(leaves + static, tuple(children) + tuple(structure), strict=True):
                object.__setattr__(tree, name, value)
            return tree

        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
        return cls

    return register


def check_leaf(name: str, leaf: Any, dtype: Any, shape: tuple[int, ...] | None) -> None:
    """Raise if an array leaf has another dtype or shape; leaves that are no arrays (specs, structs) pass."""
    if not isinstance(leaf, jax.Array):
        return
    if leaf.dtype != dtype:
        raise TypeError(f"{name} is {leaf.dtype}; expected {jnp.dtype(dtype).name}")
    if shape is not None and leaf.shape != shape:
        raise ValueError(f"{name} has shape {leaf.shape}; expected {shape}")


def check_float(name: str, a: Any) -> None:
    """TypeError unless an array is of floats."""
    if not jnp.issubdtype(a.dtype, jnp.floating):
        raise TypeError(f"{name} is {a.dtype}; expected a float dtype")


def check_axis(axis: int) -> None:
    """ValueError unless `axis` is -1 or -2."""
    if axis not in (-1, -2):
        raise ValueError(f"axis is {axis}; expected -1 (activations, K and V) or -2 (weights [..., K, N])")


def check_block(size: int, axis: int, format: Fp4Format) -> None:
    """ValueError unless an axis of `size` is a whole number of blocks."""
    if size % format.block:
        padded = -(-size // format.block) * format.block
        raise ValueError(
            f"axis {axis} has size {size}, not a multiple of the {format.name} block of {format.block}; "
            f"pad it with zeros to {padded}, or choose a size or shard count that keeps blocks whole"
        )


def resize_axis(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    """`shape` with negative `axis` of another size."""
    return (*shape[:axis], size, *shape[len(shape) + axis + 1 :])


def expand_rows(rows: Shaped[Array, "..."], ndim: int, axis: int) -> Shaped[Array, "..."]:
    """A per-row array with its row axes back as size 1, to broadcast against a tensor of `ndim` axes."""
    missing = ndim - rows.ndim
    if missing == 1:
        return jnp.expand_dims(rows, axis)
    if missing == 2:
        return rows[..., None, None]
    raise ValueError(
        f"per-row array of shape {rows.shape} for a tensor of {ndim} axes; expected {ndim - 1} or {ndim - 2}"
    )


def _check_parts(tensor: "Fp4Codes | Fp4Array", values: Any) -> None:
    """Check the parts that codes and packed arrays have in common against the shape of `values`."""
    axis, format = tensor.axis, tensor.format
    check_axis(axis)
    scales_shape = None
    if isinstance(values, jax.Array):
        shape = tensor.shape
        check_block(shape[axis], axis, format)
        scales_shape = resize_axis(shape, axis, shape[axis] // format.block)
    check_leaf("scales", tensor.scales, jnp.uint8, scales_shape)
    check_leaf("row_exponent", tensor.row_exponent, jnp.uint8, None)
    if isinstance(values, jax.Array) and isinstance(tensor.row_exponent, jax.Array):
        rows = (*shape[: len(shape) + axis], *shape[len(shape) + axis + 1 :])
        found = tensor.row_exponent.shape
        allowed = (rows, shape[:-2])
        # Unpacked weights carry [..., 1] for rows [..., N]: any shape that broadcasts will do.
        fits = any(
            len(found) == len(a) and all(n in (1, m) for n, m in zip(found, a, strict=True)) for a in allowed
        )
        if not fits:
            raise ValueError(f"row_exponent has shape {found}; expected {rows} or {shape[:-2]} (matrix rows)")


@pytree_dataclass(static=("format", "axis"))
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Fp4Codes:
    """An FP4 tensor with one byte per code.

    Attributes:
      codes: uint8 [..., K], E2M1 codes 0..15, never 8 (-0).
      scales: uint8 [..., K / block], scale bytes.
      row_exponent: uint8, biased exponent of the power-of-two row scale (127 = 2^0, always so for MXFP4).
      format, axis: static. K and K / block lie along `axis` (the last one unless stated).

    Invariant: value = code x block scale x 2^(row_exponent - 127).
    """

    codes: Any
    scales: Any
    row_exponent: Any
    format: Fp4Format
    axis: int = -1

    def __post_init__(self) -> None:
        self.check()

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, in values."""
        return tuple(self.codes.shape)

    @property
    def ndim(self) -> int:
        return len(self.codes.shape)

    def check(self) -> None:
        """Raise TypeError or ValueError if array leaves do not fit together."""
        check_leaf("codes", self.codes, jnp.uint8, None)
        _check_parts(self, self.codes)


@pytree_dataclass(static=("format", "axis"))
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Fp4Array:
    """An FP4 tensor in 4 bits per value.

    Attributes:
      words: uint32, 8 codes along `axis`, low nibble first.
      scales: uint8, scale bytes, `block` values each, along `axis`.
      row_exponent: uint8, biased exponent of the power-of-two row scale (127 = 2^0, always so for MXFP4).
      format, axis: static; `axis` is -1 (activations, K and V) or -2 (weights [..., K, N]).

    Invariant: words, scales and row_exponent share their leading axes, so slicing, scanning, mapping or
    sharding a leading axis of every leaf gives the FP4 tensor of that slice.
    """

    words: Any
    scales: Any
    row_exponent: Any
    format: Fp4Format
    axis: int = -1

    def __post_init__(self) -> None:
        self.check()

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, in values."""
        return resize_axis(tuple(self.words.shape), self.axis, self.words.shape[self.axis] * 8)

    @property
    def ndim(self) -> int:
        return len(self.words.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in (self.words, self.scales, self.row_exponent))

    def check(self) -> None:
        """Raise TypeError or ValueError if array leaves do not fit together."""
        check_leaf("words", self.words, jnp.uint32, None)
        _check_parts(self, self.words)

    def unpack(self) -> Fp4Codes:
        """The same tensor with one byte per code and the grouped axis moved last."""
        codes = unpack_codes(self.words, self.axis)
        row_exponent = self.row_exponent
        if self.axis == -2 and row_exponent.ndim == self.ndim - 2:
            row_exponent = row_exponent[..., None]  # broadcasts against the rows [..., N] of the moved tensor
        return Fp4Codes(
            codes=jnp.moveaxis(codes, self.axis, -1),
            scales=jnp.moveaxis(self.scales, self.axis, -1),
            row_exponent=row_exponent,
            format=self.format,
        )

    @classmethod
    def from_codes(cls, codes: Fp4Codes, axis: int = -1) -> "Fp4Array":
        """Pack `codes`, along `axis`. Codes along -1 packed along -2 have their last two axes swapped."""
        check_axis(axis)
        values, scales, row_exponent = codes.codes, codes.scales, codes.row_exponent
        if codes.axis != axis:
            if codes.axis != -1:
                raise ValueError(f"codes along axis {codes.axis} cannot be packed along axis {axis}")
            values, scales = jnp.moveaxis(values, -1, axis), jnp.moveaxis(scales, -1, axis)
            if row_exponent.ndim == codes.ndim - 1 and row_exponent.shape[-1] == 1:
                row_exponent = row_exponent[..., 0]
        return cls(
            words=pack_codes(values, axis),
            scales=scales,
            row_exponent=row_exponent,
            format=codes.format,
            axis=axis,
        )


@pytree_dataclass()
@dataclasses.dataclass(frozen=True, eq=False)
class Stacked:
    """One layer of an array that is stacked over layers, not cut out of it.

    A kernel finds the layer by its index, so a loop over layers copies no weights; everything else takes `slice`.

    Attributes:
      array: an array or Fp4Array with a leading axis of layers.
      layer: int32 scalar array, which one this is.
    """

    array: Any
    layer: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape of one layer, in values."""
        return tuple(self.array.shape[1:])

    @property
    def ndim(self) -> int:
        return len(self.array.shape) - 1

    def check(self) -> None:
        """Raise TypeError unless `layer` is an int32 scalar."""
        check_leaf("layer", self.layer, jnp.int32, ())

    def slice(self) -> Any:
        """The layer's own array."""
        return jax.tree.map(
            lambda leaf: lax.dynamic_index_in_dim(leaf, self.layer, keepdims=False), self.array
        )
