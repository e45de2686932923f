"""A model's parameters by dotted path, and the table of its family laid out over them."""

from collections.abc import Mapping as Maps
from typing import Any

import jax
from flax import nnx

from trace_jax.hf.families import Family, family_of
from trace_jax.hf.table import Mapping
from trace_jax.models import ModelConfig, abstract, logical_axes
from trace_jax.models.transformer import STACKS


def dotted(path: tuple[Any, ...]) -> str:
    """`moe.gate_up` for the path of a parameter in the state."""
    return ".".join(map(str, path))


def by_path(state: nnx.State) -> dict[str, Any]:
    """Values of a state by dotted path: arrays, FP4 arrays, shapes or logical axes."""
    return {
        dotted(path): leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        for path, leaf in nnx.to_flat_state(state)
    }


def to_state(template: nnx.State, values: Maps[str, Any]) -> nnx.State:
    """The state of a template's structure with the values of `by_path`."""
    flat = nnx.to_flat_state(template)
    return nnx.from_flat_state([(path, variable.replace(values[dotted(path)])) for path, variable in flat])


def layers_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Indices of the layers that each stack of parameters holds."""
    return {stack: config.layers_of(stack) for stack in STACKS}


def axes_by_path(config: ModelConfig) -> dict[str, tuple[str | None, ...]]:
    """Logical axes of each parameter."""
    return by_path(logical_axes(abstract(config)[1]))


def mapping_of(config: ModelConfig, family: Family | None = None) -> Mapping:
    """Every tensor of a model's checkpoint, and which part of which parameter it is."""
    shapes = jax.tree.map(lambda leaf: leaf.shape, abstract(config)[1])
    return Mapping((family or family_of(config)).table(config), by_path(shapes), layers_of(config))
