"""The benchmark of prefill's quantization times what it says."""

import jax
import numpy as np
import pytest

from experiments.bench_kernels import many, measure
from experiments.prefill_cases import SHAPES, PrefillShape, prefill_cases
from kernels_pallas.formats import get_format
from kernels_pallas.quantize import dequantize, quantize

TINY = {"tiny": PrefillShape(batch=2, tokens=8, heads=1, q_heads=2, dim=32)}
CASES = {f"{case.op} {case.shape}": case for case in prefill_cases(TINY, "xla")}


@pytest.mark.parametrize("name", CASES)
def test_every_call_rounds_its_own_keys_and_values(name):
    case = CASES[name]
    (rows,) = case.arguments()
    firsts = [jax.tree.map(lambda a, i=i: a + i, rows) for i in range(2)]
    found = many(case.ours)(firsts)
    format = get_format("nvfp4" if "nvfp4" in name else "mxfp4")
    for (q, k, v), out in zip(firsts, found, strict=True):
        k, v = (jax.jit(lambda a: dequantize(quantize(a, format)))(a) for a in (k, v))
        expected = (k, v)
        if "attention" in case.op:
            (baseline,) = case.baselines.values()
            expected = jax.jit(baseline)((q, k, v))
        for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_a_row_of_the_table_has_both_times(monkeypatch):
    for name, count in (("FEW", 1), ("MANY", 2), ("REPEATS", 1)):
        monkeypatch.setattr(f"experiments.bench_kernels.{name}", count)
    row = measure(CASES["prefill rounding of K and V tiny nvfp4 batch 2 tokens 8 head 32"], bandwidth=1.0)
    assert set(row["us"]) == {"ours", "bf16 attention"} and "ratio" in row and "bandwidth_share" in row
    assert "without" not in row


def test_both_parts_are_timed_at_every_shape_and_format():
    assert len(list(prefill_cases())) == 4 * len(SHAPES)
