"""Rotary embedding against complex numbers in float64, and YaRN against the paper's formulas written out."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.config import ConfigError, from_mapping
from trace_jax.models.rope import RopeConfig, YarnConfig, rope

BATCH, LENGTH, HEADS, DIM = 2, 7, 3, 16
GPT_OSS = YarnConfig(factor=32.0, original_length=4096, truncate=False)
DEEPSEEK = YarnConfig(factor=40.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0)


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((BATCH, LENGTH, HEADS, DIM)), jnp.float32)


@pytest.fixture
def positions(rng):
    return jnp.asarray(rng.integers(0, 5000, (BATCH, LENGTH)), jnp.int32)


def turned(x, positions, frequencies, interleaved=False):
    """Pairs as complex numbers, multiplied by exp(i position frequency)."""
    x, dim = np.asarray(x, np.float64), 2 * len(frequencies)
    first, second = (
        (slice(0, dim, 2), slice(1, dim, 2)) if interleaved else (slice(dim // 2), slice(dim // 2, dim))
    )
    pairs = x[..., first] + 1j * x[..., second]
    pairs = pairs * np.exp(1j * np.asarray(positions)[..., None, None] * frequencies)
    out = x.copy()
    out[..., first], out[..., second] = pairs.real, pairs.imag
    return out


def plain_frequencies(theta, dim):
    return theta ** (-2.0 * np.arange(dim // 2) / dim)


def test_default_is_bitwise_the_half_split_rotation_in_fp32(x, positions):
    half = DIM // 2
    for dtype in (jnp.float32, jnp.bfloat16):
        frequency = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
        angle = positions.astype(jnp.float32)[..., None, None] * frequency.reshape(1, 1, 1, half)
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        y = x.astype(dtype)
        a, b = y[..., :half].astype(jnp.float32), y[..., half:].astype(jnp.float32)
        expected = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(dtype)
        found = rope(y, positions, RopeConfig())
        assert found.dtype == dtype and np.array_equal(found, expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [None, 4, 12])
def test_pairs_turn_by_position_times_frequency(x, positions, interleaved, dim):
    config = RopeConfig(theta=500.0, dim=dim, interleaved=interleaved)
    expected = turned(x, positions, plain_frequencies(500.0, dim or DIM), interleaved)
    found = jax.jit(rope, static_argnums=2)(x, positions, config)
    # FP32 angles of up to 5000 radians.
    np.testing.assert_allclose(found, expected, atol=3e-3)
    assert np.array_equal(found[..., dim or DIM :], x[..., dim or DIM :])


def test_positions_are_what_the_rotation_encodes(x):
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (BATCH, LENGTH))
    config = RopeConfig(interleaved=True)
    scores = []
    for shift in (0, 11):
        y = rope(x, positions + shift, config)
        scores.append(jnp.einsum("bthd,bshd->bhts", y, y))
    np.testing.assert_allclose(*scores, atol=1e-4)


def yarn_by_hand(theta, dim, scaling):
    """Frequencies of arXiv 2309.00071 (NTK by parts), from the turns of each pair in the original context."""
    plain = plain_frequencies(theta, dim)
    pair = {}
    for name in ("beta_fast", "beta_slow"):
        turns = getattr(scaling, name)
        # theta^(-2i / dim) = 2 pi turns / length, solved for i.
        pair[name] = -dim / 2 * math.log(2 * math.pi * turns / scaling.original_length) / math.log(theta)
    low, high = pair["beta_fast"], pair["beta_slow"]
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return plain * (1 - ramp) + plain / scaling.factor * ramp


@pytest.mark.parametrize(
    ("theta", "dim", "scaling"),
    [
        (150_000.0, 64, GPT_OSS),
        (150_000.0, 64, dataclasses.replace(GPT_OSS, truncate=True)),
        (10_000.0, 64, DEEPSEEK),
        (10_000.0, 16, YarnConfig(factor=4.0, original_length=32, beta_fast=4.0, beta_slow=1.5)),
    ],
)
def test_yarn_frequencies(theta, dim, scaling):
    config = RopeConfig(theta=theta, scaling=scaling)
    found, plain = config.frequencies(dim, jnp.float32), plain_frequencies(theta, dim)
    np.testing.assert_allclose(found, yarn_by_hand(theta, dim, scaling), rtol=2e-6)
    turns = scaling.original_length * plain / (2 * np.pi)
    if scaling.truncate:
        return
    np.testing.assert_allclose(found[turns > scaling.beta_fast], plain[turns > scaling.beta_fast], rtol=2e-6)
    slow = turns < scaling.beta_slow
    np.testing.assert_allclose(found[slow], plain[slow] / scaling.factor, rtol=2e-6)


def test_yarn_scales_rotations_or_scores(x, positions):
    growth = 0.1 * math.log(40) + 1
    assert DEEPSEEK.rotation_scale == 1.0
    assert RopeConfig(scaling=DEEPSEEK).score_scale == pytest.approx(growth**2)
    assert GPT_OSS.rotation_scale == pytest.approx(1.3465735902799727)  # 0.1 ln 32 + 1
    assert RopeConfig(scaling=GPT_OSS).score_scale == RopeConfig().score_scale == 1.0
    half = dataclasses.replace(DEEPSEEK, mscale=0.5)
    assert half.rotation_scale == pytest.approx((0.05 * math.log(40) + 1) / growth)
    assert dataclasses.replace(half, attention_factor=0.75).rotation_scale == 0.75
    config = RopeConfig(scaling=dataclasses.replace(GPT_OSS, attention_factor=2.0), dim=8)
    out = rope(x, positions, config)
    norms = jnp.linalg.norm(out[..., :8], axis=-1) / jnp.linalg.norm(x[..., :8], axis=-1)
    np.testing.assert_allclose(norms, 2.0, rtol=1e-5)
    assert np.array_equal(out[..., 8:], x[..., 8:])


def test_what_cannot_be_rotated_is_refused(x, positions):
    with pytest.raises(ConfigError, match=r"model\.rope\.dim is 5"):
        RopeConfig(dim=5)
    with pytest.raises(ConfigError, match=r"model\.rope\.theta"):
        RopeConfig(theta=0.0)
    with pytest.raises(ConfigError, match="beta_fast is 1"):
        YarnConfig(factor=2.0, original_length=10, beta_fast=1.0)
    with pytest.raises(ConfigError, match=r"scaling\.factor is 0.5"):
        YarnConfig(factor=0.5, original_length=10)
    with pytest.raises(ValueError, match="cannot rotate 18 dimensions of heads of 16"):
        rope(x, positions, RopeConfig(dim=18))
    with pytest.raises(ValueError, match="cannot rotate 15"):
        rope(x[..., :15], positions, RopeConfig())


def test_configs_come_from_files():
    mapping = {"theta": 150000, "scaling": {"factor": 32, "original_length": 4096, "truncate": False}}
    assert from_mapping(RopeConfig, mapping) == RopeConfig(theta=150_000.0, scaling=GPT_OSS)
