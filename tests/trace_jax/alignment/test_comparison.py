"""Reports of runs as they come: unfinished, of unequal length, without a baseline, with undefined ratios."""

import json

import pytest

from trace_jax.alignment.comparison import group_by_method, write_report
from trace_jax.alignment.summary import GAP, ReportError, Run


def run(method, gap, steps=4, planned=4, seed=0):
    rows = [{"step": s, "reward/mean": 0.1 * s, GAP: gap, "time/train": 1.0} for s in range(steps)]
    return Run(method=method, seed=seed, rows=rows, planned=planned)


def report(tmp_path, *runs, **options):
    text = write_report(group_by_method(runs), tmp_path, **options)
    return text, json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)


def test_ratios_and_figures(tmp_path):
    text, summary = report(tmp_path, run("bf16", 0.5), run("qat", 2.0), run("trace", 1.0))
    assert summary["ratios"]["trace"]["gap_over_qat"]["value"] == 0.5
    assert summary["ratios"]["trace"]["logprob_abs_diff_mean_over_bf16"]["value"] == 2.0
    assert (tmp_path / "figures" / "rewards.png").stat().st_size > 1000
    assert "unfinished" not in text and "No ratios" not in text


def test_a_gap_of_zero_has_no_ratio_and_the_json_stays_valid(tmp_path):
    _, summary = report(tmp_path, run("bf16", 0.0), run("qat", 2.0))
    assert "logprob_abs_diff_mean_over_bf16" not in summary["ratios"]["qat"]


def test_what_is_not_finite_becomes_null(tmp_path):
    damaged = run("trace", 1.0)
    for row in damaged.rows:
        row |= {"alignment_by_layer/key/code_mismatch": [float("nan"), 0.1], "guidance/alarm": float("nan")}
    damaged.rows[0][GAP] = None
    _, summary = report(tmp_path, damaged, run("qat", 2.0))
    assert summary["methods"]["trace"]["code_mismatch_by_layer"] == {"key": [None, pytest.approx(0.1)]}
    assert summary["methods"]["trace"]["alarms"] is None


def test_gap_by_age(tmp_path):
    several = run("trace", 1.0)
    for row in several.rows:
        row |= {f"age_{n}/{GAP}": 0.5 * n for n in range(3)}
    _, summary = report(tmp_path, several)
    assert summary["methods"]["trace"]["gap_by_age"] == {"0": 0.0, "1": 0.5, "2": 1.0}


def test_an_unfinished_run_is_marked(tmp_path):
    text, summary = report(tmp_path, run("qat", 2.0), run("qat", 2.0, steps=2, seed=1))
    assert "| qat (unfinished: seed 1: 2 of 4 steps) |" in text
    assert summary["methods"]["qat"]["unfinished"] == ["seed 1: 2 of 4 steps"]


def test_a_run_without_a_step_is_refused():
    with pytest.raises(ReportError, match=r"'trace' \(seed 3\) has no complete step"):
        run("trace", 1.0, steps=0, seed=3)


def test_one_seed_twice_is_refused(tmp_path):
    with pytest.raises(ReportError, match="two runs of 'qat' with seed 0"):
        report(tmp_path, run("qat", 2.0), run("qat", 1.0))


def test_a_row_without_a_reward_is_refused(tmp_path):
    damaged = run("qat", 2.0)
    damaged.rows[1]["reward/mean"] = "high"
    with pytest.raises(ReportError, match=r"'qat' \(seed 0\) has steps without a reward"):
        report(tmp_path, damaged)


def test_spread_is_that_of_a_sample_and_one_seed_has_none(tmp_path):
    text, summary = report(tmp_path, run("qat", 2.0), run("bf16", 1.0), run("bf16", 1.0, seed=1))
    assert summary["methods"]["qat"]["reward_last"]["spread"] is None and "| 0.200 -> 0.200 |" not in text
    assert summary["methods"]["bf16"]["reward_last"] == {"mean": pytest.approx(0.2), "spread": 0.0}


def test_an_absent_baseline_is_said(tmp_path):
    text, _ = report(tmp_path, run("trace", 1.0), run("bf16", 1.0))
    assert "No ratios to `qat`: it is not among the methods." in text and "`bf16`: it is not" not in text
