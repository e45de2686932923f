"""Import onto meshes, and what a host holds meanwhile."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.trace_jax.hf.folders import TINY, changed, configured, in_mxfp4, split
from trace_jax.hf import CheckpointFormatError, load_model
from trace_jax.hf.folder import SINGLE
from trace_jax.hf.model import by_path

ROOT = pathlib.Path(__file__).parents[3]
QWEN = TINY / "qwen3_moe"


def run(module: str, *arguments: object, **environment: str) -> str:
    found = subprocess.run(
        [sys.executable, "-m", f"tests.trace_jax.hf.{module}", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    return found.stdout


def test_one_file_and_several_are_the_same(tmp_path):
    one, several = load_model(QWEN), load_model(split(QWEN, tmp_path / "split"), dtype="bfloat16")
    for param, value in by_path(several.params).items():
        assert value.dtype == jnp.bfloat16
        assert np.array_equal(value.astype(jnp.float32), by_path(one.params)[param])


def test_a_tied_head_is_the_embedding(tmp_path):
    def without_head(tensors):
        del tensors["lm_head.weight"]

    folder = configured(changed(QWEN, tmp_path / "a", without_head), tmp_path / "b", tie_word_embeddings=True)
    loaded = load_model(folder)
    assert loaded.config.tied_embedding and "head" not in by_path(loaded.params)


def test_a_tied_head_that_is_stored_too(tmp_path):
    """It is the embedding, in whatever dtype, or it is refused."""

    def twice(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].astype(np.float32)

    def other(tensors):
        twice(tensors)
        tensors["lm_head.weight"][159, 63] += 1

    same, differs = (
        configured(
            changed(QWEN, tmp_path / f.__name__, f), tmp_path / f"{f.__name__}_tied", tie_word_embeddings=True
        )
        for f in (twice, other)
    )
    found = by_path(load_model(same).params)
    assert "head" not in found and np.array_equal(
        found["embedding"], load_file(QWEN / SINGLE)["model.embed_tokens.weight"].astype(np.float32)
    )
    with pytest.raises(
        CheckpointFormatError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"
    ):
        load_model(differs)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("model.norm.weight", (63,)),
        ("model.embed_tokens.weight", (159, 63)),
        ("model.layers.3.mlp.experts.7.up_proj.weight", (31, 0)),
    ],
)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_weights_that_are_no_numbers(tmp_path, name, index, value, dtype):
    def damage(tensors):
        tensors[name] = tensors[name].astype(dtype)
        tensors[name][index] = value

    with pytest.raises(CheckpointFormatError, match=f"^{re.escape(name)} in .*holds NaN or infinity"):
        load_model(changed(QWEN, tmp_path / "damaged", damage))


@pytest.mark.parametrize(
    ("name", "index"),
    [("model.norm.weight", (63,)), ("model.layers.3.mlp.experts.7.up_proj.weight", (31, 0))],
)
def test_weights_beyond_the_range_of_the_parameters(tmp_path, name, index):
    """BF16 rounds numbers from 2^128 - 2^119 on to infinity."""
    limit = np.float32(2.0**128 - 2.0**119)

    def with_value(value, folder):
        def change(tensors):
            tensors[name] = tensors[name].astype(np.float32)
            tensors[name][index] = value

        return changed(QWEN, tmp_path / folder, change)

    beyond = with_value(limit, "beyond")
    with pytest.raises(CheckpointFormatError, match=f"^{re.escape(name)} in .*infinite in bfloat16.*float32"):
        load_model(beyond, dtype="bfloat16")
    values = by_path(load_model(beyond).params).values()
    assert max(float(jnp.abs(x).max()) for x in values) == limit
    load_model(with_value(np.nextafter(limit, np.float32(0)), "within"), dtype="bfloat16")


@pytest.mark.slow
def test_import_onto_eight_devices(tmp_path):
    found = json.loads(
        run(
            "import_on_devices",
            QWEN,
            in_mxfp4(TINY / "gpt_oss", tmp_path)[0],
            tmp_path / "out",
            XLA_FLAGS="--xla_force_host_platform_device_count=8",
        ).splitlines()[-1]
    )
    assert found["equal"] and found["packed_equal"]
    # [L, E, D, 2F] by layers, experts, fsdp and tensor.
    assert found["spec"] == [None, "expert", "fsdp", "tensor"]
    assert found["shard"] == [4, 4, 32, 32] and found["whole"] == [4, 8, 64, 64]
    # The down projection's 32 inputs on 4 devices are half a block each, and so are its 64 in MXFP4.
    for said, size in zip(found["cut"], (16, 32), strict=True):
        assert "moe.down" in said and f"cuts a block of {size}" in said
    # Masters may be cut anywhere: whole blocks are read.
    assert found["blocks_equal"] and found["blocks_shard"] == [4, 8, 16, 128]


@pytest.mark.slow
def test_a_host_holds_little_besides_the_arrays(tmp_path):
    run("import_memory", "write", tmp_path)
    found = json.loads(run("import_memory", "load", tmp_path).splitlines()[-1])
    print(found)
    assert found["arrays"] > 3 * found["largest"]
    assert found["besides"] < 1.3 * found["largest"]
