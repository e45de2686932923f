"""A model's parameters by dotted path, and the table of its family laid out over them."""

import re
from collections.abc import Collection, Sequence
from collections.abc import Mapping as Maps
from typing import Any

from flax import nnx

from trace_jax.hf.families import family_of
from trace_jax.hf.table import Link, Mapping
from trace_jax.models import ModelConfig, abstract, logical_axes
from trace_jax.models.transformer import STACKS
from trace_jax.quant import KEPT_WIDE


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


def is_kept_wide(param: str) -> bool:
    """Whether a parameter stays FP32 in rollouts."""
    return param.rpartition(".")[2] in KEPT_WIDE


def layers_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Indices of the layers that each stack of parameters holds."""
    return {stack: config.layers_of(stack) for stack in STACKS}


def axes_by_path(config: ModelConfig) -> dict[str, tuple[str | None, ...]]:
    """Logical axes of each parameter."""
    return by_path(logical_axes(abstract(config)[1]))


def shapes_by_path(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter."""
    return {param: leaf.shape for param, leaf in by_path(abstract(config)[1]).items()}


def mapping_of(config: ModelConfig, names: Collection[str] | None = None) -> Mapping:
    """Every tensor of a model's checkpoint, and which part of which parameter it is.

    Args:
        config: the model.
        names: of a folder's tensors. A family's folders may hold its experts apart or fused: the table is the one of
            whose tensors they lack the fewest. None is the table that exports follow.
    """
    links = (
        family_of(config).table(config)
        if names is None
        else _fitting(family_of(config).tables(config), names)
    )
    return Mapping([*links, *repeated_head(config, names or ())], shapes_by_path(config), layers_of(config))


def repeated_head(config: ModelConfig, names: Collection[str]) -> list[Link]:
    """The head of a folder that holds it although it is the embedding: some writers store a tied matrix twice."""
    if not config.tied_embedding or "lm_head.weight" not in names:
        return []
    return [Link(param="embedding", tensor="lm_head.weight", same=True)]


def _fitting(tables: Sequence[list[Link]], names: Collection[str]) -> list[Link]:
    kinds = {re.sub(r"(?<=\.)\d+(?=\.)", "#", name) for name in names}
    return min(
        tables,
        key=lambda links: sum(link.tensor.format(layer="#", expert="#") not in kinds for link in links),
    )
