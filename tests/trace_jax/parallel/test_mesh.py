"""The mesh and the table of logical axes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from tests.trace_jax import small
from trace_jax.parallel import LOGICAL_AXES, MeshConfig, constrain, make_mesh, shard, sharding, spec
from trace_jax.rl import TrainState
from trace_jax.rl.trainer import state_shardings


def test_logical_axes_become_mesh_axes():
    assert spec(("batch", "length", "embed")) == PartitionSpec(("data", "fsdp"), None, "fsdp")
    assert spec(("layers", "expert", "embed", "mlp")) == PartitionSpec(None, "expert", "fsdp", "tensor")
    assert spec((None, "batch")) == PartitionSpec(None, ("data", "fsdp"))


def test_blocks_are_never_cut():
    for axis in ("length", "head_dim", "act_embed"):
        assert LOGICAL_AXES[axis] is None


def test_unknown_logical_axis():
    with pytest.raises(KeyError, match="unknown logical axis 'width'; expected one of"):
        spec(("batch", "width"))


@pytest.mark.parametrize("name", ["data", "fsdp", "expert", "tensor"])
def test_mesh_sizes_are_positive(name):
    with pytest.raises(ValueError, match=f"mesh.{name} is 0; expected a positive number of devices"):
        MeshConfig(**{name: 0})


def test_mesh_larger_than_the_machine():
    with pytest.raises(ValueError, match=r"'data': 64.* needs 64 devices, this process sees \d+"):
        make_mesh(MeshConfig(data=64))


def test_mesh_of_one_is_the_default_and_changes_nothing():
    mesh = make_mesh(MeshConfig())
    x = jnp.arange(8.0).reshape(2, 4)
    assert mesh.size == 1 and constrain(x, ("batch", "embed")) is x
    with jax.set_mesh(mesh):
        assert constrain(x, ("batch", "embed")) is x
    placed = shard({"a": x}, mesh, {"a": ("batch", "act_embed")})
    assert np.array_equal(placed["a"], x) and placed["a"].sharding == sharding(
        mesh, ("batch", "act_embed"), x.shape
    )


def test_optimiser_moments_lie_like_their_parameters():
    mesh = make_mesh(MeshConfig())
    params = small.masters()[1]
    state = TrainState(params=params, opt_state=optax.MultiSteps(optax.adamw(1e-3), 2).init(params))
    placed = state_shardings(small.MODEL, state, mesh)
    assert jax.tree.structure(placed) == jax.tree.structure(state)
    of_params = jax.tree.leaves(placed.params)
    assert any(s.spec != PartitionSpec() for s in of_params)
    for moment in ("mu", "nu"):
        assert jax.tree.leaves(optax.tree.get(placed.opt_state, moment)) == of_params
    assert optax.tree.get(placed.opt_state, "mini_step").spec == PartitionSpec()
