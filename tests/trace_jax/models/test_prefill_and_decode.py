"""Prefill, decode and the trainer's forward, layer by layer from identical inputs in FP32 (numeric contract)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kernels_pallas.formats import unpack_codes
from kernels_pallas.quantize import quantize
from tests.trace_jax import small
from tests.trace_jax.families import FAMILIES, config_of
from trace_jax.models import init_cache
from trace_jax.models.layers import LayerInputs
from trace_jax.models.transformer import run_layer
from trace_jax.quant import SITES, FakeQuantNumerics, PackedNumerics, QuantPlan

MODELS = {"tiny_moe": small.MODEL} | {family: config_of(family) for family in FAMILIES}
PLAN = QuantPlan()
BATCH, LENGTH = 3, 12
LENGTHS = np.array([12, 9, 5])
# FP32 GEMMs of other shapes and attention in another order differ by about 1e-6 of a row's largest value.
TOLERANCE = 2e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed(PackedNumerics):
    """Keeps the rows before rounding too."""

    def activation(self, site, x, guides):
        q, _ = super().activation(site, x, guides)
        return q, (q, x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer(FakeQuantNumerics):
    def activation(self, site, x, guides):
        operand, _ = super().activation(site, x, guides)
        return operand, (quantize(x, self.plan.fp4), x)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 6))
def layer(model, window, graphdef, state, x, positions, numerics, cache, valid):
    with jax.default_matmul_precision("highest"):
        inputs = LayerInputs(cache=cache, window=window)
        return run_layer(*nnx.merge(graphdef, state), x, positions, valid, inputs, numerics, model)


def cache_of_layer(model, mixer, length):
    """A cache of one layer, without the axis of layers."""
    return jax.tree.map(lambda leaf: leaf[0], init_cache(model, BATCH, length, PLAN.fp4)[mixer])


@pytest.fixture(scope="module", params=list(MODELS))
def runs(request):
    """Per layer: (prefill, decode, trainer), each {site: (codes, rows before rounding or bits)}, and the experts."""
    config = dataclasses.replace(MODELS[request.param], dtype="float32")
    graphdef, params = small.masters(config)
    model, packed = (nnx.merge(graphdef, p) for p in (params, small.sync(params, PLAN, "float32")))
    rng = np.random.default_rng(5)
    x = model.embedding[...][jnp.asarray(rng.integers(0, config.vocab_size, (BATCH, LENGTH)))]
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (BATCH, LENGTH))
    valid = jnp.asarray(np.arange(LENGTH) < LENGTHS[:, None])
    found = []
    for index, kind in enumerate(config.layers):
        of_rollout, of_trainer = (nnx.split(m.layer(index)) for m in (packed, model))
        run = functools.partial(layer, config, kind.window)
        cache = cache_of_layer(config, kind.mixer, LENGTH + 4)
        after, filled, experts, prefill = run(*of_rollout, x, positions, Packed(plan=PLAN), cache, valid)
        steps = []
        for t in range(LENGTH):
            column = slice(t, t + 1)
            out, cache, step_experts, captured = run(
                *of_rollout,
                x[:, column],
                positions[:, column],
                Packed(plan=PLAN),
                cache,
                valid[:, column],
            )
            steps.append((out, step_experts, captured))
        decode = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *steps)
        trained, _, own_experts, trainer = run(*of_trainer, x, positions, Trainer(plan=PLAN), None, valid)
        found.append(
            {
                "prefill": (after, experts, prefill, filled),
                "decode": (*decode, cache),
                "trainer": (trained, own_experts, trainer, None),
            }
        )
        x = after
    return jax.device_get(found)


@pytest.mark.parametrize("path", ["decode", "trainer"])
@pytest.mark.parametrize("site", SITES)
def test_codes_are_those_of_the_prefill(runs, path, site):
    valid = np.arange(LENGTH) < LENGTHS[:, None]
    layers = [(index, run) for index, run in enumerate(runs) if site in run["trainer"][2]]
    for index, run in layers:
        # K and V of the cache paths are rounded inside `append`; the trainer holds the same rows before rounding.
        reference, other = run["prefill"][2][site][0], run[path][2][site][0]
        rows = run["trainer"][2][site][1]
        may_differ = np.asarray(small.sensitive(rows, TOLERANCE, PLAN.fp4))
        assert may_differ.mean() < 0.02, "the tolerance would hide real differences"
        fed = valid.reshape(*valid.shape, *(1,) * (rows.ndim - 2))
        differs = np.asarray(
            unpack_codes(jnp.asarray(reference.words)) != unpack_codes(jnp.asarray(other.words))
        )
        assert not np.any(differs & ~may_differ & fed), f"layer {index}: {np.mean(differs)}"
        blocks = may_differ.reshape(*may_differ.shape[:-1], -1, PLAN.fp4.block).any(-1)
        assert not np.any((reference.scales != other.scales) & ~blocks & fed)
        assert not np.any((reference.row_exponent != other.row_exponent) & ~may_differ.any(-1) & fed[..., 0])


@pytest.mark.parametrize("path", ["decode", "trainer"])
def test_layer_outputs_and_routes_agree(runs, path):
    valid = np.arange(LENGTH) < LENGTHS[:, None]
    for run in runs:
        if run["prefill"][1] is not None:
            assert np.array_equal(run["prefill"][1][valid], run[path][1][valid])
        # Where a code flipped, the row moves by a rounding step; most rows have none.
        gap = np.abs(run["prefill"][0] - run[path][0])[valid].max(-1)
        assert np.median(gap) < 1e-4 and gap.max() < 0.3


def test_caches_of_prefill_and_decode_hold_the_fed_rows_only(runs):
    for run in runs:
        for name in ("k", "v", "latent"):
            prefill, decode = (getattr(run[path][3], name, None) for path in ("prefill", "decode"))
            if prefill is None:
                continue
            same = (prefill.words == decode.words).mean()
            assert same > 0.98
            for sequence, length in enumerate(LENGTHS):
                for cache in (prefill, decode):
                    assert not np.any(cache.words[sequence, length:]) and np.any(
                        cache.words[sequence, length - 1]
                    )
