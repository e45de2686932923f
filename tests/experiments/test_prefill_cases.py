"""The benchmark of prefill's quantization times what it says."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench_kernels import FEW, MANY, Copies, Program, many, measure
from experiments.prefill_cases import SHAPES, PrefillShape, prefill_cases
from kernels_pallas.formats import get_format
from kernels_pallas.quantize import dequantize, quantize

TINY = {"tiny": PrefillShape(batch=2, tokens=8, heads=1, q_heads=2, dim=32)}
CASES = {f"{case.op} {case.shape}": case for case in prefill_cases(TINY, "xla")}
ROUNDING = [name for name, case in CASES.items() if case.baseline_arguments is None]


@pytest.mark.parametrize("name", ROUNDING)
def test_every_call_rounds_its_own_keys_and_values(name):
    case = CASES[name]
    (rows,) = case.arguments()
    firsts = [jax.tree.map(lambda a, i=i: a + i, rows) for i in range(2)]
    format = get_format("nvfp4" if "nvfp4" in name else "mxfp4")
    total = 0.0
    for count, (q, k, v) in enumerate(firsts, start=1):
        k, v = (jax.jit(lambda a: dequantize(quantize(a, format)))(a) for a in (k, v))
        expected = (k, v)
        if "attention" in case.op:
            (baseline,) = case.baselines.values()
            expected = jax.jit(baseline)((q, k, v))
        total += sum(float(leaf[0, 0, 0, 0]) for leaf in jax.tree.leaves(expected))
        np.testing.assert_allclose(many(case.ours, carried=False)(firsts[:count], [()]), total, rtol=1e-6)


@pytest.mark.parametrize("operation", ["dot", "multiply"])
def test_no_call_is_dropped_merged_or_made_smaller(operation):
    """Products with the same weights, and passes of which one element would do."""
    run = {"dot": lambda x, w: x @ w, "multiply": lambda x, w: x * w}[operation]
    firsts = [jnp.full((64, 64), float(i)) for i in range(5)]
    lowered = many(run, carried=False).lower(firsts, [(jnp.ones((64, 64)),)])
    hlo = lowered.compile().as_text()
    assert len(re.findall(rf"= f32\[64,64\]\S* {operation}\(", hlo)) == 5


def test_what_is_carried_goes_from_call_to_call():
    program = Program(lambda total, step: total + step, (jnp.zeros(3), jnp.ones(3)), carried=True)
    np.testing.assert_array_equal(np.asarray(program.firsts[0]), np.full(3, FEW + MANY[0]))


def test_the_driver_copies_every_array():
    program = Copies(jnp.arange(1024.0))
    hlo = program.run.lower(program.firsts[:3], program.rests).compile().as_text()
    assert len(re.findall(r"= f32\[1024\]\S* copy\(", hlo)) == 3


def test_other_arguments_are_read_in_turns(monkeypatch):
    monkeypatch.setattr("experiments.bench_kernels.UNCACHED", 30)  # bytes: three copies of three numbers
    program = Program(lambda x, w: x * w, (jnp.ones(3), jnp.full(3, 2.0)))
    assert len(program.rests) == 3
    marked = [(jnp.full(3, float(i)),) for i in range(3)]
    for count in (1, 2, 3, 4):
        out = program.run(program.firsts[:count], marked)
        assert float(out) == sum(i % 3 for i in range(count))


def test_a_row_of_the_table_has_both_times(monkeypatch):
    case = dataclasses.replace(CASES["prefill attention tiny nvfp4 batch 2 tokens 8 head 32"], bytes=1000)
    for name, count in (("FEW", 1), ("MANY", (2, 3))):
        monkeypatch.setattr(f"experiments.bench_kernels.{name}", count)
    monkeypatch.setattr("experiments.bench_kernels.timed", lambda programs: dict.fromkeys(programs, 5.0))
    row = measure(case, bandwidth=1e6)
    assert set(row["us"]) == {"ours", "bf16 attention"} and row["ratio"] == 1.0 and "bandwidth_share" in row
    assert "without" not in row
    for us, bandwidth in ((-1.0, 1e6), (5.0, 1.0)):  # less than nothing, and than its bytes take
        monkeypatch.setattr(
            "experiments.bench_kernels.timed", lambda programs, us=us: dict.fromkeys(programs, us)
        )
        with pytest.raises(RuntimeError, match="the compiler dropped calls"):
            measure(case, bandwidth=bandwidth)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ROUNDING])
def test_the_cache_is_attended_to_as_rounded_rows_are(name):
    case = CASES[name]
    rounding = CASES[name.replace(" over the cache", "")]
    (rows,) = case.baseline_arguments()
    ours, expected = case.ours(*case.arguments()), rounding.ours(rows)
    np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (ours, expected)), atol=0.03)


def test_all_parts_are_timed_at_every_shape_and_format():
    assert len(list(prefill_cases())) == 6 * len(SHAPES)
