"""Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434 and 2412.19437).

Keys and values of all heads are expanded from one latent vector per token, and positions are in a separate key that all
heads share. Shapes: H heads, R latent rank, n and r the parts of queries and keys without and with RoPE, v value dim.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas import dots
from kernels_pallas.arrays import Fp4Array, Stacked
from kernels_pallas.decode_attention import attend
from kernels_pallas.kv_cache import LatentCache, append_latent, in_rows
from kernels_pallas.quantize import dequantize
from trace_jax.models.config import ModelConfig
from trace_jax.models.layers import LayerInputs, linear, norm_gain, param, rms_norm
from trace_jax.models.rope import rope
from trace_jax.quant import KEY, Numerics, cast_weight


class LatentAttention(nnx.Module):
    """Attention over latents: the quantization site is the latent as cached, after its norm, one row per token.

    The trainer expands the latent to keys and values. Over a cache, queries are folded through the key expansion and
    the weighted sum of latents is expanded to values: the same function with one row per token in the place of H.
    There is no value site, and the RoPE key is not quantized.
    """

    def __init__(self, config: ModelConfig, layers: int, rngs: nnx.Rngs):
        c, m, lead = config, config.latent, (layers,)
        queries = c.num_heads * (m.nope_dim + m.rope_dim)
        expanded = c.num_heads * (m.nope_dim + m.value_dim)
        values = c.num_heads * m.value_dim
        self.norm = norm_gain(rngs, (*lead, c.hidden_size), ("layers", "norm"), centred=c.centred_norms)
        if m.query_rank is None:
            self.query = param(
                rngs, (*lead, c.hidden_size, queries), ("layers", "embed", "heads"), c.hidden_size
            )
        else:
            self.query_down = param(
                rngs, (*lead, c.hidden_size, m.query_rank), ("layers", "embed", "norm"), c.hidden_size
            )
            self.query_norm = param(rngs, (*lead, m.query_rank), ("layers", "norm"))
            self.query_up = param(
                rngs, (*lead, m.query_rank, queries), ("layers", "rank", "heads"), m.query_rank
            )
        # The latent's columns, then those of the RoPE key.
        self.kv_down = param(
            rngs,
            (*lead, c.hidden_size, m.latent_rank + m.rope_dim),
            ("layers", "embed", "norm"),
            c.hidden_size,
        )
        self.kv_norm = param(rngs, (*lead, m.latent_rank), ("layers", "norm"))
        # Per head the key's columns, then the value's.
        self.kv_up = param(rngs, (*lead, m.latent_rank, expanded), ("layers", "rank", "heads"), m.latent_rank)
        self.output = param(rngs, (*lead, values, c.hidden_size), ("layers", "heads", "embed"), values)

    def __call__(self, x, positions, valid, inputs: LayerInputs, numerics: Numerics, config: ModelConfig):
        c, m = config, config.latent
        h = rms_norm(x, self.norm, c.norm_eps, centred=c.centred_norms)
        if m.query_rank is None:
            q = linear(h, self.query)
        else:
            q = linear(rms_norm(linear(h, self.query_down), self.query_norm, c.norm_eps), self.query_up)
        q = q.reshape(*positions.shape, c.num_heads, m.nope_dim + m.rope_dim)
        q_nope, q_rope = jnp.split(q, [m.nope_dim], axis=-1)
        q_rope = rope(q_rope, positions, c.rope)
        latent, k_rope = jnp.split(linear(h, self.kv_down), [m.latent_rank], axis=-1)
        latent = rms_norm(latent, self.kv_norm, c.norm_eps)
        k_rope = rope(k_rope[:, :, None], positions, c.rope)[:, :, 0]
        scale = (m.nope_dim + m.rope_dim) ** -0.5 * c.rope.score_scale
        up = cast_weight(self.kv_up[...], x.dtype).reshape(m.latent_rank, c.num_heads, -1)
        captured = {}
        if inputs.cache is None:
            latent, captured[KEY] = numerics.activation(KEY, latent, inputs.guides)
            cache = None
            mask = (positions[:, :, None] >= positions[:, None, :]) & valid[:, None, :]
            out = expanded_attention(q_nope, q_rope, latent, k_rope, up, mask, scale)
        else:
            cache, captured[KEY] = append_latent(
                inputs.cache,
                latent,
                k_rope,
                positions,
                valid,
                layer=inputs.layer,
                page_table=inputs.page_table,
            )
            where = {"layer": inputs.layer, "page_table": inputs.page_table}
            out = absorbed_attention(q_nope, q_rope, cache, up, positions, scale, **where)
        out = linear(out.reshape(*positions.shape, -1), self.output)
        return x + out, cache, captured


def expanded_attention(
    q_nope: Float[Array, "B T H n"],
    q_rope: Float[Array, "B T H r"],
    latent: Float[Array, "B S R"],
    k_rope: Float[Array, "B S r"],
    up: Float[Array, "R H n_and_v"],
    mask: Bool[Array, "B T S"],
    scale: float,
) -> Float[Array, "B T H v"]:
    """Attention over the keys and values that `up` makes of the latents: what the trainer runs."""
    nope_dim, rope_dim = q_nope.shape[-1], q_rope.shape[-1]
    expanded = dots.einsum("bsr,rhd->bshd", latent, up).astype(latent.dtype)
    k_nope, v = jnp.split(expanded, [nope_dim], axis=-1)
    shared = jnp.broadcast_to(k_rope[:, :, None], (*k_nope.shape[:3], rope_dim))
    q = jnp.concatenate([q_nope, q_rope], axis=-1)
    return attend(q, jnp.concatenate([k_nope, shared], axis=-1), v, mask, scale=scale)


def absorbed_attention(
    q_nope: Float[Array, "B T H n"],
    q_rope: Float[Array, "B T H r"],
    cache: LatentCache,
    up: Float[Array, "R H n_and_v"],
    positions: Int[Array, "B T"],
    scale: float,
    *,
    layer: Int[Array, ""] | None = None,
    page_table: Int[Array, "B pages"] | None = None,
) -> Float[Array, "B T H v"]:
    """Attention over the cache entries s <= position without expanding them.

    q_nope . (up_k latent) is (up_k^T q_nope) . latent, so all heads attend to one key per token, the latent and the
    RoPE key side by side, whose value is the latent. FP4 latents are dequantized exactly. Folded queries and summed
    latents are rounded to the compute dtype, which is how far this is from `expanded_attention`.

    Args:
        cache: the queries' own entries included; with `layer` stacked over layers, with `page_table` in pages, of which
            those up to a query's position are mapped.
        positions: of each query in its sequence.
    """
    dtype, nope_dim = q_nope.dtype, q_nope.shape[-1]
    if layer is not None:
        cache = Stacked(cache, layer).slice()
    if page_table is not None:
        cache = in_rows(cache, page_table)
    latent = cache.latent
    latent = dequantize(latent, dtype) if isinstance(latent, Fp4Array) else latent.astype(dtype)
    folded = dots.einsum("bthn,rhn->bthr", q_nope, up[..., :nope_dim]).astype(dtype)
    q = jnp.concatenate([folded, q_rope], axis=-1)
    k = jnp.concatenate([latent, cache.rope_key.astype(dtype)], axis=-1)
    mask = jnp.arange(cache.length, dtype=positions.dtype).reshape(1, 1, -1) <= positions[:, :, None]
    summed = attend(q, k[:, :, None], latent[:, :, None], mask, scale=scale)
    return dots.einsum("bthr,rhv->bthv", summed, up[..., nope_dim:]).astype(dtype)
