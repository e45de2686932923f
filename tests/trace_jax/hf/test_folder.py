"""What is wrong with a folder is an error that names it, before anything is read."""

import json

import numpy as np
import pytest

from tests.trace_jax.hf.folders import TINY, changed, configured, split
from trace_jax.hf import CheckpointFormatError, load_model
from trace_jax.hf.folder import INDEX, SINGLE, Folder

QWEN = TINY / "qwen3_moe"
TENSOR = "model.layers.1.mlp.experts.3.up_proj.weight"


def refused(folder, *said):
    with pytest.raises(CheckpointFormatError) as error:
        load_model(folder)
    for part in said:
        assert part in str(error.value), str(error.value)


def test_a_folder_without_weights(tmp_path):
    (tmp_path / "config.json").write_text((QWEN / "config.json").read_text())
    refused(tmp_path, "has no safetensors files", SINGLE, INDEX)
    refused(tmp_path / "nowhere", "has no config.json")


def test_shards_without_an_index(tmp_path):
    folder = split(QWEN, tmp_path / "split")
    (folder / INDEX).unlink()
    refused(folder, f"but no {INDEX}", "model-00001-of-00003.safetensors")


def test_a_missing_shard(tmp_path):
    folder = split(QWEN, tmp_path / "split")
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, "has no model-00002-of-00003.safetensors, which its index names")


@pytest.mark.parametrize("cut", [1, 100_000, 650_000])
def test_a_truncated_file(tmp_path, cut):
    folder = changed(QWEN, tmp_path / "cut", lambda tensors: None)
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[: len(data) - cut])
    refused(folder, SINGLE, "is truncated")


def test_a_tensor_in_two_shards(tmp_path):
    folder = split(QWEN, tmp_path / "split")
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    second.write_bytes(first.read_bytes())
    refused(folder, "is both in model-00001-of-00003.safetensors and in model-00002-of-00003.safetensors")


def test_an_index_that_is_wrong(tmp_path):
    folder = split(QWEN, tmp_path / "split")
    index = json.loads((folder / INDEX).read_text())
    moved = index["weight_map"] | {
        TENSOR: "model-00001-of-00003.safetensors",
        "other": "model-00001-of-00003.safetensors",
    }
    (folder / INDEX).write_text(json.dumps({"weight_map": moved}))
    refused(folder, "which does not hold it")
    del index["weight_map"][TENSOR]
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, TENSOR, "which the index does not name")
    (folder / INDEX).write_text("{}")
    refused(folder, "has no weight_map")
    (folder / INDEX).write_text("{")
    refused(folder, "is not JSON")


def test_missing_and_unknown_tensors(tmp_path):
    def rename(tensors):
        tensors["model.layers.1.mlp.experts.3.up.weight"] = tensors.pop(TENSOR)

    refused(
        changed(QWEN, tmp_path / "renamed", rename),
        f"it lacks {TENSOR}",
        "holds unknown model.layers.1.mlp.experts.3.up.weight",
    )


def test_a_misshapen_tensor(tmp_path):
    def transpose(tensors):
        tensors[TENSOR] = np.ascontiguousarray(tensors[TENSOR].T)

    refused(changed(QWEN, tmp_path / "shape", transpose), TENSOR, "has shape (64, 32); expected (32, 64)")


def test_a_wrong_dtype(tmp_path):
    def integers(tensors):
        tensors[TENSOR] = tensors[TENSOR].astype(np.int32)

    refused(
        changed(QWEN, tmp_path / "dtype", integers), TENSOR, "is I32; expected one of ('BF16', 'F16', 'F32')"
    )


def test_an_unknown_model_type_lists_the_known_ones(tmp_path):
    refused(
        configured(QWEN, tmp_path / "type", model_type="gpt2"), "model_type='gpt2'", "known are", "qwen3_moe"
    )


def test_what_is_no_file(tmp_path):
    folder = split(QWEN, tmp_path / "split")
    (folder / INDEX).write_text(json.dumps({"weight_map": {TENSOR: 1}}))
    refused(folder, f"has 1 for {TENSOR}; expected the name of a file")
    folder = changed(QWEN, tmp_path / "one", lambda tensors: None)
    (folder / SINGLE).unlink()
    (folder / SINGLE).mkdir()
    refused(folder, "has no safetensors files")
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    refused(folder, "config.json is a folder; expected a file")


def test_slices_are_those_of_the_tensor(tmp_path):
    with Folder(QWEN) as one, Folder(split(QWEN, tmp_path / "split")) as many:
        assert one.names == many.names and len(one.names) == 4 * 33 + 3
        whole = one.read(TENSOR)
        assert one.dtype(TENSOR) == "BF16" and one.shape(TENSOR) == whole.shape == (32, 64)
        part = (slice(3, 20), slice(10, 11))
        for folder in (one, many):
            assert np.array_equal(folder.read(TENSOR, part), whole[part])
