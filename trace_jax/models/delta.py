"""Gated DeltaNet: attention replaced by a state of fixed size that the gated delta rule reads and writes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from kernels_pallas import norms
from kernels_pallas.formats import round_to_bf16
from kernels_pallas.matmul import matmul
from trace_jax.models.config import DeltaConfig, ModelConfig
from trace_jax.models.delta_rule import delta_rule_chunked, delta_rule_recurrent
from trace_jax.models.layers import LayerInputs, linear, norm_gain, param, rms_norm, wide
from trace_jax.quant import Numerics, cast_weight

UNIT_EPS = 1e-6
"""Added to the squared length of a query or key; fixed, unlike the eps of the norms."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaState:
    """What DeltaNet layers remember of the tokens they were fed, stacked over the layers.

    `recurrent` `[L, B, Hv, dk, dv]`, FP32 (FP64 in an FP64 model); `conv` `[L, B, W - 1, channels]` in the compute
    dtype, the last inputs of the convolution, the latest at the end. Zeros before the first token.
    """

    recurrent: Any
    conv: Any


DELTA_STATE_AXES = DeltaState(
    recurrent=("layers", "batch", "heads", None, None), conv=("layers", "batch", None, "heads")
)
"""Logical axes of a stacked state."""


def init_delta_state(config: DeltaConfig, layers: int, sequences: int, dtype: DTypeLike) -> DeltaState:
    """The state before the first token. `dtype` is the compute dtype."""
    c, lead = config, (layers, sequences)
    return DeltaState(
        recurrent=jnp.zeros((*lead, c.value_heads, c.key_dim, c.value_dim), wide(dtype)),
        conv=jnp.zeros((*lead, c.conv_width - 1, _channels(c)), dtype),
    )


def _channels(c: DeltaConfig) -> int:
    """Channels of the convolution: all heads' queries, keys, then values."""
    return 2 * c.key_heads * c.key_dim + c.value_heads * c.value_dim


class DeltaNet(nnx.Module):
    """Gated DeltaNet mixer (Yang et al. 2024, arXiv 2412.06464), as Qwen3.5 has it.

    Queries, keys and values pass a causal depthwise convolution and SiLU; queries and keys are normalised to unit
    length. A value head's output is normalised with a gain that is not centred at one, then gated by SiLU. Gates, delta
    rule and state are in FP32.
    """

    def __init__(self, config: ModelConfig, layers: int, rngs: nnx.Rngs):
        c, hidden, lead = config.delta, config.hidden_size, (layers,)
        values, channels = c.value_heads * c.value_dim, _channels(c)
        into = ("layers", "embed", "heads")
        self.norm = norm_gain(rngs, (*lead, hidden), ("layers", "norm"), centred=config.centred_norms)
        self.qkv = param(rngs, (*lead, hidden, channels), into, hidden)
        self.gate = param(rngs, (*lead, hidden, values), into, hidden)
        self.decay = param(rngs, (*lead, hidden, c.value_heads), into, hidden)
        self.beta = param(rngs, (*lead, hidden, c.value_heads), into, hidden)
        self.conv = param(rngs, (*lead, c.conv_width, channels), ("layers", None, "heads"), c.conv_width)
        # Decay rates of 0.01 to 16 per unit of step size: from heads that remember long to such that barely do.
        rate = jax.random.uniform(rngs.params(), (*lead, c.value_heads), jnp.float32, 0.01, 16)
        self.log_rate = nnx.Param(jnp.log(rate), logical_axes=("layers", "heads"))
        self.step_bias = param(rngs, (*lead, c.value_heads), ("layers", "heads"))
        self.output_norm = norm_gain(rngs, (*lead, c.value_dim), ("layers", "norm"))
        self.output = param(rngs, (*lead, values, hidden), ("layers", "heads", "embed"), values)

    def __call__(self, x, positions, valid, inputs: LayerInputs, numerics: Numerics, config: ModelConfig):
        """x `[B, T, D]` -> (x plus what the mixer adds, `DeltaState` or None, nothing captured).

        Tokens that are not `valid` change no state and reach no other token; they may only follow a row's valid
        tokens. `inputs.cache` continues from a `DeltaState`; None starts from zeros.
        """
        c, batch, tokens = config.delta, x.shape[0], x.shape[1]
        h = rms_norm(x, self.norm, config.norm_eps, centred=config.centred_norms)
        cache, layer = inputs.cache, inputs.layer
        if cache is None:
            before = _at(init_delta_state(c, 1, batch, x.dtype), 0)
        else:
            before = cache if layer is None else _at(cache, layer)

        qkv, conv = self._convolve(linear(h, self.qkv), before.conv, valid)
        keys = c.key_heads * c.key_dim
        q, k, v = jnp.split(qkv, (keys, 2 * keys), axis=-1)
        q, k = (_unit(y.reshape(batch, tokens, c.key_heads, c.key_dim)) for y in (q, k))
        v = v.reshape(batch, tokens, c.value_heads, c.value_dim)
        g, beta = self._gates(h, valid)
        rule = delta_rule_recurrent if cache is not None and tokens == 1 else delta_rule_chunked
        y, recurrent = rule(q * c.key_dim**-0.5, k, v, g, beta, before.recurrent)

        y = norms.rms_norm(y, cast_weight(self.output_norm[...], x.dtype), config.norm_eps)
        y = y * jax.nn.silu(linear(h, self.gate).astype(y.dtype).reshape(y.shape))
        x = x + linear(y.reshape(batch, tokens, -1).astype(x.dtype), self.output)
        if cache is None:
            return x, None, {}
        # To the bit: a sum with 0 makes 0 of -0.
        fed = jnp.any(valid, axis=1)[:, None, None, None]
        after = DeltaState(recurrent=jnp.where(fed, recurrent, before.recurrent), conv=conv)
        return x, after if layer is None else _put(cache, after, layer), {}

    def _convolve(
        self, x: Float[Array, "B T C"], history: Float[Array, "B taps C"], valid: Bool[Array, "B T"]
    ) -> tuple[Float[Array, "B T C"], Float[Array, "B taps C"]]:
        """Causal depthwise convolution, then SiLU, in FP32; and the inputs that the next token will need."""
        acc, tokens, before = wide(x.dtype), x.shape[1], history.shape[1]
        if x.dtype == jnp.bfloat16:
            # Explicitly, so that these inputs are to the bit what later tokens read from the state.
            x = round_to_bf16(x).astype(x.dtype)
        inputs = jnp.concatenate([history, x], axis=1)
        weight = cast_weight(self.conv[...], x.dtype).astype(acc)
        taps = (
            inputs[:, tap : tap + tokens].astype(acc) * weight[None, None, tap] for tap in range(before + 1)
        )
        last = jnp.sum(valid, axis=1)[:, None] + jnp.arange(before)[None]
        return jax.nn.silu(sum(taps)), jnp.take_along_axis(inputs, last[..., None], axis=1)

    def _gates(
        self, h: Float[Array, "B T D"], valid: Bool[Array, "B T"]
    ) -> tuple[Float[Array, "B T Hv"], Float[Array, "B T Hv"]]:
        """Log decay and write strength in FP32; both 0 for padding, which so leaves the state as it is."""
        acc = wide(h.dtype)
        rate = jnp.exp(cast_weight(self.log_rate[...], h.dtype).astype(acc))[None, None]
        bias = cast_weight(self.step_bias[...], h.dtype).astype(acc)[None, None]
        step = jax.nn.softplus(matmul(h, cast_weight(self.decay[...], h.dtype)) + bias)
        beta = jax.nn.sigmoid(matmul(h, cast_weight(self.beta[...], h.dtype)))
        return jnp.where(valid[..., None], -rate * step, 0), jnp.where(valid[..., None], beta, 0)


def _unit(x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
    """Vectors divided by their length."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + UNIT_EPS)


def _at(state: DeltaState, layer) -> DeltaState:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, layer, keepdims=False), state)


def _put(stacked: DeltaState, state: DeltaState, layer) -> DeltaState:
    """`stacked` with one layer's state replaced, in place where the caller's buffer allows."""
    return jax.tree.map(
        lambda whole, leaf: lax.dynamic_update_index_in_dim(whole, leaf, layer, 0), stacked, state
    )
