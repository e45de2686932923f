"""Mixture of experts: router, routed experts, shared expert."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kernels_pallas.activations import Activation, ClampedSwiglu
from trace_jax.models.config import ModelConfig
from trace_jax.models.dispatch import expert_matmul, make_dispatch
from trace_jax.models.layers import LayerInputs, gain_of, linear, mlp, norm_gain, param, wide
from trace_jax.models.router import route
from trace_jax.quant import DOWN_INPUT, EXPERT_INPUT, Numerics, cast_weight


class MoE(nnx.Module):
    """Top-k routed experts, router in FP32, and the expert that all tokens share where there is one.

    The routed-expert input is quantized once per token, before dispatch, and the down-projection input once per
    (token, route slot). The shared expert stays in the compute dtype.
    """

    def __init__(self, config: ModelConfig, layers: int, rngs: nnx.Rngs):
        c, lead = config, (layers,)
        width, hidden = c.hidden_size, c.expert_hidden_size
        self.norm = norm_gain(rngs, (*lead, width), ("layers", "norm"), centred=c.centred_norms)
        self.router = param(rngs, (*lead, width, c.num_experts), ("layers", "embed", "expert"), width)
        # Gate and up side by side: one matrix per expert, hence one row scale, as serving engines fuse them.
        self.gate_up = param(
            rngs, (*lead, c.num_experts, width, 2 * hidden), ("layers", "expert", "embed", "mlp"), width
        )
        self.down = param(
            rngs, (*lead, c.num_experts, hidden, width), ("layers", "expert", "mlp", "embed"), hidden
        )
        for needed, name, size, axis in (
            (c.router.bias, "router_bias", (c.num_experts,), ("expert",)),
            (c.router.correction, "router_correction", (c.num_experts,), ("expert",)),
            (c.expert_bias, "gate_up_bias", (c.num_experts, 2 * hidden), ("expert", "mlp")),
            (c.expert_bias, "down_bias", (c.num_experts, width), ("expert", "norm")),
        ):
            if needed:
                setattr(self, name, param(rngs, (*lead, *size), ("layers", *axis), constant=0.0))
        if c.shared_expert_size:
            shared = c.shared_expert_size
            self.shared_gate_up = param(rngs, (*lead, width, 2 * shared), ("layers", "embed", "mlp"), width)
            self.shared_down = param(rngs, (*lead, shared, width), ("layers", "mlp", "embed"), shared)
        if c.shared_expert_gate:
            self.shared_gate = param(rngs, (*lead, width, 1), ("layers", "embed", None), width)

    def __call__(self, x, inputs: LayerInputs, numerics: Numerics, config: ModelConfig):
        c, k = config, config.experts_per_token
        batch, length, _ = x.shape
        tokens = batch * length
        captured = {}
        gain = gain_of(self.norm, x.dtype, c.centred_norms)
        h, rows, captured[EXPERT_INPUT] = numerics.norm_activation(
            EXPERT_INPUT, x, gain, c.norm_eps, inputs.guides
        )
        own_experts, experts, gates = self.route(h, inputs.routes, c)
        dispatch = make_dispatch(experts.reshape(tokens, k), c.num_experts)
        gate_up = numerics.expert_weight("gate_up", self.gate_up.get_value(), inputs.weight_guides, c.dtype)
        down = numerics.expert_weight("down", self.down.get_value(), inputs.weight_guides, c.dtype)

        gate_up_bias, down_bias = (self._bias(name, x.dtype) for name in ("gate_up_bias", "down_bias"))

        act = expert_matmul(
            _flatten_tokens(rows, tokens), gate_up, dispatch, k, bias=gate_up_bias, activation=_activation(c)
        )
        act = act.reshape(batch, length, k, -1).astype(x.dtype)
        act, captured[DOWN_INPUT] = numerics.activation(DOWN_INPUT, act, inputs.guides)
        y = expert_matmul(_flatten_tokens(act, tokens), down, dispatch, k, bias=down_bias)
        y = y.reshape(batch, length, k, -1)
        # Summed in route order, which the record fixes, not in dispatch order.
        y = jnp.sum(y * gates[..., None], axis=-2)
        if c.shared_expert_size:
            y = y + self._shared(h, c)
        return x + y.astype(x.dtype), own_experts, captured

    def route(self, h: Float[Array, "B T D"], replay: Int[Array, "B T k"] | None, config: ModelConfig):
        """Chooses experts from logits in FP32, see `router.route`."""
        acc = wide(h.dtype)

        def weight(name):
            return cast_weight(getattr(self, name)[...], h.dtype).astype(acc)

        logits = jnp.matmul(h.astype(acc), weight("router"), precision="highest")
        if config.router.bias:
            logits = logits + weight("router_bias")[None, None]
        correction = self.router_correction[...] if config.router.correction else None
        return route(logits, config.experts_per_token, replay, config.router, correction)

    def _bias(self, name: str, dtype) -> Float[Array, "E N"] | None:
        """The biases of a projection, in the compute dtype like every weight; None where the family has none."""
        return cast_weight(getattr(self, name)[...], dtype) if hasattr(self, name) else None

    def _shared(self, h, c: ModelConfig):
        """The shared expert's part of the sum, in FP32."""
        y = mlp(h, self.shared_gate_up, self.shared_down).astype(wide(h.dtype))
        if c.shared_expert_gate:
            y = y * jax.nn.sigmoid(linear(h, self.shared_gate).astype(y.dtype))
        return y


def _activation(c: ModelConfig) -> Activation:
    if c.activation == "clamped_swiglu":
        return ClampedSwiglu(alpha=c.activation_alpha, limit=c.activation_limit)
    return c.activation


def _flatten_tokens(rows, tokens: int):
    """[B, T, ...] -> [B*T, ...] on an array or on every leaf of an Fp4Array."""
    return jax.tree.map(lambda leaf: leaf.reshape(tokens, *leaf.shape[2:]), rows)
