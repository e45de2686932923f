"""A run that is killed anywhere and started again gives what an uninterrupted run gives, bit for bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experiments.settings import TINY
from trace_jax.runs import read_metrics

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 5
OVERRIDES = (
    *TINY,
    f"rl.steps={STEPS}",
    "rl.checkpoint_every=2",
    "method=trace_all_layers",
    "rl.control_every=2",
)


def start(root: Path, cache: Path, *program: str, overrides=OVERRIDES) -> int:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(REPOSITORY),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiling would take most of the time
    }
    command = [sys.executable, *program, f"root={root}", "name=run", *overrides]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=550
    )
    if done.returncode not in (0, -9):
        raise AssertionError(f"{' '.join(program)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.returncode


def comparable(root: Path) -> list[dict]:
    """Every metric of every step but the seconds."""
    rows = read_metrics(root / "run" / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    root, cache = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("cache")
    assert start(root, cache, "-m", "experiments.train") == 0
    rows = comparable(root)
    assert [row["step"] for row in rows] == list(range(STEPS))
    return rows, cache


@pytest.mark.parametrize("phase, call", [("rollout", 3), ("train", 4), ("checkpoint", 2)])
def test_killed_and_resumed_equals_uninterrupted(uninterrupted, tmp_path, phase, call):
    rows, cache = uninterrupted
    assert start(tmp_path, cache, "tests/experiments/killed_run.py", phase, str(call)) == -9
    before = comparable(tmp_path)
    assert 0 < len(before) < STEPS or phase == "checkpoint"
    assert before == rows[: len(before)]
    assert start(tmp_path, cache, "-m", "experiments.train") == 0
    assert comparable(tmp_path) == rows


def test_resume_with_version_lag_and_weight_guides(uninterrupted, tmp_path):
    """Older weight versions are part of the state: the lag and the weight guides need them."""
    _, cache = uninterrupted
    more = (*OVERRIDES, "rl.max_version_lag=1", "rl.guide_weights=true", "rl.minibatches=2")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert start(whole, cache, "-m", "experiments.train", overrides=more) == 0
    assert start(broken, cache, "tests/experiments/killed_run.py", "rollout", "3", overrides=more) == -9
    assert start(broken, cache, "-m", "experiments.train", overrides=more) == 0
    assert comparable(broken) == comparable(whole)
    assert [row["rollout/version_lag"] for row in comparable(whole)] == [0, 1, 1, 1, 1]
