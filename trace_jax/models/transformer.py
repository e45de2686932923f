"""Decoder-only transformer: layers under `lax.scan` over periods, split where guidance starts or stops."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.arrays import Fp4Array, Stacked
from kernels_pallas.matmul import matmul
from kernels_pallas.tiled import TiledFp4Array
from trace_jax.models.attention import Attention
from trace_jax.models.config import ModelConfig
from trace_jax.models.delta import DeltaNet
from trace_jax.models.dense import Dense
from trace_jax.models.latent import LatentAttention
from trace_jax.models.layers import LayerInputs, norm_gain, param, rms_norm
from trace_jax.models.moe import MoE
from trace_jax.models.runs import Places, Run, concatenate_kept, layer_runs, stack_kept
from trace_jax.parallel import constrain
from trace_jax.quant import Numerics, cast_weight

STACKS = {"attention": Attention, "delta": DeltaNet, "latent": LatentAttention, "moe": MoE, "dense": Dense}
"""Sub-layers by name; the parameters of each are stacked over the layers that have it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardOutput:
    """What a forward pass leaves behind.

    `hidden` `[B, T, D]` after the final norm; `cache` updated, or None; `routes` int32 `[M, B, T, k]`, the experts that
    the routers of the M MoE layers chose themselves (also where others were replayed);
    `guided` and `every`: what `Numerics.collect` kept under each of its keys, stacked over the guided layers and over
    all layers that kept it; None where nothing was.
    """

    hidden: Any
    cache: Any
    routes: Any
    guided: Any
    every: Any


def run_layer(
    mixer: nnx.Module,
    ffn: nnx.Module,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    inputs: LayerInputs,
    numerics: Numerics,
    config: ModelConfig,
):
    """The one layer that prefill, decode and training share: a mixer, then experts or an MLP.

    Everything that differs between them (packed FP4, fake-quant, guided, BF16) is in `numerics`; whether earlier tokens
    come from a cache is in `inputs`.

    Returns:
        The residual stream, the cache, the router's own experts (None without one), and what the sites captured.
    """
    with jax.named_scope("mixer"):
        x, cache, captured = mixer(x, positions, valid, inputs, numerics, config)
    experts = None
    with jax.named_scope("ffn"):
        if isinstance(ffn, Dense):
            x = ffn(x, config)
        else:
            x, experts, captured_moe = ffn(x, inputs, numerics, config)
            captured = captured | captured_moe
    return constrain(x, ("batch", "length", "act_embed")), cache, experts, captured


class Transformer(nnx.Module):
    """Parameters of the whole model; `__call__` is pure.

    The module is split once (`nnx.split`) and merged inside jitted functions, with masters, BF16 copies or packed
    FP4 arrays as parameter values.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        if config.vocab_size < 1:
            raise ValueError("model.vocab_size is 0; set it to the tokenizer's vocabulary size.")
        self.config = config
        width = config.hidden_size
        self.embedding = param(rngs, (config.vocab_size, width), ("vocab", "embed"), width)
        for name, module in STACKS.items():
            if layers := len(config.layers_of(name)):
                setattr(self, name, module(config, layers, rngs))
        self.final_norm = norm_gain(rngs, (width,), ("norm",), centred=config.centred_norms)
        if not config.tied_embedding:
            self.head = param(rngs, (width, config.vocab_size), ("embed", "vocab"), width)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
        *,
        numerics: Numerics,
        cache: dict[str, Any] | None = None,
        page_table: Int[Array, "B pages"] | None = None,
        routes: Int[Array, "M B T k"] | None = None,
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
            cache: of `init_cache`; tokens are added to it, then attended to.
            page_table: pages of each sequence, negative where none is mapped, if the cache is paged.
            routes: expert ids to replay in each of the M MoE layers, negative where a token chooses for itself.
            guides: records by site, stacked over those of the guided layers that have the site, `[L, B, T, ...]`.
            weight_guides: packed expert weights of the rollout's version, stacked over MoE layers.
            guided_layers: static, increasing.
        """
        config = self.config
        # Rounded after the lookup, so that the gradient is summed over a token's occurrences in FP32: BF16 sums of
        # thousands of rows stop growing (and on GPUs contend for the same few addresses).
        x = cast_weight(self.embedding[...][tokens], config.dtype)
        x = constrain(x, ("batch", "length", "act_embed"))
        stacks = {name: nnx.split(getattr(self, name)) for name in STACKS if config.layers_of(name)}
        by_layer = {
            **{name: (config.layers_of(name), state) for name, (_, state) in stacks.items()},
            "routes": (config.layers_of("moe"), routes),
            "weight_guides": (config.layers_of("moe"), weight_guides),
            **{
                site: (tuple(i for i in config.site_layers(site) if i in guided_layers), guide)
                for site, guide in (guides or {}).items()
            },
        }
        carry, parts = (x, cache), []
        for run in layer_runs(config.layers, guided_layers):
            carry, part = self._run(
                run, carry, by_layer, stacks, guides, page_table, positions, valid, numerics
            )
            parts.append(part)
        x, cache = carry
        routes, guided, every = (concatenate_kept([part[i] for part in parts]) for i in range(3))
        if routes is None:
            routes = {"own": jnp.zeros((0, *tokens.shape, config.experts_per_token), jnp.int32)}
        hidden = rms_norm(x, self.final_norm, config.norm_eps, centred=config.centred_norms)
        return ForwardOutput(hidden=hidden, cache=cache, routes=routes["own"], guided=guided, every=every)

    def _run(self, run: Run, carry, by_layer, stacks, guides, page_table, positions, valid, numerics):
        """One scan: the carry, and what its layers kept, by key, stacked over them."""
        config = self.config
        places = {name: Places(layers, run) for name, (layers, _) in by_layer.items()}
        # The cache and packed experts stay whole, and a layer finds its own by index: the scan would copy its slice of
        # each, and of the cache back again.
        whole = {name: _pick_packed(by_layer[name][1], True) for name in stacks}
        sliced = {
            name: places[name].slices(_pick_packed(tree, False) if name in stacks else tree)
            for name, (_, tree) in by_layer.items()
            if tree is not None
        }

        def body(carry, inputs):
            x, cache = carry
            index, sliced = inputs
            kept: list[tuple[dict, dict, dict]] = []
            for offset in range(run.period):
                layer = config.layers[run.start + offset]

                def at(name, offset=offset, sliced=sliced):
                    """This layer's part of what `by_layer` holds under a name; None where it has none."""
                    place = places[name].of(offset)
                    if place is None or name not in sliced:
                        return None
                    return jax.tree.map(lambda leaf: leaf[place], sliced[name])

                def module(name, index=index, offset=offset, at=at):
                    where = places[name].traced(index, offset)
                    return nnx.merge(stacks[name][0], _at_layer(whole[name], at(name), where))

                layer_inputs = LayerInputs(
                    cache=None if cache is None else cache[layer.mixer],
                    layer=places[layer.mixer].traced(index, offset),
                    page_table=page_table,
                    window=layer.window,
                    routes=at("routes"),
                    guides={site: at(site) for site in guides if at(site) is not None} if guides else None,
                    weight_guides=at("weight_guides"),
                )
                x, updated, experts, captured = run_layer(
                    module(layer.mixer),
                    module(layer.ffn),
                    x,
                    positions,
                    valid,
                    layer_inputs,
                    numerics,
                    config,
                )
                if cache is not None:
                    cache = cache | {layer.mixer: updated}
                routes = {} if experts is None else {"own": experts}
                guided, every = numerics.collect(captured, valid, run.guided)
                kept.append((routes, guided or {}, every or {}))
            return (x, cache), tuple(stack_kept([part[i] for part in kept]) for i in range(3))

        if config.remat:
            body = jax.checkpoint(body)
        carry, parts = jax.lax.scan(body, carry, (jnp.arange(run.repeats, dtype=jnp.int32), sliced))
        # [repeats, layers of a period, ...] -> [layers, ...]
        return carry, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), parts)

    def layer(self, index: int) -> tuple[nnx.Module, nnx.Module]:
        """One layer's mixer and its experts or MLP, for `run_layer`."""
        layer = self.config.layers[index]

        def module(name):
            graphdef, state = nnx.split(getattr(self, name))
            place = self.config.layers_of(name).index(index)
            return nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[place], state))

        return module(layer.mixer), module(layer.ffn)

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """FP32 logits."""
        if self.config.tied_embedding:
            return matmul(hidden, cast_weight(self.embedding[...], self.config.dtype).T)
        return matmul(hidden, cast_weight(self.head[...], self.config.dtype))


def _pick_packed(state: nnx.State, packed: bool) -> nnx.State:
    """The parameters that kernels index by layer, or the others; None in the place of the rest."""

    def keep(variable):
        whole = isinstance(variable.get_value(), Fp4Array | TiledFp4Array | Stacked)
        return variable if whole == packed else None

    return jax.tree.map(keep, state, is_leaf=_is_variable)


def _at_layer(packed: nnx.State, sliced: nnx.State, layer: Int[Array, ""]) -> nnx.State:
    """One layer's parameters: those that were sliced, and `layer` of the stacked packed ones."""

    def merge(whole, of_layer):
        if whole is None:
            return of_layer
        value = whole.get_value()
        return whole.replace(Stacked(value.array if isinstance(value, Stacked) else value, layer))

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
