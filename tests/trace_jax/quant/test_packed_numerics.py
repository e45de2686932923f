"""The rollout's fused quantizers leave what norm, quantizer and capture leave one after the other, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import norms
from kernels_pallas.implementations import default_implementation
from kernels_pallas.kv_cache import append, init_cache
from kernels_pallas.quantize import quantize
from tests.trace_jax.small import equal_trees
from trace_jax.guidance import GuidanceSpec, capture_site, pack_layer, take_rows
from trace_jax.quant import DOWN_INPUT, EXPERT_INPUT, KEY, SITES, VALUE, PackedNumerics, QuantPlan

EPS, AUDITED = 1e-6, (2, 0)
VALID = jnp.asarray([[True], [False], [True], [True]])
POSITIONS = jnp.zeros((4, 1), jnp.int32)


def spec(mode, sites=SITES, format="nvfp4"):
    return GuidanceSpec(format=format, mode=mode, layers=(0,), sites=sites)


CASES = {
    "mantissa": (QuantPlan(), spec("mantissa", ("expert_input", "key", "value"))),
    "mantissa of mxfp4": (QuantPlan(format="mxfp4"), spec("mantissa", format="mxfp4")),
    "scale": (QuantPlan(), spec("scale")),
    "full": (QuantPlan(), spec("full")),
    "4 over 6": (QuantPlan(scale_rule="4over6"), spec("mantissa")),
    "no record": (QuantPlan(), None),
}


@pytest.fixture
def rows(rng):
    """Residual stream, gain, input of the down projection, keys and values of one token; a head's key has NaN."""

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    key = normal(4, 1, 2, 32).at[0, 0, 1, 5].set(jnp.nan)
    return normal(4, 1, 128), normal(128), normal(4, 1, 2, 64), key, normal(4, 1, 2, 32)


def fused(numerics, x, gain, act, k, v):
    """As in a layer: what it feeds to its GEMMs, and what leaves it."""
    captured = {}
    h, rows, captured[EXPERT_INPUT] = numerics.norm_activation(EXPERT_INPUT, x, gain, EPS, None)
    act, captured[DOWN_INPUT] = numerics.activation(DOWN_INPUT, act, None)
    cache = init_cache(*k.shape, numerics.plan.fp4)
    _, captured[KEY], captured[VALUE] = append(cache, k, v, POSITIONS, VALID)
    return h, rows, act, *numerics.collect(captured, VALID, True)


def one_after_the_other(numerics, x, gain, act, k, v):
    plan, record = numerics.plan, numerics.record
    h = norms.rms_norm(x, gain, EPS)
    rules = (plan.scale_rule, plan.scale_rule, "amax", "amax")  # the cache has one
    codes = {
        site: quantize(a, plan.fp4, scale_rule=rule)
        for site, a, rule in zip(SITES, (h, act, k, v), rules, strict=True)
    }
    if record is not None:
        (sites,) = record.groups
        kept = {site: capture_site(site, codes[site], VALID, record) for site in sites}
        record = {sites[0]: pack_layer(kept)}
    audit = {site: take_rows(q, AUDITED) for site, q in codes.items()}
    return h, codes[EXPERT_INPUT], codes[DOWN_INPUT], record, audit


@pytest.mark.parametrize("implementation", ["reference", "pallas_tpu"])
@pytest.mark.parametrize("case", CASES)
def test_fused_and_separate_ops_leave_the_same_bits(rows, case, implementation):
    plan, record = CASES[case]
    if implementation == "pallas_tpu" and plan.scale_rule != "amax":
        pytest.skip("TPU kernels have no scale rule '4over6'")
    numerics = PackedNumerics(plan=plan, record=record, audit_rows=AUDITED)
    with default_implementation(implementation):
        found = jax.jit(functools.partial(fused, numerics))(*rows)
    with default_implementation("reference"):
        expected = jax.jit(functools.partial(one_after_the_other, numerics))(*rows)
    assert equal_trees(found, expected)


def test_low_bits_come_with_the_rows_where_a_record_asks_for_them(rows):
    x, gain, act, *_ = rows
    of_inputs = PackedNumerics(plan=QuantPlan(), record=spec("mantissa", ("expert_input",)))
    assert of_inputs.norm_activation(EXPERT_INPUT, x, gain, EPS, None)[2][1].shape == (4, 1, 16)
    assert of_inputs.activation(DOWN_INPUT, act, None)[1][1] is None
    of_all = PackedNumerics(plan=QuantPlan(), record=spec("mantissa"))
    assert of_all.activation(DOWN_INPUT, act, None)[1][1].shape == (4, 1, 2, 8)


def test_in_another_dtype_than_bf16_the_norm_is_not_rounded(rows):
    x, gain = rows[0].astype(jnp.float32), rows[1].astype(jnp.float32)
    h, *_ = PackedNumerics(plan=QuantPlan()).norm_activation(EXPERT_INPUT, x, gain, EPS, None)
    assert h.dtype == jnp.float32 and equal_trees(h, norms.rms_norm(x, gain, EPS))
