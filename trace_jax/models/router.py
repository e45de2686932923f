"""Routers."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    scores: str = "softmax"
    normalize: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    bias: bool = False
    correction: bool = False

    def check(self, num_experts, k):
        pass


def route(logits, k, replay, config, correction=None):
    _, own_experts = jax.lax.top_k(jax.lax.stop_gradient(logits), k)
    experts = own_experts if replay is None else jnp.where(replay >= 0, replay, own_experts)
    gates = jax.nn.softmax(jnp.take_along_axis(logits, experts, axis=-1), axis=-1)
    return own_experts, experts, gates
