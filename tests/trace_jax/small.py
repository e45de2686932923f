"""A model, prompts and rollouts small enough for one CPU core, built once per process and shared by the tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.formats import Fp4Format, unpack_codes
from kernels_pallas.quantize import quantize
from trace_jax.models import ModelConfig, abstract, logical_axes
from trace_jax.quant import QuantPlan, rollout_weights
from trace_jax.rl import MethodConfig, OptimizerConfig, RLConfig, Trainer, make_batch, make_optimizer
from trace_jax.rollout import RolloutConfig, Sampler, SamplingConfig, Trajectories
from trace_jax.rollout.rerecord import rerecord

MODEL = ModelConfig(
    vocab_size=17,
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    num_experts=4,
    experts_per_token=2,
    expert_hidden_size=32,
)
STOP = 2
PROMPTS = ([1, 5, 9, 4], [1, 7, 3], [1, 11, 12, 13, 14, 6])
GROUP = 2
# All sequences are audited, so every code of the rollout is at hand.
ROLLOUT = RolloutConfig(num_prompts=3, group_size=GROUP, prompt_length=6, chunk=4, audit_rows=tuple(range(6)))
SAMPLING = SamplingConfig(max_new_tokens=10, stop_tokens=(STOP,))
RL = RLConfig(prompts=3, group_size=GROUP, max_new_tokens=10, decode_chunk=4, audit_sequences=6)
ALL_SITES = ("expert_input", "down_input", "key", "value")
METHODS = {
    "bf16": MethodConfig(name="bf16", rollout="bf16", trainer="bf16"),
    "fp4_rollout": MethodConfig(name="fp4_rollout", trainer="bf16"),
    "qat": MethodConfig(name="qat", trainer="fake_quant"),
    "trace": MethodConfig(name="trace", layers="last_half"),
    "trace_all_layers": MethodConfig(name="trace_all_layers", layers="all"),
    "trace_all_sites": MethodConfig(name="trace_all_sites", layers="all", sites=ALL_SITES),
    "trace_compact_scales": MethodConfig(name="trace_compact_scales", layers="all", compact_scales=True),
    "trace_full": MethodConfig(name="trace_full", layers="all", mode="full"),
    "trace_scale": MethodConfig(name="trace_scale", layers="all", mode="scale"),
}


def method(name: str) -> MethodConfig:
    return METHODS[name]


def perturbed(params, relative: float, seed: int):
    """Every weight moved by a random `relative` of itself. In NumPy: compiling JAX's generator costs seconds."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda w: jnp.asarray(w * (1 + relative * rng.standard_normal(w.shape)), w.dtype), params
    )


@functools.cache
def masters(model: ModelConfig = MODEL, seed: int = 0):
    """(graphdef, FP32 masters). Gains are not 1, so that no weight is exactly representable in BF16."""
    rng = np.random.default_rng(seed)
    graphdef, shapes = abstract(model)

    def init(leaf, axes):
        if axes[-1] == "norm":
            return jnp.asarray(1 + 0.05 * rng.standard_normal(leaf.shape), leaf.dtype)
        return jnp.asarray(rng.standard_normal(leaf.shape) * leaf.shape[-2] ** -0.5, leaf.dtype)

    leaves, tree = jax.tree.flatten(shapes)
    axes = jax.tree.leaves(logical_axes(shapes), is_leaf=lambda a: isinstance(a, tuple))
    return graphdef, jax.tree.unflatten(tree, [init(*pair) for pair in zip(leaves, axes, strict=True)])


sync = jax.jit(rollout_weights, static_argnums=(1, 2))


@functools.cache
def sampler(plan: QuantPlan | None, record, model=MODEL, rollout=ROLLOUT, sampling=SAMPLING) -> Sampler:
    return Sampler(masters(model)[0], model, rollout, sampling, plan=plan, record=record)


def keys_for(prompts, seed: int = 7, group: int = GROUP) -> jax.Array:
    return jax.random.split(jax.random.key(seed), len(prompts) * group)


@functools.cache
def fp4_sampler(model: ModelConfig = MODEL) -> Sampler:
    """The one FP4 sampler: records every layer and site, audits every sequence. Compiling another costs 10 s."""
    chosen = method("trace_all_sites")
    return sampler(chosen.rollout_plan(), chosen.record_spec(model), model)


@functools.cache
def rollout(name: str, model: ModelConfig = MODEL) -> Trajectories:
    """Trajectories of a method on the shared prompts, version 3. Treat as read-only.

    The record of another FP4 method than `trace_all_sites` is taken from the full codes that all of them compute.
    """
    chosen, (_, params) = method(name), masters(model)
    keys = keys_for(PROMPTS)
    plan = chosen.rollout_plan()
    weights = sync(params, plan, model.dtype)
    if plan is None:
        rollout = dataclasses.replace(ROLLOUT, audit_rows=())
        return sampler(None, None, model, rollout).generate(weights, PROMPTS, keys, weight_version=3)
    if name != "trace_all_sites":
        return rerecord(rollout_of_all_sites(model), chosen.record_spec(model))
    return fp4_sampler(model).generate(weights, PROMPTS, keys, weight_version=3)


def rollout_of_all_sites(model: ModelConfig = MODEL) -> Trajectories:
    return rollout("trace_all_sites", model)


def routes(trajectories: Trajectories) -> np.ndarray:
    """Recorded routes as the model takes them: int32, -1 where there is none."""
    recorded = trajectories.record.routes
    return np.where(recorded == np.iinfo(recorded.dtype).max, -1, recorded.astype(np.int32))


@functools.cache
def trainer(name: str, config: RLConfig = RL, model: ModelConfig = MODEL) -> Trainer:
    chosen = method(name)
    return Trainer(
        masters(model)[0],
        model,
        config,
        make_optimizer(OptimizerConfig(learning_rate=1e-3), 100),
        numerics=chosen.trainer_numerics(config.audit_sequences),
        spec=chosen.record_spec(model),
    )


ADVANTAGES = np.asarray([1.0, -1.0, 0.5, -0.5, 2.0, -1.5], np.float32)


def batch(name: str, trajectories=None, *, replay_routes: bool = True, model: ModelConfig = MODEL):
    return make_batch(
        rollout(name, model) if trajectories is None else trajectories,
        ADVANTAGES,
        model=model,
        spec=method(name).record_spec(model),
        weight_version=3,
        replay_routes=replay_routes,
    )


def equal_trees(a, b) -> bool:
    """Same structure and the same bits."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype
        and np.array_equal(np.asarray(x), np.asarray(y), equal_nan=jnp.issubdtype(x.dtype, jnp.floating))
        for x, y in pairs
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def sensitive(x, tolerance: float, format: Fp4Format):
    """Elements whose code, block scale or row scale changes when the row is moved by the tolerance."""
    step = tolerance * jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    moved = quantize(jnp.stack([x, x + step, x - step, x * (1 + tolerance), x * (1 - tolerance)]), format)
    codes = unpack_codes(moved.words)
    scales = (moved.scales != moved.scales[:1]) | (moved.row_exponent != moved.row_exponent[:1])[..., None]
    return jnp.any((codes != codes[:1]) | jnp.repeat(scales, format.block, axis=-1), axis=0)
