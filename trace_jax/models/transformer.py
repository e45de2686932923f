"""Decoder-only MoE transformer: layers under `lax.scan`, split where guidance starts or stops."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.arrays import Fp4Array, Stacked
from kernels_pallas.kv_cache import KVCache
from kernels_pallas.matmul import matmul
from trace_jax.models.config import ModelConfig
from trace_jax.models.layers import Block, LayerInputs, param, rms_norm
from trace_jax.parallel import constrain
from trace_jax.quant import Numerics, cast_weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardOutput:
    """What a forward pass leaves behind.

    `hidden` `[B, T, D]` after the final norm; `cache` updated, or None; `routes` int32 `[L, B, T, k]`, the experts that
    this model's own routers chose (also where others were replayed);
    `guided` and `every`: what `Numerics.collect` kept, stacked over guided layers and over all layers.
    """

    hidden: Any
    cache: Any
    routes: Any
    guided: Any
    every: Any


def layer_runs(num_layers: int, guided: tuple[int, ...]) -> list[tuple[int, int, bool]]:
    """Splits layers into maximal runs (start, stop, guided), each one scan."""
    runs, start = [], 0
    for layer in range(1, num_layers + 1):
        if layer == num_layers or (layer in guided) != (start in guided):
            runs.append((start, layer, start in guided))
            start = layer
    return runs


def _concatenate(parts: list[Any]) -> Any:
    parts = [part for part in parts if part is not None]
    if len(parts) < 2:
        return parts[0] if parts else None
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


class Transformer(nnx.Module):
    """Parameters of the whole model; `__call__` is pure.

    The module is split once (`nnx.split`) and merged inside jitted functions, with masters, BF16 copies or packed
    FP4 arrays as parameter values.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        if config.vocab_size < 1:
            raise ValueError("model.vocab_size is 0; set it to the tokenizer's vocabulary size.")
        self.config = config
        self.embedding = param(
            rngs, (config.vocab_size, config.hidden_size), ("vocab", "embed"), config.hidden_size
        )
        self.blocks = Block(config, config.num_layers, rngs)
        self.final_norm = param(rngs, (config.hidden_size,), ("norm",))
        self.head = param(
            rngs, (config.hidden_size, config.vocab_size), ("embed", "vocab"), config.hidden_size
        )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
        *,
        numerics: Numerics,
        cache: KVCache | None = None,
        routes: Int[Array, "L B T k"] | None = None,
        guides: dict[str, Any] | None = None,
        weight_guides: dict[str, Any] | None = None,
        guided_layers: tuple[int, ...] = (),
    ) -> ForwardOutput:
        """Runs all layers.

        Args:
            tokens: token ids; any id where not `valid`.
            positions: position of each token in its sequence, also its cache index.
            valid: False for padding. Padding is computed but never attended to, recorded or cached.
            numerics: arithmetic of the quantization sites.
            cache: KV cache stacked over layers; keys and values are appended, then attended to.
            routes: expert ids to replay, negative where a token chooses for itself.
            guides: records of the guided layers, stacked `[len(guided_layers), B, T, ...]`.
            weight_guides: packed expert weights of the rollout's version, stacked over layers.
            guided_layers: static, increasing.
        """
        config = self.config
        # Rounded after the lookup, so that the gradient is summed over a token's occurrences in FP32: BF16 sums of
        # thousands of rows stop growing (and on GPUs contend for the same few addresses).
        x = cast_weight(self.embedding[...][tokens], config.dtype)
        x = constrain(x, ("batch", "length", "act_embed"))
        graphdef, stacked = nnx.split(self.blocks)
        packed, sliced = _split_packed(stacked)

        def run(carry, start, stop, guided):
            # The cache and packed experts stay whole, and a layer finds its own by index: the scan would copy its
            # slice of each, and of the cache back again.
            def body(carry, inputs):
                x, cache = carry
                state, layer = inputs
                block = nnx.merge(graphdef, _at_layer(packed, state, layer.layer))
                layer = layer._replace(cache=cache)
                x, cache, experts, captured = block(x, positions, valid, layer, numerics, config)
                return (x, cache), (experts, *numerics.collect(captured, valid, guided))

            if config.remat:
                body = jax.checkpoint(body)
            offset = sum(layer < start for layer in guided_layers)
            of_run = slice(start, stop)
            inputs = LayerInputs(
                layer=jnp.arange(start, stop, dtype=jnp.int32),
                routes=_slice(routes, of_run),
                guides=_slice(guides, slice(offset, offset + stop - start)) if guided else None,
                weight_guides=_slice(weight_guides, of_run),
            )
            return jax.lax.scan(body, carry, (_slice(sliced, of_run), inputs))

        carry, parts = (x, cache), []
        for start, stop, guided in layer_runs(config.num_layers, guided_layers):
            carry, part = run(carry, start, stop, guided)
            parts.append(part)
        x, cache = carry
        experts, guided_parts, every = (_concatenate(list(p)) for p in zip(*parts, strict=True))
        hidden = rms_norm(x, self.final_norm, config.norm_eps)
        return ForwardOutput(hidden=hidden, cache=cache, routes=experts, guided=guided_parts, every=every)

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """FP32 logits."""
        return matmul(hidden, cast_weight(self.head[...], self.config.dtype))


def _slice(tree: Any, part: slice) -> Any:
    return jax.tree.map(lambda leaf: leaf[part], tree)


def _split_packed(state: nnx.State) -> tuple[nnx.State, nnx.State]:
    """The parameters that are packed FP4, and the others; None in the place of the rest."""

    def pick(packed: bool):
        def keep(variable):
            return variable if isinstance(variable.get_value(), Fp4Array) == packed else None

        return jax.tree.map(keep, state, is_leaf=_is_variable)

    return pick(True), pick(False)


def _at_layer(packed: nnx.State, sliced: nnx.State, layer: Int[Array, ""]) -> nnx.State:
    """One layer's parameters: those that were sliced, and `layer` of the stacked packed ones."""

    def merge(whole, of_layer):
        return of_layer if whole is None else whole.replace(Stacked(whole.get_value(), layer))

    return jax.tree.map(merge, packed, sliced, is_leaf=lambda leaf: leaf is None or _is_variable(leaf))


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def create(config: ModelConfig, key: jax.Array) -> tuple[nnx.GraphDef, nnx.State]:
    """Initialises a model and splits it. `key` is a JAX PRNG key."""

    @jax.jit  # one program instead of one per parameter shape
    def init(key):
        return nnx.split(Transformer(config, rngs=nnx.Rngs(params=key)))[1]

    return abstract(config)[0], init(key)


def abstract(config: ModelConfig, device: jax.Device | None = None) -> tuple[nnx.GraphDef, nnx.State]:
    """Shapes, dtypes and logical axes without arrays: the one source of sharding and checkpoint templates.

    With a `device`, every shape carries its single-device sharding, as a checkpoint template needs.
    """
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    if device is not None:
        place = jax.sharding.SingleDeviceSharding(device)
        state = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), state)
    return graphdef, state


def logical_axes(state: nnx.State) -> nnx.State:
    """The state with each parameter replaced by its tuple of logical axes."""
    return jax.tree.map(
        lambda variable: variable.get_metadata()["logical_axes"],
        state,
        is_leaf=_is_variable,
    )


def parameter_count(state: nnx.State) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(state))
