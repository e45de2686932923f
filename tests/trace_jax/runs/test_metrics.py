"""metrics.jsonl: valid JSON whatever the values, exact floats, and a resumed file equal to an uninterrupted one."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from trace_jax.runs import MetricsError, MetricsWriter, RunFolder, read_metrics


@pytest.fixture
def run(tmp_path):
    return RunFolder.open(tmp_path, "demo", {})


def write(run, steps, start_step=0, value=float):
    with MetricsWriter(run, start_step) as writer:
        for step in steps:
            writer.write(step, {"reward/mean": value(step), "mismatch/kl_k3": 0.1 * step})


def scalars(run):
    """(step, tag, value) of all event files, which are records of length, crc, data, crc."""
    found = []
    for file in sorted(run.tensorboard_path.iterdir()):
        data = file.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = event_pb2.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found


def test_rows_return_as_they_were(run):
    metrics = {
        "python": 1 / 3,
        "float32": np.float32(0.1),
        "bfloat16": jnp.bfloat16(1.5),
        "jax": jnp.ones((1,)) * 0.3,
        "count": np.int64(7),
        "flag": True,
        "missing": None,
        "layers": [0.5, np.float32(0.25), math.nan],
        "nan": jnp.float32(jnp.nan),
        "inf": math.inf,
        "minus_inf": -math.inf,
    }
    with MetricsWriter(run) as writer:
        writer.write(0, metrics)
    (row,) = read_metrics(run.metrics_path)
    assert row.pop("step") == 0
    assert list(row) == list(metrics)
    assert row["python"] == 1 / 3 and row["float32"] == float(np.float32(0.1))
    assert row["bfloat16"] == 1.5 and row["jax"] == float(np.float32(0.3))
    assert row["count"] == 7 and row["flag"] is True and row["missing"] is None
    assert row["layers"][:2] == [0.5, 0.25] and math.isnan(row["layers"][2])
    assert math.isnan(row["nan"]) and row["inf"] == math.inf and row["minus_inf"] == -math.inf


def test_every_row_is_strict_json(run):
    write(run, range(3), value=lambda step: math.nan if step else math.inf)

    def refuse(constant):
        raise AssertionError(constant)

    for line in run.metrics_path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_a_row_is_on_disk_when_write_returns(run):
    writer = MetricsWriter(run)
    writer.write(0, {"reward/mean": 1.0})
    assert read_metrics(run.metrics_path) == [{"step": 0, "reward/mean": 1.0}]
    writer.close()


def test_resume_drops_later_rows_and_a_torn_one(run, tmp_path):
    other = RunFolder.open(tmp_path, "uninterrupted", {})
    write(other, range(8))
    write(run, range(6))
    with open(run.metrics_path, "ab") as file:
        file.write(b'{"step": 6, "rew')
    assert len(read_metrics(run.metrics_path)) == 6
    write(run, range(4, 8), start_step=4)
    assert run.metrics_path.read_bytes() == other.metrics_path.read_bytes()
    assert sorted(scalars(run)) == sorted(scalars(other))


def test_restart_from_the_beginning_forgets_all_rows(run):
    write(run, range(5))
    write(run, range(2))
    assert [row["step"] for row in read_metrics(run.metrics_path)] == [0, 1]


@pytest.mark.parametrize("tail", [b'{"step": 3', b"\0\0\0\0", b"\0\0\0\n", b"{}\n"])
def test_torn_last_lines(run, tail):
    write(run, range(3))
    with open(run.metrics_path, "ab") as file:
        file.write(tail)
    assert [row["step"] for row in read_metrics(run.metrics_path)] == [0, 1, 2]


def test_damage_before_the_end_is_an_error_naming_the_line(run):
    write(run, range(3))
    lines = run.metrics_path.read_bytes().splitlines(keepends=True)
    damaged = lines[0] + b"oops\n" + lines[2]
    run.metrics_path.write_bytes(damaged)
    with pytest.raises(MetricsError, match=r"metrics.jsonl, line 2 is not a metrics row: b'oops'"):
        read_metrics(run.metrics_path)
    with pytest.raises(MetricsError, match="line 2"):
        MetricsWriter(run, 2)
    assert run.metrics_path.read_bytes() == damaged


def test_tensorboard_holds_the_scalars(run):
    with MetricsWriter(run) as writer:
        writer.write(3, {"reward/mean": 0.5, "nan": math.nan, "layers": [1.0], "missing": None})
    found = scalars(run)
    assert [entry for entry in found if entry[1] == "reward/mean"] == [(3, "reward/mean", 0.5)]
    assert {tag for _, tag, _ in found} == {"reward/mean", "nan"}


def test_refuses_what_is_no_number_and_a_step_back(run):
    with MetricsWriter(run, 5) as writer:
        with pytest.raises(MetricsError, match=r"metric 'x' is a ndarray of shape \(3,\)"):
            writer.write(5, {"x": np.zeros(3)})
        with pytest.raises(MetricsError, match="metric 'x' is a str"):
            writer.write(5, {"x": "high"})
        with pytest.raises(MetricsError, match="step 4 after those of step 4"):
            writer.write(4, {})
        writer.write(5, {})
        with pytest.raises(MetricsError, match="step 5 after those of step 5"):
            writer.write(5, {})
    assert read_metrics(run.metrics_path) == [{"step": 5}]
