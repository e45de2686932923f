"""Random weights as a rollout holds them, for models whose masters would not fit: measuring needs no trained ones."""

import functools

import jax
from flax import nnx

from trace_jax.models import ModelConfig
from trace_jax.models.transformer import STACKS, Transformer
from trace_jax.quant import QuantPlan, rollout_weights


def random_rollout_weights(config: ModelConfig, plan: QuantPlan | None, key: jax.Array) -> nnx.State:
    """What `rollout_weights` makes of a newly initialised model, a layer at a time: only one has masters.

    Args:
        plan: of the experts; None keeps them in the compute dtype.
        key: PRNG key. The weights are not those of `models.create` under the same key.
    """
    key, ends = jax.random.split(key)
    flat = list(nnx.to_flat_state(_ends(config, ends)))
    for name, module in STACKS.items():
        if layers := len(config.layers_of(name)):
            key, own = jax.random.split(key)
            flat += list(nnx.to_flat_state(_stack(name, module, config, plan, jax.random.split(own, layers))))
    return nnx.from_flat_state(flat)


@functools.partial(jax.jit, static_argnums=0)
def _ends(config: ModelConfig, key: jax.Array) -> nnx.State:
    """Everything outside the stacks; these are never computed."""
    state = nnx.split(Transformer(config, rngs=nnx.Rngs(params=key)))[1]
    ends = [(path, leaf) for path, leaf in nnx.to_flat_state(state) if path[0] not in STACKS]
    return rollout_weights(nnx.from_flat_state(ends), None, config.dtype)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _stack(name, module, config: ModelConfig, plan: QuantPlan | None, keys: jax.Array) -> nnx.State:
    def layer(key):
        state = nnx.split(module(config, 1, nnx.Rngs(params=key)))[1]
        state = nnx.from_flat_state([((name, *path), leaf) for path, leaf in nnx.to_flat_state(state)])
        return jax.tree.map(lambda leaf: leaf[0], rollout_weights(state, plan, config.dtype))

    return jax.lax.map(layer, keys)
