"""A live bar on a terminal, plain lines elsewhere."""

import io

import pytest
from rich.console import Console

from trace_jax.runs import Progress

METRICS = {
    "reward/mean": 0.4375,
    "mismatch/logprob_abs_diff_mean": 0.02612345,
    "time/rollout": 1.234,
    "time/train": 0.8,
    "time/sync": 0.05,
}


def console(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=160, _environ={})


def test_plain_lines_without_a_terminal():
    out = console(False)
    with Progress(5, title="demo", console=out, interval=0.0) as progress:
        progress.update(1, METRICS)
        progress.log("weights synced")
        progress.update(2, {"reward/mean": 1.0})
    assert out.file.getvalue().splitlines() == [
        "demo  1/5  reward 0.4375  gap 0.02612  rollout 1.23s  train 0.80s  sync 0.05s",
        "weights synced",
        "demo  2/5  reward 1  gap -  rollout -  train -  sync -",
    ]


def test_plain_lines_are_spaced_in_time_but_show_first_and_last():
    out = console(False)
    with Progress(100, console=out, interval=3600.0, fields={"loss": "loss"}) as progress:
        for done in range(1, 101):
            progress.update(done, {"loss": done})
    assert out.file.getvalue().splitlines() == ["1/100  loss 1", "100/100  loss 100"]


@pytest.mark.parametrize("start", [0, 3])
def test_bar_on_a_terminal(start):
    out = console(True)
    with Progress(5, start=start, title="demo", console=out) as progress:
        progress.update(start + 1, METRICS)
        progress.log("weights synced")
    shown = out.file.getvalue()
    assert "demo" in shown and f"{start + 1}/5" in shown and "━" in shown
    assert "reward 0.4375" in shown and "gap 0.02612" in shown and "sync 0.05s" in shown
    assert "weights synced" in shown
