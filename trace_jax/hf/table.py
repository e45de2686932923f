"""Which tensor of a Hugging Face checkpoint is which part of which parameter: one table, read in both directions.

A `Link` says it for one kind of tensor; `Mapping` lays a family's links out over layers and experts and proves that
every element of every parameter and of every tensor is named exactly once, so that import and export are inverses.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from trace_jax.hf.codecs import PLAIN, Codec

Shape = tuple[int, ...]
Part = range | tuple[int, ...]
"""Positions along one axis, in the order of the parameter: a range, or a tuple for anything else."""


class TableError(ValueError):
    """A table that does not name every element exactly once: a mistake in a family's file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """A tensor of the checkpoint, or a part of it, and its place in a parameter.

    Both are seen as one unit: the parameter without its stack axis if `tensor` has `{layer}`, and then without its
    expert axis if it has `{expert}`; the tensor without `squeeze` and with its axes in the order `transpose`. Then
    `unit[..., ours, ...] = tensor[..., theirs, ...]` along `axis`.

    Args:
        param: dotted path in the parameter state; its first name is the stack.
        tensor: name in the checkpoint, with `{layer}` and `{expert}` where there is one tensor of each.
        transpose: axes of the tensor in the unit's order; None keeps them.
        squeeze: axis of size 1 that only the tensor has (convolutions: `[C, 1, K]`).
        axis: of the unit, along which parts are taken.
        ours: part of the parameter; None is all of it. Only ranges of step 1.
        theirs: part of the tensor, in the parameter's order: a range with a step takes interleaved columns apart, a
            tuple permutes rows; None is all of it.
        same: the tensor repeats what another link of the parameter says (a scale that two tensors share).
        codec: how the file holds the tensor's values.
    """

    param: str
    tensor: str
    transpose: tuple[int, ...] | None = None
    squeeze: int | None = None
    axis: int = -1
    ours: range | None = None
    theirs: Part | None = None
    same: bool = False
    codec: Codec = PLAIN

    @property
    def stack(self) -> str:
        return self.param.split(".")[0]

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.tensor

    @property
    def leading(self) -> int:
        """Axes of the parameter that the tensor's name indexes."""
        return self.per_layer + ("{expert}" in self.tensor)

    def raw(self, unit: Sequence[Any], squeezed: Any) -> tuple[Any, ...]:
        """Something per axis of the unit (sizes, slices), in the order of the tensor's axes."""
        order = range(len(unit)) if self.transpose is None else self.transpose
        found = [None] * len(unit)
        for ours, theirs in enumerate(order):
            found[theirs] = unit[ours]
        if self.squeeze is not None:
            found.insert(self.squeeze, squeezed)
        return tuple(found)

    def to_unit(self, x: np.ndarray) -> np.ndarray:
        """A tensor with the axes of the unit; a view."""
        if self.squeeze is not None:
            x = np.squeeze(x, self.squeeze)
        return x if self.transpose is None else np.transpose(x, self.transpose)

    def to_tensor(self, x: np.ndarray) -> np.ndarray:
        """The inverse of `to_unit`."""
        if self.transpose is not None:
            x = np.transpose(x, np.argsort(self.transpose))
        return x if self.squeeze is None else np.expand_dims(x, self.squeeze)


def linear(param: str, tensor: str, **parts) -> Link:
    """A matrix that the checkpoint holds as `[out, in]` and the model as `[in, out]`."""
    return Link(param=param, tensor=tensor, transpose=(1, 0), **parts)


def gated(param: str, gate: str, up: str, width: int) -> list[Link]:
    """Gate and up projections of `width` columns each, side by side in one parameter."""
    return [
        linear(param, gate, ours=range(width)),
        linear(param, up, ours=range(width, 2 * width)),
    ]


@dataclasses.dataclass(frozen=True)
class Use:
    """One tensor's part in a parameter: the link, and the indices along the parameter's leading axes."""

    link: Link
    index: tuple[int, ...]
    ours: range
    theirs: Part | None

    @property
    def positions(self) -> Part:
        """What the parameter's part is of the tensor, along the link's axis."""
        return range(len(self.ours)) if self.theirs is None else self.theirs


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor that the checkpoint has to hold: its decoded shape, and what it is a part of."""

    name: str
    shape: Shape
    uses: tuple[Use, ...]

    @property
    def codec(self) -> Codec:
        return self.uses[0].link.codec

    @property
    def stored_shape(self) -> Shape:
        return self.codec.stored_shape(self.shape)


class Mapping:
    """A table laid out over the layers and experts of one model.

    Args:
        links: the family's table.
        shapes: of all parameters, by dotted path.
        layers_of: for each stack the indices of its layers in the model, in stack order.

    Raises:
        TableError: a parameter or tensor is not named completely, or twice.
    """

    def __init__(
        self, links: Sequence[Link], shapes: dict[str, Shape], layers_of: dict[str, tuple[int, ...]]
    ):
        self.shapes, self.layers_of = shapes, layers_of
        self.links: dict[str, list[Link]] = {param: [] for param in shapes}
        for link in links:
            if link.param not in shapes:
                raise TableError(
                    f"{link.tensor} is mapped to {link.param}, which the model does not have: {sorted(shapes)}."
                )
            self.links[link.param].append(link)
        for param in shapes:
            self._check_param(param)
        self.tensors = self._lay_out()

    def name(self, link: Link, index: Sequence[int]) -> str:
        """Name of the tensor at `index` of the parameter's leading axes."""
        layer = self.layers_of[link.stack][index[0]] if link.per_layer else None
        return link.tensor.format(layer=layer, expert=index[-1] if link.leading > link.per_layer else None)

    def unit(self, link: Link) -> Shape:
        return self.shapes[link.param][link.leading :]

    def ours(self, link: Link) -> range:
        """What the link covers of the unit's `axis`."""
        unit = self.unit(link)
        return link.ours if link.ours is not None else range(unit[link.axis] if unit else 1)

    def _check_param(self, param: str) -> None:
        links = [link for link in self.links[param] if not link.same]
        if not links or len({link.leading for link in links}) != 1:
            raise TableError(
                f"{param} is mapped by {[link.tensor for link in links]}; expected all of it, once."
            )
        shape, first = self.shapes[param], links[0]
        if first.per_layer and len(self.layers_of.get(first.stack, ())) != shape[0]:
            raise TableError(
                f"{param} has {shape[0]} layers, its stack {first.stack!r} is said to hold the layers "
                f"{self.layers_of.get(first.stack)}."
            )
        unit = self.unit(first)
        for link in links:
            if link.transpose is not None and sorted(link.transpose) != list(range(len(unit))):
                raise TableError(
                    f"{link.tensor} has transpose {link.transpose}; "
                    f"expected an order of the {len(unit)} axes of {unit}."
                )
        if not unit:
            return
        axes = {link.axis % len(unit) for link in links}
        covered = sorted(position for link in links for position in self.ours(link))
        if len(axes) != 1 or covered != list(range(unit[axes.pop()])):
            raise TableError(f"the links of {param} {shape} do not cover it exactly once.")

    def _lay_out(self) -> dict[str, Tensor]:
        uses: dict[str, list[Use]] = {}
        for param, links in self.links.items():
            for link in links:
                ours = self.ours(link)
                use = {"link": link, "ours": ours, "theirs": link.theirs}
                if link.theirs is not None and len(link.theirs) != len(ours):
                    raise TableError(
                        f"{link.tensor}: {link.theirs} and {ours} of {param} are of unequal length."
                    )
                for index in np.ndindex(*self.shapes[param][: link.leading]):
                    uses.setdefault(self.name(link, index), []).append(Use(index=index, **use))
        return {name: Tensor(name, self._tensor_shape(name, of), tuple(of)) for name, of in uses.items()}

    def _tensor_shape(self, name: str, uses: list[Use]) -> Shape:
        shapes = set()
        for use in uses:
            unit = list(self.unit(use.link))
            if unit:
                unit[use.link.axis] = sum(len(other.ours) for other in uses)
            shapes.add(use.link.raw(unit, 1))
        if len(shapes) != 1:
            raise TableError(f"{name} would have the shapes {sorted(shapes)}.")
        if len(uses) > 1 or uses[0].theirs is not None:
            positions = sorted(p for use in uses for p in use.positions)
            if positions != list(range(len(positions))):
                raise TableError(f"the links of {name} do not cover it exactly once.")
        return shapes.pop()


def take(x: np.ndarray, part: Part, axis: int) -> np.ndarray:
    """`part` of `x` along `axis`; a view where the part is an increasing range."""
    return x[_index(x.ndim, part, axis)]


def put(x: np.ndarray, part: Part, axis: int, value: np.ndarray) -> None:
    """Writes `value` to `part` of `x` along `axis`."""
    x[_index(x.ndim, part, axis)] = value


def _index(ndim: int, part: Part, axis: int) -> tuple[Any, ...]:
    if not ndim:
        return (...,)
    index: list[Any] = [slice(None)] * ndim
    increasing = isinstance(part, range) and part.step > 0
    index[axis] = slice(part.start, part.stop, part.step) if increasing else np.asarray(part)
    return tuple(index)
