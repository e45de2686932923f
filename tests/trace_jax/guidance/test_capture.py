"""From codes to the compact record, what it costs, and that the same input is rounded the same on both sides."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.formats import get_format, pack_bits, unpack_codes
from kernels_pallas.guided_round import guided_round, usable_rows
from kernels_pallas.quantize import quantize
from tests.trace_jax import small
from trace_jax.guidance import GuidanceSpec, capture_site, mantissa_bits, poisoned_rows, take_rows
from trace_jax.guidance.budget import bytes_per_token, route_bytes_per_token, site_budget

WIDTH = 128  # four MXFP4 blocks: compact scales fill whole bytes
SPECS = [
    GuidanceSpec(format=format, mode=mode, layers=(0,), compact_scales=compact)
    for format, mode, compact in itertools.product(
        ("nvfp4", "mxfp4"), ("scale", "mantissa", "full"), (False, True)
    )
]


def name_of(spec):
    return f"{spec.format}-{spec.mode}{'-compact' if spec.compact_scales else ''}"


@functools.cache
def codes(format):
    x = jnp.asarray(np.random.default_rng(3).standard_normal((2, 5, 3, WIDTH)), jnp.bfloat16)
    return x, jax.jit(quantize, static_argnums=1)(x, get_format(format))


capture = jax.jit(capture_site, static_argnums=(0, 3))
round_under = jax.jit(guided_round, static_argnums=2)


def test_mantissa_bits_are_the_low_bits_of_the_codes(rng):
    words = jnp.asarray(rng.integers(0, 2**32, (7, 16), dtype=np.uint32))
    assert np.array_equal(mantissa_bits(words), pack_bits(unpack_codes(words) & 1))


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_same_input_is_rounded_the_same_on_both_sides(spec):
    x, q = codes(spec.format)
    record = capture("key", q, jnp.ones(x.shape[:2], bool), spec)
    rounded = round_under(x, record.guide(), spec_format(spec))
    assert np.array_equal(rounded.codes, unpack_codes(q.words))
    assert np.array_equal(rounded.scales, q.scales)
    assert np.array_equal(rounded.row_exponent, q.row_exponent)


def spec_format(spec):
    return get_format(spec.format)


@pytest.mark.parametrize(
    ("format", "compact", "bits"),
    [("nvfp4", False, 1.5), ("mxfp4", False, 1.25), ("nvfp4", True, 1.125), ("mxfp4", True, 1.0625)],
)
def test_record_size_measured_from_the_arrays(format, compact, bits):
    spec = GuidanceSpec(format=format, layers=(0,), compact_scales=compact)
    x, q = codes(format)
    budget = site_budget(capture("key", q, jnp.ones(x.shape[:2], bool), spec), WIDTH)
    assert budget.bits_per_value == bits == spec.bits_per_value(WIDTH)
    assert budget.row_bytes == 1
    assert budget.rows == 2 * 5 * 3 and budget.values == x.size
    assert budget.total_bytes == x.size * bits / 8 + budget.rows


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_spec_states_the_measured_size(spec):
    x, q = codes(spec.format)
    record = capture("key", q, jnp.ones(x.shape[:2], bool), spec)
    assert site_budget(record, WIDTH).bits_per_value == spec.bits_per_value(WIDTH)
    assert (record.mantissa is None) == (spec.mode != "mantissa")
    assert (record.words is None) == (spec.mode != "full")


def test_bytes_per_token_of_a_real_record():
    record, model = small.rollout("trace_all_layers").record, small.MODEL
    values = model.hidden_size + 2 * model.num_kv_heads * model.head_dim
    rows = 1 + 2 * model.num_kv_heads
    assert bytes_per_token(record) == model.num_layers * (values * 1.5 / 8 + rows)
    assert route_bytes_per_token(record) == model.num_layers * model.experts_per_token
    for name, width in (
        ("expert_input", model.hidden_size),
        ("key", model.head_dim),
        ("value", model.head_dim),
    ):
        budget = site_budget(record.sites[name], width)
        assert budget.bits_per_value == 1.5 and budget.row_bytes == 1


def test_unguided_methods_record_nothing_but_routes():
    record = small.rollout("qat").record
    assert record.sites == {} and bytes_per_token(record) == 0 and route_bytes_per_token(record) > 0


def test_padding_is_never_recorded():
    _, q = codes("nvfp4")
    valid = jnp.asarray(np.arange(5)[None] < np.array([[2], [5]]))
    record = capture("key", q, valid, SPECS[1])
    assert np.array_equal(np.asarray(record.row_exponent != 0), np.broadcast_to(valid[..., None], (2, 5, 3)))
    assert np.array_equal(record.guide().valid, record.row_exponent != 0)


def test_a_finite_row_is_never_mistaken_for_none():
    # The smallest row exponent is -100: byte 27, so byte 0 is free to mean "no record".
    x = jnp.zeros((1, 1, WIDTH), jnp.bfloat16)
    record = capture(
        "expert_input",
        jax.jit(quantize, static_argnums=1)(x, get_format("nvfp4")),
        jnp.ones((1, 1), bool),
        SPECS[0],
    )
    assert int(record.row_exponent[0, 0]) == 27


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_poisoned_rows_guide_nothing(spec, bad):
    x, _ = codes(spec.format)
    x = x.at[0, 1, 2, 40].set(bad)
    q = jax.jit(quantize, static_argnums=1)(x, spec_format(spec))
    record = capture("key", q, jnp.ones(x.shape[:2], bool), spec)
    expected = np.ones((2, 5, 3), bool)
    expected[0, 1, 2] = False
    assert np.array_equal(poisoned_rows(q), ~expected)
    assert np.array_equal(usable_rows(record.guide(), spec_format(spec)), expected)
    if spec.compact_scales:  # which do not say it
        assert np.array_equal(np.asarray(record.row_exponent != 0), expected)
    # A trainer whose own row is finite rounds it by itself.
    clean, own = codes(spec.format)
    rounded = round_under(clean, record.guide(), spec_format(spec))
    assert np.array_equal(rounded.codes, unpack_codes(own.words))


def test_take_rows():
    _, q = codes("nvfp4")
    taken = take_rows(q, (1, 0))
    assert np.array_equal(taken.words, np.asarray(q.words)[[1, 0]]) and taken.format == q.format


def test_guide_carries_the_spec():
    spec = dataclasses.replace(SPECS[1], compact_scales=True)
    x, q = codes("nvfp4")
    guide = capture("key", q, jnp.ones(x.shape[:2], bool), spec).guide()
    assert guide.mode == spec.mode and guide.compact
