"""One mesh (`data`, `fsdp`, `expert`, `tensor`) and one table from logical axes to mesh axes.

Every parameter, cache, record and activation names its dimensions with logical axes; only this table knows how a
logical axis is laid out, so a layout is changed in one place.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from trace_jax.config import ConfigError

MESH_AXES = ("data", "fsdp", "expert", "tensor")

# Logical axis -> mesh axes. None keeps a dimension whole: packed words along a contraction are never cut inside a
# quantization block.
LOGICAL_AXES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "length": None,
    "pages": None,
    "layers": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "act_embed": None,
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "expert": "expert",
    "mlp": "tensor",
    "norm": None,
    "rank": "fsdp",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Number of devices along each mesh axis."""

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self):
        for name in MESH_AXES:
            size = getattr(self, name)
            if size < 1:
                raise ValueError(f"mesh.{name} is {size}; expected a positive number of devices.")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in MESH_AXES)


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds the mesh over the first `prod(shape)` devices.

    Raises:
        ValueError: there are fewer devices than the mesh needs.
    """
    devices = list(jax.devices() if devices is None else devices)
    needed = math.prod(config.shape)
    if len(devices) < needed:
        raise ConfigError(
            f"mesh {dict(zip(MESH_AXES, config.shape, strict=True))} needs {needed} devices, this process sees "
            f"{len(devices)}. Lower the mesh sizes or start on more devices."
        )
    return jax.make_mesh(
        config.shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=devices[:needed]
    )


def spec(axes: Sequence[str | None]) -> PartitionSpec:
    """PartitionSpec of an array whose dimensions carry the logical `axes`.

    Raises:
        KeyError: a name is not in `LOGICAL_AXES`.
    """
    for name in axes:
        if name is not None and name not in LOGICAL_AXES:
            raise KeyError(f"unknown logical axis {name!r}; expected one of {sorted(LOGICAL_AXES)}.")
    return PartitionSpec(*(None if name is None else LOGICAL_AXES[name] for name in axes))


def sharding(mesh: Mesh, axes: Sequence[str | None], shape: tuple[int, ...]) -> NamedSharding:
    """Sharding of an array of `shape` by its logical `axes`.

    A dimension that its mesh axes do not divide stays whole: a batch of 2 on 4 devices is replicated, not refused.
    """
    return NamedSharding(mesh, _fitting_spec(mesh, shape, axes))


def constrain(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """Pins the layout of an intermediate to the mesh set by `jax.set_mesh`, see `sharding`; a no-op without one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, _fitting_spec(mesh, x.shape, axes))


def place(x: np.ndarray, axes: Sequence[str | None]) -> jax.Array:
    """Starts the copy of a host array to the devices, laid out as `constrain` would; the call does not wait."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty or mesh.size == 1:
        return jax.device_put(x)
    return jax.device_put(x, sharding(mesh, axes, x.shape))


def _fitting_spec(mesh: Mesh | AbstractMesh, shape: tuple[int, ...], axes) -> PartitionSpec:
    def divides(size, names):
        names = (names,) if isinstance(names, str) else names or ()
        return size % math.prod(mesh.shape[name] for name in names) == 0

    kept = (names if divides(size, names) else None for size, names in zip(shape, spec(axes), strict=True))
    return PartitionSpec(*kept)


def shard(tree: Any, mesh: Mesh, axes: Any) -> Any:
    """Puts every array of `tree` on the mesh by the logical axes at its place in `axes` (one tuple per array)."""
    shardings = jax.tree.map(
        lambda names, leaf: sharding(mesh, names, leaf.shape),
        axes,
        tree,
        is_leaf=lambda a: isinstance(a, tuple | list),
    )
    return jax.device_put(tree, shardings)
