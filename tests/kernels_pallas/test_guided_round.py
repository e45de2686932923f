"""Guided rounding: exact answers, an independent oracle, and properties."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.formats import MXFP4, NVFP4, pack_bits
from kernels_pallas.guided_round import (
    MODES,
    Guide,
    compact_scales,
    guided_round,
    usable_rows,
)
from kernels_pallas.guided_round.api import IMPLEMENTATIONS
from kernels_pallas.guided_round.shapes import SHAPES
from kernels_pallas.quantize import quantize
from tests.kernels_pallas import oracle
from tests.kernels_pallas.guided import guide_of, noisy, own, run
from tests.kernels_pallas.serving import refuses, served, skip_where_refused
from tests.kernels_pallas.strategies import bf16_rows

FORMATS = pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=lambda f: f.name)
EACH_MODE = pytest.mark.parametrize("mode", MODES)
EXAMPLES = settings(max_examples=30, deadline=None)


@pytest.fixture(params=sorted(IMPLEMENTATIONS), scope="module")
def implementation(request):
    x = jnp.ones((4, 64), jnp.bfloat16)
    guide = guide_of(quantize(x, NVFP4), "mantissa")
    options = {"axis": -1, "row_axes": (-1,)}
    skip_where_refused(IMPLEMENTATIONS, request.param, guided_round, (x, guide), NVFP4, **options)
    return request.param


@FORMATS
@EACH_MODE
@given(x=bf16_rows(finite=True), seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.0, 0.01, 0.2, 2.0]))
@EXAMPLES
def test_agrees_with_the_oracle(implementation, format, mode, x, seed, share):
    trainer = noisy(np.clip(x.astype(np.float32), -1e37, 1e37).astype(ml_dtypes.bfloat16), seed, share)
    codes, _, record, _ = run(
        jnp.asarray(trainer), jnp.asarray(x), format, mode, implementation=implementation
    )
    scales = np.asarray(record.scales)
    if format is NVFP4:
        scale = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    else:
        scale = np.ldexp(1.0, scales.astype(np.int64) - 127)
    arguments = trainer, scale, np.asarray(record.row_exponent), np.asarray(record.codes), mode, format
    np.testing.assert_array_equal(np.asarray(codes.codes), oracle.guided_codes(*arguments))
    np.testing.assert_array_equal(np.asarray(codes.scales), scales)


def test_two_forty_nine_follows_a_rollout_of_two_fifty_one(implementation):
    def row(value):
        return jnp.asarray([[6.0, value] + [0.0] * 14], jnp.bfloat16)

    for mode, expected in {"scale": 2.0, "mantissa": 3.0, "full": 3.0}.items():
        _, values, _, record = run(row(2.49), row(2.51), NVFP4, mode, implementation=implementation)
        assert float(record[0, 1]) == 3.0
        assert float(values[0, 1]) == expected


@FORMATS
@EACH_MODE
@given(x=bf16_rows(finite=True))
@EXAMPLES
def test_the_rollouts_own_values_are_kept(format, mode, x):
    """On the grid there is nothing to choose: identity, in every mode."""
    _, _, record, values = run(jnp.asarray(x), jnp.asarray(x), format, mode)
    codes, again, _, _ = run(values, jnp.asarray(x), format, mode)
    np.testing.assert_array_equal(np.asarray(codes.codes), np.asarray(record.codes))
    np.testing.assert_array_equal(np.asarray(again), np.asarray(values))


@FORMATS
@EACH_MODE
@given(x=bf16_rows(finite=True))
@EXAMPLES
def test_equal_inputs_give_the_rollouts_codes(format, mode, x):
    codes, _, record, _ = run(jnp.asarray(x), jnp.asarray(x), format, mode)
    np.testing.assert_array_equal(np.asarray(codes.codes), np.asarray(record.codes))


@FORMATS
@given(
    x=bf16_rows(finite=True, exponents=(-20, 20)),
    seed=st.integers(0, 2**32 - 1),
    share=st.sampled_from([0.01, 0.3]),
)
@EXAMPLES
def test_full_mode_is_never_further_from_the_rollout_than_nearest_rounding(format, x, seed, share):
    trainer = jnp.asarray(noisy(x, seed, share))
    _, full, _, record = run(trainer, jnp.asarray(x), format, "full")
    _, nearest, _, _ = run(trainer, jnp.asarray(x), format, "scale")
    record = np.asarray(record, np.float64)
    assert (np.abs(np.asarray(full) - record) <= np.abs(np.asarray(nearest) - record)).all()


@FORMATS
@given(x=bf16_rows(finite=True, exponents=(-20, 20)), seed=st.integers(0, 2**32 - 1))
@EXAMPLES
def test_every_mode_picks_a_neighbour_and_keeps_the_sign(format, x, seed):
    trainer = noisy(x, seed, 0.3)
    codes, _, _, _ = run(jnp.asarray(trainer), jnp.asarray(x), format, "scale")
    for mode in ("mantissa", "full"):
        guided, _, _, _ = run(jnp.asarray(trainer), jnp.asarray(x), format, mode)
        a, b = np.asarray(guided.codes), np.asarray(codes.codes)
        assert (np.abs((a & 7).astype(int) - (b & 7)) <= 1).all()
        assert (a != 8).all() and ((a & 7 == 0) | ((a >= 8) == np.signbit(trainer))).all()


@FORMATS
@EACH_MODE
def test_rows_without_a_record_round_to_nearest_under_their_own_scales(implementation, format, mode, rng):
    x = rng.standard_normal((4, 64)).astype(np.float32)
    trainer = jnp.asarray(x * 3 + 0.1 * rng.standard_normal(x.shape), jnp.bfloat16)
    valid = jnp.asarray([True, False, True, False])
    codes, *_ = run(trainer, jnp.asarray(x), format, mode, valid, implementation=implementation)
    guided, *_ = run(trainer, jnp.asarray(x), format, mode, implementation=implementation)
    alone = own(trainer, format)
    for a, with_record, without in zip(*map(jax.tree.leaves, (codes, guided, alone)), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[::2], np.asarray(with_record)[::2])
        np.testing.assert_array_equal(np.asarray(a)[1::2], np.asarray(without)[1::2])


@FORMATS
@EACH_MODE
def test_a_poisoned_record_is_unusable_for_its_whole_row(implementation, format, mode, rng):
    x = rng.standard_normal((3, 64)).astype(np.float32)
    trainer = jnp.asarray(x * 1.1, jnp.bfloat16)
    bad = x.copy()
    bad[1, 5] = np.nan
    codes, *_ = run(trainer, jnp.asarray(bad), format, mode, implementation=implementation)
    alone = own(trainer, format)
    for a, b in zip(jax.tree.leaves(codes), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[1], np.asarray(b)[1])
    usable = jax.jit(lambda x: usable_rows(guide_of(quantize(x, format), mode), format))(jnp.asarray(bad))
    np.testing.assert_array_equal(np.asarray(usable), [True, False, True])


@FORMATS
@EACH_MODE
@pytest.mark.parametrize("compact", [False, True], ids=["full_scales", "compact_scales"])
def test_a_non_finite_trainer_block_is_poisoned_record_or_not(implementation, format, mode, compact, rng):
    x = rng.standard_normal((2, 64)).astype(np.float32)
    trainer = x.copy()
    trainer[:, 3] = [np.nan, np.inf]
    valid = jnp.asarray([True, False])
    codes, values, record, _ = run(
        jnp.asarray(trainer), jnp.asarray(x), format, mode, valid, compact, implementation
    )
    assert (np.asarray(codes.scales)[:, 0] == format.poison).all()
    assert (np.asarray(codes.codes)[:, : format.block] == 0).all()
    assert np.isnan(np.asarray(values)[:, : format.block]).all()
    assert np.isfinite(np.asarray(values)[:, format.block :]).all()
    np.testing.assert_array_equal(np.asarray(codes.scales)[0, 1:], np.asarray(record.scales)[0, 1:])


@EACH_MODE
def test_scale_zero_gives_code_zero(implementation, mode):
    rollout = jnp.zeros((1, 32), jnp.bfloat16).at[0, 0].set(6.0)
    trainer = rollout.at[0, 20].set(1e-3)
    codes, *_ = run(trainer, rollout, NVFP4, mode, implementation=implementation)
    assert int(codes.scales[0, 1]) == 0 and int(codes.codes[0, 20]) == 0


def test_beyond_six_the_code_is_seven_whatever_the_record_says(implementation):
    rollout = jnp.asarray([[6.0, 4.0] + [0.0] * 14], jnp.bfloat16)
    trainer = rollout.at[0, 1].set(9.0)
    for mode in MODES:
        codes, *_ = run(trainer, rollout, NVFP4, mode, implementation=implementation)
        assert int(codes.codes[0, 1]) == 7


@pytest.mark.parametrize("exponent", [-100, -8, -7, -1, 0, 1, 40])
def test_what_counts_as_zero_under_a_row_scale(implementation, exponent):
    """|x| / 2^e below 2^-126 counts as 0, on the grid; anything above, BF16 subnormals too, may round up."""
    rows = [
        2.0**-133,
        2.0**-127,
        2.0**-126,
        2.0 ** max(exponent - 127, -133),
        2.0 ** max(exponent - 126, -133),
    ]
    bits = np.float32(rows).view(np.uint32) >> 16  # subnormals as bits: a float constant might be flushed
    x = np.zeros((len(rows), 16), np.uint16)
    x[:, 0] = bits
    guide = Guide(
        scales=jnp.full((len(rows), 1), 0x38, jnp.uint8),
        row_exponent=jnp.full(len(rows), exponent + 127, jnp.uint8),
        mantissa=jnp.full((len(rows), 2), 255, jnp.uint8),
        valid=jnp.ones(len(rows), bool),
        mode="mantissa",
    )
    x = jax.lax.bitcast_convert_type(jnp.asarray(x), jnp.bfloat16)
    codes = jax.jit(lambda x, g: guided_round(x, g, NVFP4, implementation=implementation))(x, guide)
    expected = [int(r * 2.0**-exponent >= 2.0**-126) for r in rows]
    np.testing.assert_array_equal(np.asarray(codes.codes)[:, 0], expected)


@pytest.mark.parametrize(
    ("format", "mode", "compact"),
    [(NVFP4, "scale", False), (NVFP4, "mantissa", True), (NVFP4, "full", False), (MXFP4, "mantissa", True)],
    ids=lambda p: getattr(p, "name", str(p)),
)
def test_weights_are_guided_along_axis_minus_two(implementation, format, mode, compact, rng):
    w = rng.standard_normal((2, 64, 8)).astype(np.float32)
    moved = jnp.asarray(w * (1 + 0.02 * rng.standard_normal(w.shape)), jnp.float32)

    @jax.jit
    def both(w, moved):
        kept = quantize(w, format, axis=-2, row_axes=(-2, -1))
        low = pack_bits(kept.unpack().codes & 1).swapaxes(-1, -2)
        scales = compact_scales(kept.scales, -2) if compact else kept.scales
        common = {"row_exponent": kept.row_exponent, "valid": jnp.asarray([True, False]), "mode": mode}
        guide = Guide(scales=scales, mantissa=low, words=kept.words, compact=compact, **common)
        options = {"row_axes": (-2, -1), "implementation": implementation}
        in_place = guided_round(moved, guide, format, axis=-2, **options)
        across = Guide(
            scales=scales.swapaxes(-1, -2),
            mantissa=low.swapaxes(-1, -2),
            words=kept.words.swapaxes(-1, -2),
            compact=compact,
            **common,
        )
        return in_place, guided_round(moved.swapaxes(-1, -2), across, format, **options)

    in_place, across = served(implementation, both)(jnp.asarray(w), moved)
    assert in_place.axis == -2 and in_place.codes.shape == w.shape
    np.testing.assert_array_equal(np.asarray(in_place.codes).swapaxes(-1, -2), np.asarray(across.codes))
    np.testing.assert_array_equal(np.asarray(in_place.scales).swapaxes(-1, -2), np.asarray(across.scales))
    unguided = own(moved, format, axis=-2, row_axes=(-2, -1))
    np.testing.assert_array_equal(np.asarray(in_place.codes)[1], np.asarray(unguided.codes)[1])
    if mode != "scale":
        assert (np.asarray(in_place.codes)[0] != np.asarray(unguided.codes)[0]).any()


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_are_served(implementation, name):
    shape = SHAPES[name]
    size = shape.shape[shape.axis]

    def grouped(count, dtype):
        axis = len(shape.shape) + shape.axis
        return jax.ShapeDtypeStruct((*shape.shape[:axis], count, *shape.shape[axis + 1 :]), dtype)

    rows = shape.shape[: -len(shape.row_axes)]
    guide = Guide(
        scales=grouped(size // 16, jnp.uint8),
        row_exponent=jax.ShapeDtypeStruct(rows, jnp.uint8),
        mantissa=grouped(size // 8, jnp.uint8),
        valid=jax.ShapeDtypeStruct(rows, jnp.bool_),
        mode="mantissa",
    )
    options = {"axis": shape.axis, "row_axes": shape.row_axes, "implementation": implementation}
    x = jax.ShapeDtypeStruct(shape.shape, jnp.bfloat16)
    place = {"axis": shape.axis, "row_axes": shape.row_axes}
    if refuses(IMPLEMENTATIONS, implementation, guided_round, (x, guide), NVFP4, **place):
        return
    out = jax.eval_shape(lambda x, guide: guided_round(x, guide, NVFP4, **options), x, guide)
    assert out.shape == shape.shape


def test_errors_name_what_is_wrong():
    x = jnp.zeros((2, 64), jnp.bfloat16)
    packed, guide = jax.jit(lambda x: (a := quantize(x, NVFP4), guide_of(a, "mantissa")))(x)
    with pytest.raises(ValueError, match="unknown guidance mode 'bits'"):
        guide_of(packed, "bits")
    with pytest.raises(ValueError, match="needs `mantissa`"):
        Guide(scales=guide.scales, row_exponent=guide.row_exponent, valid=guide.valid, mode="mantissa")
    with pytest.raises(ValueError, match=r"guide.scales has shape \(2, 4\); expected \(2, 2\)"):
        guided_round(x, guide, MXFP4)
    with pytest.raises(ValueError, match=r"guide.scales has shape \(2, 4\); expected \(3, 4\)"):
        guided_round(jnp.zeros((3, 64), jnp.bfloat16), guide, NVFP4)
    wrong = jax.tree.map(lambda leaf: leaf.astype(jnp.int32), guide)
    with pytest.raises(TypeError, match=r"guide.scales is int32; expected uint8"):
        guided_round(x, wrong, NVFP4)
    with pytest.raises(TypeError, match=r"float16.*bfloat16"):
        guided_round(x.astype(jnp.float16), guide, NVFP4)
    with pytest.raises(ValueError, match=r"no implementation 'cuda'; available"):
        guided_round(x, guide, NVFP4, implementation="cuda")
