"""Grouped-query attention; keys and values are quantized, then attended to."""

import jax
from flax import nnx

from kernels_pallas.decode_attention import attend, attention
from kernels_pallas.kv_cache import append
from trace_jax.models.config import ModelConfig
from trace_jax.models.layers import LayerInputs, linear, norm_gain, param, rms_norm, wide
from trace_jax.models.rope import rope
from trace_jax.quant import KEY, VALUE, Numerics, cast_weight


class Attention(nnx.Module):
    """Attention with what families add to it: q/k norms, biases, output gates, sinks, windows, partial RoPE."""

    def __init__(self, config: ModelConfig, layers: int, rngs: nnx.Rngs):
        c, lead = config, (layers,)
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.norm = norm_gain(rngs, (*lead, c.hidden_size), ("layers", "norm"), centred=c.centred_norms)
        self.query = param(rngs, (*lead, c.hidden_size, q), ("layers", "embed", "heads"), c.hidden_size)
        self.key = param(rngs, (*lead, c.hidden_size, kv), ("layers", "embed", "kv_heads"), c.hidden_size)
        self.value = param(rngs, (*lead, c.hidden_size, kv), ("layers", "embed", "kv_heads"), c.hidden_size)
        self.output = param(rngs, (*lead, q, c.hidden_size), ("layers", "heads", "embed"), q)
        if c.output_gate:
            self.gate = param(rngs, (*lead, c.hidden_size, q), ("layers", "embed", "heads"), c.hidden_size)
        if c.qk_norm != "none":
            widths = (c.head_dim, c.head_dim) if c.qk_norm == "head" else (q, kv)
            for name, width in zip(("query_norm", "key_norm"), widths, strict=True):
                gain = norm_gain(rngs, (*lead, width), ("layers", "norm"), centred=c.centred_norms)
                setattr(self, name, gain)
        if c.attention_bias:
            for name, width, axis in (
                ("query_bias", q, "heads"),
                ("key_bias", kv, "kv_heads"),
                ("value_bias", kv, "kv_heads"),
                ("output_bias", c.hidden_size, "norm"),
            ):
                setattr(self, name, param(rngs, (*lead, width), ("layers", axis), constant=0.0))
        if c.sinks:
            self.sinks = param(rngs, (*lead, c.num_heads), ("layers", "heads"), constant=0.0)

    def __call__(self, x, positions, valid, inputs: LayerInputs, numerics: Numerics, config: ModelConfig):
        c = config
        h = rms_norm(x, self.norm, c.norm_eps, centred=c.centred_norms)
        q = self._heads("query", h, c.num_heads, c)
        k = self._heads("key", h, c.num_kv_heads, c)
        v = self._heads("value", h, c.num_kv_heads, c)
        q, k = rope(q, positions, c.rope), rope(k, positions, c.rope)
        sinks = cast_weight(self.sinks[...], x.dtype).astype(wide(x.dtype)) if c.sinks else None
        captured = {}
        if inputs.cache is None:
            k, captured[KEY] = numerics.activation(KEY, k, inputs.guides)
            v, captured[VALUE] = numerics.activation(VALUE, v, inputs.guides)
            cache = None
            mask = (positions[:, :, None] >= positions[:, None, :]) & valid[:, None, :]
            if inputs.window is not None:
                mask &= positions[:, None, :] > positions[:, :, None] - inputs.window
            out = attend(q, k, v, mask, sinks=sinks)
        else:
            cache, captured[KEY], captured[VALUE] = append(
                inputs.cache, k, v, positions, valid, layer=inputs.layer, page_table=inputs.page_table
            )
            out = attention(
                q,
                cache,
                positions,
                layer=inputs.layer,
                page_table=inputs.page_table,
                window=inputs.window,
                sinks=sinks,
            )
        out = out.reshape(*positions.shape, -1)
        if c.output_gate:
            gate = jax.nn.sigmoid(linear(h, self.gate).astype(wide(x.dtype)))
            out = (out.astype(gate.dtype) * gate).astype(x.dtype)
        return x + linear(out, self.output, getattr(self, "output_bias", None)), cache, captured

    def _heads(self, name: str, h, heads: int, c: ModelConfig):
        """Projection `name` by heads `[B, T, heads, d]`, normalised where the family does."""
        y = linear(h, getattr(self, name), getattr(self, f"{name}_bias", None))
        gain = getattr(self, f"{name}_norm", None)
        if gain is not None and c.qk_norm == "full":
            y = rms_norm(y, gain, c.norm_eps, centred=c.centred_norms)
        y = y.reshape(*y.shape[:2], heads, c.head_dim)
        if gain is not None and c.qk_norm == "head":
            y = rms_norm(y, gain, c.norm_eps, centred=c.centred_norms)
        return y
