"""What bench_rollout measures of the engine, at a size for a CPU: every row is there, and counts what was decoded."""

import dataclasses
import json

import hydra
import jax
import numpy as np
import pytest

from experiments.common import CONFIGS
from experiments.decode_profile import Kernel, summary
from experiments.throughput import (
    ThroughputConfig,
    decode_rows,
    length_rows,
    measure,
    profile_rows,
    random_cache,
    record_rows,
    table,
)
from tests.trace_jax import small
from trace_jax.config import ConfigError
from trace_jax.models import init_cache
from trace_jax.quant import QuantPlan

CONFIG = ThroughputConfig(
    precisions=("bf16", "nvfp4"),
    contexts=(32,),
    batch=3,
    steps=8,
    chunk=4,
    page_size=32,
    lengths=9,
    slots=3,
    median=4,
    methods=("trace", "trace_all_layers"),
    response=9,
    rounds=1,
)


def test_decoding_over_a_full_cache():
    rows = list(decode_rows(CONFIG, small.MODEL, seed=0))
    assert [(row["precision"], row["context"], row["batch"]) for row in rows] == [
        ("bf16", 32, 3),
        ("nvfp4", 32, 3),
    ]
    assert all(row["tokens/s"] > 0 and row["ms a step"] > 0 for row in rows)
    assert rows[0]["cache GB"] >= rows[1]["cache GB"]
    assert len(table(rows).splitlines()) == 4


def test_continuous_and_static_batches_of_the_same_requests():
    rows = list(length_rows(CONFIG, small.MODEL, seed=0))
    assert [row["batching"] for row in rows] == ["continuous", "static"] * 2
    assert all(0 < row["slot occupancy"] <= 1 for row in rows)
    assert rows[0]["slot occupancy"] > rows[1]["slot occupancy"]


def test_recording_in_the_engine():
    with hydra.initialize_config_dir(CONFIGS, version_base="1.3"):
        rows = list(record_rows(CONFIG, small.MODEL, seed=0))
    assert [row["record"] for row in rows] == ["none", "trace", "trace_all_layers"]
    assert rows[0]["bytes a token"] == 0 < rows[1]["bytes a token"] < rows[2]["bytes a token"]
    # A bit a value, a byte a block of 16 and a byte a row: of the expert input, and of two heads of keys and of values.
    assert rows[2]["bytes a token"] == 3 * (64 // 8 + 64 // 16 + 1 + 2 * 2 * (32 // 8 + 32 // 16 + 1))


@pytest.mark.parametrize("kv_format", [None, QuantPlan().fp4], ids=["bf16", "nvfp4"])
def test_a_random_cache_has_numbers_everywhere(kv_format):
    empty = init_cache(small.MODEL, 2, 32, kv_format, pages=4)
    cache = random_cache(empty, 0)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(empty))  # two would not fit
    for leaf in jax.tree.leaves(cache):
        leaf = np.asarray(leaf)
        assert (leaf != 0).mean() > 0.9 and (
            leaf.dtype.kind == "u" or np.isfinite(leaf.astype(np.float32)).all()
        )


def test_a_profile_by_kernels():
    kernels = [Kernel("a", 0, 10e6), Kernel("b", 10e6, 5e6), Kernel("a", 20e6, 10e6), Kernel("c", 30e6, 1e6)]
    rows = summary(kernels, steps=2, most=2)
    assert [(row["kernel"], row["calls a step"], row["ms a step"]) for row in rows] == [
        ("step", 2.0, 15.5),
        ("all kernels", 2.0, 13.0),
        ("a", 1.0, 10.0),
        ("b", 0.5, 2.5),
        ("others", 0.5, 0.5),
    ]
    assert rows[1]["of the step"] == round(26 / 31, 4)


def test_runs_of_one_folder_are_one_table(tmp_path):
    config = dataclasses.replace(CONFIG, precisions=("nvfp4",))
    for batch in (2, 3):
        text = measure("decode", dataclasses.replace(config, batch=batch), small.MODEL, 0, tmp_path)
    runs = json.loads((tmp_path / "bench_rollout_decode.json").read_text())
    assert [run["rows"][0]["batch"] for run in runs] == [2, 3]
    assert text == (tmp_path / "bench_rollout_decode.md").read_text()
    assert [line.split("|")[3].strip() for line in text.splitlines()[2:4]] == ["2", "3"]


def test_refuses():
    with pytest.raises(ConfigError, match=r"throughput\.precisions has \['fp3'\]; expected some of"):
        dataclasses.replace(CONFIG, precisions=("fp3",))
    with pytest.raises(ConfigError, match="a profile by kernels needs a GPU; the devices here are cpus"):
        list(profile_rows(CONFIG, small.MODEL, seed=0))
    with pytest.raises(ConfigError, match=r"does not say how much memory it has; set engine\.pages"):
        list(decode_rows(dataclasses.replace(CONFIG, batch=0), small.MODEL, seed=0))
