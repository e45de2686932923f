"""Device mesh and logical-axis sharding rules."""

from trace_jax.parallel.mesh import (
    LOGICAL_AXES,
    MeshConfig,
    constrain,
    make_mesh,
    place,
    shard,
    sharding,
    spec,
)

__all__ = ["LOGICAL_AXES", "MeshConfig", "constrain", "make_mesh", "place", "shard", "sharding", "spec"]
