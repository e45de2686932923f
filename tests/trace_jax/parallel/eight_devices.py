"""Run by `test_eight_devices` in a process of its own with 8 virtual devices; prints its findings as JSON."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from kernels_pallas.quantize import quantize_codes
from tests.trace_jax import small
from trace_jax.alignment.report import audit_report
from trace_jax.models.layers import LayerInputs
from trace_jax.models.transformer import run_layer
from trace_jax.parallel import MeshConfig, make_mesh
from trace_jax.quant import SITES, FakeQuantNumerics, QuantPlan
from trace_jax.rl import OptimizerConfig, RLConfig, Trainer, TrainState, make_batch, make_optimizer
from trace_jax.rl.trainer import state_shardings

PROMPTS = (*small.PROMPTS, [1, 8, 8, 10, 16])  # 8 sequences: two to each of the 4 batch shards
ROLLOUT = dataclasses.replace(small.ROLLOUT, num_prompts=4, audit_rows=tuple(range(8)))
CONFIG = RLConfig(prompts=4, group_size=2, audit_sequences=8)
NAME, MODEL = "trace_all_sites", small.MODEL
METHOD = small.method(NAME)
LAYERS = tuple(range(MODEL.num_layers))


@functools.partial(jax.jit, static_argnums=0)
def layer_codes(index, params, x, fed):
    """Codes at every site of one layer, and its output."""
    numerics = FakeQuantNumerics(plan=QuantPlan())
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    modules = nnx.merge(small.masters()[0], params).layer(index)
    out, _, _, captured = run_layer(*modules, x, positions, fed, LayerInputs(), numerics, MODEL)
    return out, {site: quantize_codes(captured[site][0], QuantPlan().fp4) for site in SITES}


def placed(state, mesh):
    return jax.device_put(state, state_shardings(MODEL, state, mesh))


def layers(params, mesh, fed):
    """Share of differing codes per site, over all layers, each fed the single device's residual stream."""
    sharded = placed(TrainState(params=params, opt_state=()), mesh).params
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((8, 16, MODEL.hidden_size)), jnp.bfloat16)
    found = {site: [] for site in SITES}
    for index in LAYERS:
        after, codes = layer_codes(index, params, x, fed)
        with jax.set_mesh(mesh):
            _, others = layer_codes(index, sharded, np.asarray(x), fed)
        for site in SITES:
            rows = np.broadcast_to(
                fed.reshape(*fed.shape, *(1,) * (codes[site].codes.ndim - 2)), codes[site].codes.shape
            )
            found[site].append(float(np.mean(np.asarray(codes[site].codes != others[site].codes)[rows])))
        x = after
    return found


def mismatch(audit, t):
    report = audit_report(t.audit, audit, t.fed)
    return {site: float(values["code_mismatch"].max()) for site, values in report.items()}


def train_step(params, mesh, batch, t):
    trainer = Trainer(
        small.masters()[0],
        MODEL,
        CONFIG,
        make_optimizer(OptimizerConfig(clip_norm=0.0), 10),
        numerics=METHOD.trainer_numerics(8),
        spec=METHOD.record_spec(MODEL),
    )
    state = trainer.init(jax.tree.map(jnp.copy, params))
    normalizer = np.float32(batch.sampled.sum())
    if mesh is None:
        state, metrics, result = trainer.step(state, batch, normalizer)
        unguided = trainer.evaluate(params, batch.without_guidance())[1]
    else:
        with jax.set_mesh(mesh):
            state = placed(state, mesh)
            on_mesh = batch.to_device()  # as the loop sends it: cut along the batch
            assert len(on_mesh.routes.sharding.device_set) == 8
            state, metrics, result = trainer.step(state, on_mesh, normalizer)
            masters = placed(TrainState(params=params, opt_state=()), mesh).params
            unguided = trainer.evaluate(masters, batch.without_guidance())[1]
    gradients = jax.tree.map(np.asarray, optax.tree.get(state.opt_state, "mu"))
    shardings = sorted({str(leaf.sharding.spec) for leaf in jax.tree.leaves(state.params)}) if mesh else []
    return {
        "loss": float(metrics["loss"]),
        "gap": float(metrics["mismatch/logprob_abs_diff_mean"]),
        "guided": mismatch(result.audit, t),
        "unguided": mismatch(unguided.audit, t),
        "shardings": shardings,
    }, gradients


def rollout(params, mesh):
    sampler = small.sampler(METHOD.rollout_plan(), METHOD.record_spec(MODEL), MODEL, ROLLOUT)
    keys = small.keys_for(PROMPTS)
    if mesh is None:
        weights = small.sync(params, METHOD.rollout_plan(), MODEL.dtype)
        return sampler.generate(weights, PROMPTS, keys, weight_version=0)
    with jax.set_mesh(mesh):
        masters = placed(TrainState(params=params, opt_state=()), mesh).params
        weights = small.sync(masters, METHOD.rollout_plan(), MODEL.dtype)
        return sampler.generate(weights, PROMPTS, keys, weight_version=0)


def main():
    assert len(jax.devices()) == 8
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, expert=2))
    params = small.masters()[1]
    t = rollout(params, None)
    batch = make_batch(
        t,
        np.linspace(-1, 1, 8, dtype=np.float32),
        model=MODEL,
        spec=METHOD.record_spec(MODEL),
        weight_version=0,
        replay_routes=True,
    )
    single, gradients = train_step(params, None, batch, t)
    sharded, others = train_step(params, mesh, batch, t)
    # 17 tokens of vocabulary do not divide by 2: such a dimension stays whole.
    tensor, _ = train_step(params, make_mesh(MeshConfig(data=4, tensor=2)), batch, t)
    gaps = {}
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(others), strict=True
    ):
        gaps[jax.tree_util.keystr(path)] = float(np.linalg.norm(a - b) / np.linalg.norm(a))
    again = rollout(params, mesh)
    # Rows whose whole history is the same: where a token differs, the rows after it are of another text.
    same = t.fed & again.fed & np.logical_and.accumulate(again.tokens == t.tokens, axis=1)
    flips = {
        site: float(np.mean((again.audit[site].words != t.audit[site].words)[:, same])) for site in SITES
    }
    print(
        json.dumps(
            {
                "layers": layers(params, mesh, t.fed),
                "single": single,
                "sharded": sharded,
                "tensor": tensor,
                "gradient_gaps": gaps,
                "rollout_words_that_differ": flips,
                "rollout_tokens_that_agree": float(np.mean((again.tokens == t.tokens)[t.sampled])),
            }
        )
    )


if __name__ == "__main__":
    main()
