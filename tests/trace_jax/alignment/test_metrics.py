"""Mismatch metrics against their formulas in NumPy, and against hand-made examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.arrays import Fp4Array
from kernels_pallas.formats import NVFP4, pack_codes
from trace_jax.alignment.metrics import compare_codes, logprob_mismatch
from trace_jax.alignment.report import audit_report, flatten_report
from trace_jax.quant import SiteAudit

mismatch = jax.jit(logprob_mismatch)


def test_logprob_mismatch_formulas(rng):
    rollout = -rng.exponential(size=(40, 50)).astype(np.float32)
    train = (rollout + 0.1 * rng.standard_normal((40, 50))).astype(np.float32)
    mask = rng.random((40, 50)) < 0.7
    found = mismatch(train, rollout, mask)
    t, r = train[mask].astype(np.float64), rollout[mask].astype(np.float64)
    gap, ratio = np.abs(t - r), np.exp(t - r)
    expected = {
        "logprob_abs_diff_mean": gap.mean(),
        "logprob_abs_diff_p999": np.sort(gap)[-1 - int(0.001 * gap.size)],
        "logprob_abs_diff_max": gap.max(),
        "kl_k1": (r - t).mean(),
        "kl_k3": (ratio - 1 - (t - r)).mean(),
        "ess": ratio.mean() ** 2 / (ratio**2).mean(),
        "pearson": np.corrcoef(np.exp(t), np.exp(r))[0, 1],
    }
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-4, atol=1e-6, err_msg=name)


def test_equal_policies(rng):
    logprobs = -rng.exponential(size=(4, 5)).astype(np.float32)
    found = mismatch(logprobs, logprobs, np.ones((4, 5), bool))
    for name in ("logprob_abs_diff_mean", "logprob_abs_diff_max", "kl_k1", "kl_k3"):
        assert found[name] == 0
    np.testing.assert_allclose([found["ess"], found["pearson"]], 1, rtol=1e-5)


def test_masked_tokens_do_not_count(rng):
    train, rollout = (-rng.exponential(size=(4, 5)).astype(np.float32) for _ in range(2))
    mask = rng.random((4, 5)) < 0.5
    mask[0, 0] = True
    other = np.where(mask, train, np.float32(-1e4))
    for name, value in mismatch(train, rollout, mask).items():
        assert value == mismatch(other, rollout, mask)[name], name


def test_no_tokens_at_all():
    zeros = np.zeros((2, 3), np.float32)
    assert all(np.isfinite(v) for v in mismatch(zeros, zeros, np.zeros((2, 3), bool)).values())


def fp4(codes, scales=None, row_exponent=None):
    codes = jnp.asarray(codes, jnp.uint8)
    if scales is None:
        scales = np.full((*codes.shape[:-1], codes.shape[-1] // 16), 0x38)  # 1.0
    if row_exponent is None:
        row_exponent = np.full(codes.shape[:-1], 127)
    return Fp4Array(
        words=pack_codes(codes),
        scales=jnp.asarray(scales, jnp.uint8),
        row_exponent=jnp.asarray(row_exponent, jnp.uint8),
        format=NVFP4,
    )


@pytest.fixture
def codes():
    return np.full((2, 3, 32), 2, np.uint8)  # 2 layers, 3 rows, every value 1.0


def test_identical_codes(codes):
    found = compare_codes(fp4(codes), fp4(codes), jnp.ones((2, 3), bool))
    assert np.array_equal(found["code_mismatch"], [0, 0]) and np.array_equal(found["d_act"], [0, 0])
    assert np.array_equal(found["adjacent_share"], [1, 1]) and np.array_equal(found["scale_mismatch"], [0, 0])


def test_counted_by_hand(codes):
    other = codes.copy()
    other[1, 0, :3] = 3  # 1.5: neighbours
    other[1, 2, 7] = 7  # 6.0: far away
    found = compare_codes(fp4(codes), fp4(other), jnp.ones((2, 3), bool))
    np.testing.assert_allclose(found["code_mismatch"], [0, 4 / 96])
    np.testing.assert_allclose(found["adjacent_share"], [1, 3 / 4])
    np.testing.assert_allclose(found["d_act"], [0, np.sqrt((3 * 0.25 + 25) / 96)], rtol=1e-6)
    # The same without the row of the far one.
    rows = jnp.asarray([[True, True, True], [True, True, False]])
    found = compare_codes(fp4(codes), fp4(other), rows)
    np.testing.assert_allclose(found["code_mismatch"], [0, 3 / 64])
    np.testing.assert_allclose(found["adjacent_share"], [1, 1])
    np.testing.assert_allclose(found["d_act"], [0, np.sqrt(0.75 / 64)], rtol=1e-6)


def test_neighbours_across_zero(codes):
    a, b = codes.copy(), codes.copy()
    a[0, 0, :3], b[0, 0, :3] = (
        (0, 0, 1),
        (9, 1, 9),
    )  # 0 and -0.5, 0 and 0.5 are neighbours; 0.5 and -0.5 are not
    found = compare_codes(fp4(a), fp4(b), jnp.ones((2, 3), bool))
    np.testing.assert_allclose(found["adjacent_share"][0], 2 / 3)


def test_scale_mismatch_includes_the_row_scale(codes):
    scales = np.full((2, 3, 2), 0x38)
    scales[0, 1, 0] += 1
    exponent = np.full((2, 3), 127)
    exponent[1, 0] += 1
    found = compare_codes(fp4(codes), fp4(codes, scales, exponent), jnp.ones((2, 3), bool))
    np.testing.assert_allclose(found["scale_mismatch"], [1 / 6, 2 / 6])
    assert np.array_equal(found["code_mismatch"], [0, 0]) and (found["d_act"] > 0).all()


def test_report_of_an_audit(codes):
    used = codes.copy()
    used[1, 0, 0] = 3
    rollout, trainer = fp4(codes[:, None]), fp4(used[:, None])  # one audited sequence of 3 rows
    own = fp4(np.full((2, 1, 3, 32), 3))
    guided = np.zeros((2, 1, 3), bool)
    guided[1] = True
    audit = SiteAudit(own=own, used=trainer, guided=jnp.asarray(guided), saturated=jnp.full((2, 1, 3), 4))
    fed = np.asarray([[True, True, False]])
    report = audit_report({"expert_input": rollout}, {"expert_input": audit}, fed)["expert_input"]
    np.testing.assert_allclose(report["code_mismatch"], [0, 1 / 64])
    np.testing.assert_allclose(report["code_mismatch_before"], [1, 1])
    np.testing.assert_allclose(report["unguided_share"], [1, 0])
    np.testing.assert_allclose(report["saturated_share"], [4 / 32, 4 / 32])
    scalars, lists = flatten_report({"expert_input": report})
    assert scalars["alignment/expert_input/code_mismatch"] == pytest.approx(1 / 128)
    assert lists["alignment_by_layer/expert_input/code_mismatch"] == pytest.approx([0, 1 / 64])
    names = {
        "d_act",
        "code_mismatch",
        "adjacent_share",
        "scale_mismatch",
        "unguided_share",
        "saturated_share",
    }
    assert {f"alignment/expert_input/{name}" for name in names} <= set(scalars)


def test_report_refuses_other_sites_and_rows(codes):
    rollout = fp4(codes[:, None])
    audit = SiteAudit(
        own=rollout, used=rollout, guided=jnp.ones((2, 1, 3), bool), saturated=jnp.zeros((2, 1, 3))
    )
    with pytest.raises(ValueError, match=r"rollout audited \['key'\], trainer \['value'\]"):
        audit_report({"key": rollout}, {"value": audit}, np.ones((1, 3), bool))
    short = jax.tree.map(lambda leaf: leaf[:, :, :2], rollout)
    with pytest.raises(ValueError, match="audit of 'key': rollout rows"):
        audit_report({"key": short}, {"key": audit}, np.ones((1, 2), bool))
