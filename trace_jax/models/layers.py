"""The one layer that prefill, decode and training share.

Everything that differs between them (packed FP4, fake-quant, guided, BF16) is in `Numerics`; whether keys and
values come from a cache is in `cache`. Shapes: B sequences, T tokens fed, D hidden, H query heads, G KV heads, d
head_dim, E experts, k experts per token, F expert hidden.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kernels_pallas import norms
from kernels_pallas.decode_attention import attend, attention
from kernels_pallas.kv_cache import KVCache, append
from kernels_pallas.matmul import matmul
from trace_jax.models.config import ModelConfig
from trace_jax.models.dispatch import expert_matmul, make_dispatch
from trace_jax.parallel import constrain
from trace_jax.quant import DOWN_INPUT, EXPERT_INPUT, KEY, VALUE, Numerics, cast_weight


def param(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int | None = None
) -> nnx.Param:
    """FP32 master with logical axes: normal with variance 1/fan_in, or ones when `fan_in` is None (norm gains)."""
    if len(shape) != len(axes):
        raise ValueError(
            f"parameter of shape {shape} has logical axes {axes}; expected one name per dimension."
        )
    if fan_in is None:
        value = jnp.ones(shape, jnp.float32)
    else:
        value = jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
    return nnx.Param(value, logical_axes=axes)


def wide(dtype) -> jnp.dtype:
    """Accumulation dtype: FP32, or FP64 when the model runs in FP64."""
    return jnp.promote_types(dtype, jnp.float32)


def rms_norm(x: Float[Array, "*rows D"], gain: nnx.Param, eps: float) -> Float[Array, "*rows D"]:
    """`norms.rms_norm` with the gain rounded to the compute dtype, like every weight that is sent to the rollout."""
    return norms.rms_norm(x, cast_weight(gain[...], x.dtype), eps)


def rope(
    x: Float[Array, "B T heads d"], positions: Int[Array, "B T"], theta: float
) -> Float[Array, "B T heads d"]:
    """Rotary embedding on half-split pairs (Su et al. 2021, arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    acc = wide(x.dtype)
    frequency = theta ** (-jnp.arange(half, dtype=acc) / half)
    angle = positions.astype(acc)[..., None, None] * frequency.reshape(1, 1, 1, half)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = x[..., :half].astype(acc), x[..., half:].astype(acc)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def linear(x: Float[Array, "*rows K"], w: nnx.Param) -> Float[Array, "*rows N"]:
    return matmul(x, cast_weight(w[...], x.dtype)).astype(x.dtype)


class LayerInputs(NamedTuple):
    """What one layer reads besides the residual stream; every field may be None.

    `layer` is the layer's index in a `cache` that is stacked over layers; None for a cache of this layer alone.
    """

    cache: KVCache | None = None
    layer: Int[Array, ""] | None = None
    routes: Int[Array, "B T k"] | None = None
    guides: dict[str, Any] | None = None
    weight_guides: dict[str, Any] | None = None


class Attention(nnx.Module):
    """Grouped-query attention with q/k norm and RoPE; keys and values are quantized, then attended to."""

    def __init__(self, config: ModelConfig, layers: int, rngs: nnx.Rngs):
        c, lead = config, (layers,)
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.norm = param(rngs, (*lead, c.hidden_size), ("layers", "norm"))
        self.query = param(rngs, (*lead, c.hidden_size, q), ("layers", "embed", "heads"), c.hidden_size)
        self.key = param(rngs, (*lead, c.hidden_size, kv), ("layers", "embed", "kv_heads"), c.hidden_size)
        self.value = param(rngs, (*lead, c.hidden_size, kv), ("layers", "embed", "kv_heads"), c.hidden_size)
        self.query_norm = param(rngs, (*lead, c.head_dim), ("layers", "norm"))
        self.key_norm = param(rngs, (*lead, c.head_dim), ("layers", "norm"))
        self.output = param(rngs, (*lead, q, c.hidden_size), ("layers", "heads", "embed"), q)

    def __call__(self, x, positions, valid, inputs: LayerInputs, numerics: Numerics, config: ModelConfig):
        c = config
        batch, length = positions.shape
        h = rms_norm(x, self.norm, c.norm_eps)
        q = linear(h, self.query).reshape(batch, length, c.num_heads, c.head_dim)
        k = linear(h, self.key).reshape(batch, length, c.num_kv_heads, c.head_dim)
        v = linear(h, self.value).reshape(batch, length, c.num_kv_heads, c.head_dim)
        q = rope(rms_norm(q, self.query_norm, c.norm_eps), positions, c.rope_theta)
        k = rope(rms_norm(k, self.key_norm, c.norm_eps), positions, c.rope_theta)
        captured = {}
        if inputs.cache is None:
            k, captured[KEY] = numerics.activation(KEY, k, inputs.guides)
            v, captured[VALUE] = numerics.activation(VALUE, v, inputs.guides)
            cache = None
            mask = (positions[:, :, None] >= positions[:, None, :]) & valid[:, None, :]
            out = attend(q, k, v, mask)
        else:
            cache, captured[KEY], captured[VALUE] = append(
                inputs.cache, k, v, positions, valid, layer=inputs.layer
            )
            out = attention(q, cache, positions, layer=inputs.layer)
        out = linear(out.reshape(batch, length, -1), self.output)
        return x + out, cache, captured


class MoE(nnx.Module):
    """Top-k routed experts with normalised gates; router in FP32.

    The routed-expert input is quantized once per token, before dispatch, and the down-projection input once per
    (token, route slot).
    """

    def __init__(self, config: ModelConfig, layers: int, rngs: nnx.Rngs):
        c, lead = config, (layers,)
        self.norm = param(rngs, (*lead, c.hidden_size), ("layers", "norm"))
        self.router = param(
            rngs, (*lead, c.hidden_size, c.num_experts), ("layers", "embed", "expert"), c.hidden_size
        )
        # Gate and up side by side: one matrix per expert, hence one row scale, as serving engines fuse them.
        self.gate_up = param(
            rngs,
            (*lead, c.num_experts, c.hidden_size, 2 * c.expert_hidden_size),
            ("layers", "expert", "embed", "mlp"),
            c.hidden_size,
        )
        self.down = param(
            rngs,
            (*lead, c.num_experts, c.expert_hidden_size, c.hidden_size),
            ("layers", "expert", "mlp", "embed"),
            c.expert_hidden_size,
        )

    def __call__(self, x, inputs: LayerInputs, numerics: Numerics, config: ModelConfig):
        c, k = config, config.experts_per_token
        batch, length, _ = x.shape
        tokens = batch * length
        captured = {}
        gain = cast_weight(self.norm[...], x.dtype)
        h, rows, captured[EXPERT_INPUT] = numerics.norm_activation(
            EXPERT_INPUT, x, gain, c.norm_eps, inputs.guides
        )
        own_experts, experts, gates = self.route(h, inputs.routes, k)
        dispatch = make_dispatch(experts.reshape(tokens, k), c.num_experts)
        gate_up = numerics.expert_weight("gate_up", self.gate_up.get_value(), inputs.weight_guides, c.dtype)
        down = numerics.expert_weight("down", self.down.get_value(), inputs.weight_guides, c.dtype)

        act = expert_matmul(_flatten_tokens(rows, tokens), gate_up, dispatch, k, activation="swiglu")
        act = act.reshape(batch, length, k, -1).astype(x.dtype)
        act, captured[DOWN_INPUT] = numerics.activation(DOWN_INPUT, act, inputs.guides)
        y = expert_matmul(_flatten_tokens(act, tokens), down, dispatch, k).reshape(batch, length, k, -1)
        # Summed in route order, which the record fixes, not in dispatch order.
        y = jnp.sum(y * gates[..., None], axis=-2)
        return x + y.astype(x.dtype), own_experts, captured

    def route(self, h: Float[Array, "B T D"], replay: Int[Array, "B T k"] | None, k: int):
        """Chooses k experts per token, or replays recorded ones (R3).

        A recorded route is negative where there is none; such a token chooses for itself. Gates are always the
        softmax over this model's own logits at the chosen experts, so gradients flow through them.

        Returns:
            This model's own choice, the choice that is used (both int32 `[B, T, k]`), and the gates of the latter.
        """
        acc = wide(h.dtype)
        router = cast_weight(self.router[...], h.dtype).astype(acc)
        logits = jnp.matmul(h.astype(acc), router, precision="highest")
        _, own_experts = jax.lax.top_k(jax.lax.stop_gradient(logits), k)
        experts = own_experts if replay is None else jnp.where(replay >= 0, replay, own_experts)
        gates = jax.nn.softmax(jnp.take_along_axis(logits, experts, axis=-1), axis=-1)
        return own_experts, experts, gates


def _flatten_tokens(rows, tokens: int):
    """[B, T, ...] -> [B*T, ...] on an array or on every leaf of an Fp4Array."""
    return jax.tree.map(lambda leaf: leaf.reshape(tokens, *leaf.shape[2:]), rows)


class Block(nnx.Module):
    """Attention then MoE. Parameters carry a leading `layers` axis; a call sees one slice of it."""

    def __init__(self, config: ModelConfig, layers: int, rngs: nnx.Rngs):
        self.attention = Attention(config, layers, rngs)
        self.moe = MoE(config, layers, rngs)

    def __call__(self, x, positions, valid, inputs: LayerInputs, numerics: Numerics, config: ModelConfig):
        with jax.named_scope("attention"):
            x, cache, captured_kv = self.attention(x, positions, valid, inputs, numerics, config)
        with jax.named_scope("moe"):
            x, experts, captured_moe = self.moe(x, inputs, numerics, config)
        x = constrain(x, ("batch", "length", "act_embed"))
        return x, cache, experts, captured_kv | captured_moe
