"""Exports: what is written is what the layout's readers expect, and comes back bit for bit."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from kernels_pallas.formats import E2M1_VALUES
from kernels_pallas.quantize import dequantize
from tests.trace_jax import small
from tests.trace_jax.hf.folders import TINY, configured
from trace_jax.hf import (
    COMPRESSED_TENSORS,
    LAYOUTS,
    CheckpointFormatError,
    export_bf16,
    export_nvfp4,
    load_model,
    load_quantized,
)
from trace_jax.hf.codecs import RowScale
from trace_jax.hf.folder import SINGLE, Folder
from trace_jax.hf.model import by_path, to_state
from trace_jax.models import abstract
from trace_jax.quant import QuantPlan

QWEN = TINY / "qwen3_moe"
EXPERT = "model.layers.2.mlp.experts.5"
INPUT_SCALES = {"expert_input": 2.0**-7, "down_input": 2.0**-9}


@functools.cache
def loaded():
    return load_model(QWEN)


@functools.cache
def rollout():
    return small.sync(loaded().params, QuantPlan(), "bfloat16")


def tensors_of(folder) -> dict[str, np.ndarray]:
    """All tensors of a folder; the library's NumPy interface lacks FP8."""
    with Folder(folder) as opened:
        return {name: opened.read(name) for name in opened.names}


def test_bf16_comes_back_bit_for_bit(tmp_path):
    export_bf16(loaded().params, loaded().config, tmp_path / "out", source=QWEN)
    written, original = load_file(tmp_path / "out" / SINGLE), load_file(QWEN / SINGLE)
    assert written.keys() == original.keys()
    assert all(np.array_equal(written[n], x) and written[n].dtype == x.dtype for n, x in original.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (QWEN / "config.json").read_text()
    )
    again = load_model(tmp_path / "out")
    assert again.config == loaded().config and small.equal_trees(again.params, loaded().params)


def test_a_model_of_this_project_is_written_in_files_with_an_index(tmp_path):
    _, masters = small.masters()
    export_bf16(masters, small.MODEL, tmp_path / "out", max_file_bytes=30_000)
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    sizes = [(tmp_path / "out" / file).stat().st_size for file in files]
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 4
    assert max(sizes) < 32_000
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    stored = {name: x for file in files for name, x in load_file(tmp_path / "out" / file).items()}
    assert index["weight_map"].keys() == stored.keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in stored.values())
    again = load_model(tmp_path / "out")
    assert dataclasses.replace(again.config, family=small.MODEL.family) == small.MODEL
    rounded = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(w.dtype), masters)
    assert small.equal_trees(again.params, rounded)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("input_scales", "max_file_bytes"), [(None, 10**9), (INPUT_SCALES, 60_000)])
def test_nvfp4_comes_back_bit_for_bit(tmp_path, layout, input_scales, max_file_bytes):
    export_nvfp4(
        rollout(),
        loaded().config,
        QuantPlan(),
        layout,
        tmp_path / "out",
        input_scales=input_scales,
        source=QWEN,
        max_file_bytes=max_file_bytes,
    )
    again = load_quantized(tmp_path / "out")
    assert again.config == loaded().config and small.equal_trees(again.rollout, rollout())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_tensors_decode_to_the_rollouts_values_by_the_layouts_rules(tmp_path, layout):
    """Decoded here from bytes: two codes a byte, low nibble first, times the block's and the matrix's scale."""
    export_nvfp4(rollout(), loaded().config, QuantPlan(), layout, tmp_path / "out", input_scales=INPUT_SCALES)
    tensors = tensors_of(tmp_path / "out")
    values = np.asarray([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], np.float32)

    def decoded(module):
        data, scales = tensors[f"{module}.{layout.codes}"], tensors[f"{module}.{layout.scales}"]
        matrix = tensors[f"{module}.{layout.matrix_scale}"]
        assert data.dtype == np.uint8 and scales.dtype == ml_dtypes.float8_e4m3fn
        assert matrix.dtype == np.float32 and matrix.shape == ((1,) if layout.inverse else ())
        codes = np.stack([data & 15, data >> 4], axis=-1).reshape(data.shape[0], -1)
        block = np.repeat(scales.astype(np.float32), 16, axis=1)
        return values[codes] * (block / matrix if layout.inverse else block * matrix)

    experts = by_path(rollout())
    expert = jax.tree.map(lambda leaf: leaf[2, 5], (experts["moe.gate_up"], experts["moe.down"]))
    gate_up, down = (
        np.asarray(x) for x in jax.jit(lambda e: [dequantize(x, jnp.float32) for x in e])(expert)
    )
    assert np.array_equal(decoded(f"{EXPERT}.gate_proj"), gate_up[:, :32].T)
    assert np.array_equal(decoded(f"{EXPERT}.up_proj"), gate_up[:, 32:].T)
    assert np.array_equal(decoded(f"{EXPERT}.down_proj"), down.T)
    matrix, given = layout.matrix_scale, layout.input_scale
    assert np.array_equal(tensors[f"{EXPERT}.gate_proj.{matrix}"], tensors[f"{EXPERT}.up_proj.{matrix}"])
    for module, scale in (("up_proj", 2.0**-7), ("down_proj", 2.0**-9)):
        found = tensors[f"{EXPERT}.{module}.{given}"]
        assert found == np.float32(1 / scale if layout.inverse else scale) and found.dtype == np.float32
        assert found.ndim == layout.ndim


def test_what_a_compressed_tensors_export_says_of_itself(tmp_path):
    config = loaded().config
    export_nvfp4(rollout(), config, QuantPlan(), COMPRESSED_TENSORS, tmp_path / "out", source=QWEN)
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    (group,) = stated["config_groups"].values()
    assert stated["quant_method"] == "compressed-tensors" and stated["format"] == "nvfp4-pack-quantized"
    assert group["targets"] == ["Linear"] and group["input_activations"] is None
    assert group["weights"]["num_bits"] == 4 and group["weights"]["group_size"] == 16
    # Exactly the matrices that are not packed, without the embedding, which is not a linear module.
    plain = {
        n for n, x in tensors_of(tmp_path / "out").items() if x.dtype == ml_dtypes.bfloat16 and x.ndim == 2
    }
    assert {f"{module}.weight" for module in stated["ignore"]} == plain - {"model.embed_tokens.weight"}
    assert "lm_head" in stated["ignore"] and "model.layers.0.mlp.gate" in stated["ignore"]
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "input_global_scale" in readme and "KV cache" in readme and "BF16 activations" in readme
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_tied_head_is_no_packed_module(tmp_path, layout):
    """Engines build a head module that has no tensor of its own: only `ignore` says that it is BF16."""
    config = dataclasses.replace(loaded().config, tied_embedding=True)
    tied = {name: value for name, value in by_path(rollout()).items() if name != "head"}
    export_nvfp4(to_state(abstract(config)[1], tied), config, QuantPlan(), layout, tmp_path / "out")
    assert "lm_head.weight" not in tensors_of(tmp_path / "out")
    stated = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stated["tie_word_embeddings"] and stated["quantization_config"]["ignore"].count("lm_head") == 1
    again = load_quantized(tmp_path / "out")
    assert again.config == config and small.equal_trees(by_path(again.rollout), tied)


@pytest.mark.parametrize("name", ["tokenizer.json", "special_tokens_map.json", "added_tokens.json"])
def test_files_of_the_tokenizer_are_copied(tmp_path, name):
    source = configured(QWEN, tmp_path / "source")
    (source / name).write_text('{"kept": 1}')
    export_bf16(loaded().params, loaded().config, tmp_path / "out", source=source)
    assert (tmp_path / "out" / name).read_text() == '{"kept": 1}'


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    ("leaf", "value", "said"),
    [
        ("scales", 0x7F, "a block's scale is NaN"),
        ("scales", 0xFF, "a block's scale is NaN"),
        ("scales", 0x80, "a block's scale is negative"),
        ("scales", 0xB8, "a block's scale is negative"),
        ("matrix_scale", 2.0**-149, "power of two between"),
        ("matrix_scale", 2.0**127, "power of two between"),
    ],
)
def test_damaged_scales_are_refused_on_import(tmp_path, layout, leaf, value, said):
    export_nvfp4(rollout(), loaded().config, QuantPlan(), layout, tmp_path / "out")
    name = f"{EXPERT}.down_proj.{getattr(layout, leaf)}"
    overwrite(tmp_path / "out" / SINGLE, name, value)
    with pytest.raises(CheckpointFormatError, match=f"^{re.escape(name)} in .*{said}"):
        load_quantized(tmp_path / "out")


def overwrite(file, name: str, value: float) -> None:
    """Sets the first element of a tensor in place: an E4M3 byte, or an FP32 number."""
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    start = 8 + length + json.loads(data[8 : 8 + length])[name]["data_offsets"][0]
    stored = np.float32(value).tobytes() if isinstance(value, float) else bytes([value])
    data[start : start + len(stored)] = stored
    file.write_bytes(data)


@pytest.mark.parametrize(("scales", "algorithm"), [(None, "W4A16_NVFP4"), (INPUT_SCALES, "NVFP4")])
def test_what_a_modelopt_export_says_of_itself(tmp_path, scales, algorithm):
    export_nvfp4(
        rollout(), loaded().config, QuantPlan(), LAYOUTS["modelopt"], tmp_path / "out", input_scales=scales
    )
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    older = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert stated["quant_algo"] == older["quant_algo"] == algorithm
    assert stated["ignore"] == older["exclude_modules"] and older["group_size"] == 16
    assert older["kv_cache_quant_algo"] is None
    assert ("0.0078125" in (tmp_path / "out" / "README.md").read_text()) == (scales is not None)


def test_a_folder_in_use_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointFormatError, match="exists and is not empty"):
        export_bf16(loaded().params, loaded().config, tmp_path / "out")
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "notes.txt"]


def test_a_model_that_its_family_cannot_describe(tmp_path):
    config = dataclasses.replace(small.MODEL, centred_norms=True)
    with pytest.raises(CheckpointFormatError, match="centred_norms"):
        export_bf16(small.masters(config)[1], config, tmp_path / "out")


@pytest.mark.parametrize("plan", [QuantPlan(format="mxfp4"), QuantPlan(experts=False)])
def test_only_nvfp4_experts_have_these_layouts(tmp_path, plan):
    with pytest.raises(CheckpointFormatError, match="expected NVFP4 experts"):
        export_nvfp4(rollout(), loaded().config, plan, COMPRESSED_TENSORS, tmp_path / "out")


def test_foreign_matrix_scales_and_layouts_are_refused(tmp_path):
    with pytest.raises(
        CheckpointFormatError, match=r"quant_method 'awq'; expected one of compressed-tensors"
    ):
        load_quantized(configured(QWEN, tmp_path / "awq", quantization_config={"quant_method": "awq"}))
    with pytest.raises(CheckpointFormatError, match="quant_method None"):
        load_quantized(QWEN)
    export_nvfp4(rollout(), loaded().config, QuantPlan(), COMPRESSED_TENSORS, tmp_path / "out")
    with pytest.raises(CheckpointFormatError, match=r"is quantized \(compressed-tensors\)"):
        load_model(tmp_path / "out")
    for scale in (3.0, 0.0, -2.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="expected a power of two"):
            RowScale().decode(np.asarray(scale, np.float32))


@pytest.mark.parametrize("inverse", [False, True])
def test_every_row_exponent_is_held_exactly(inverse):
    codec = RowScale(inverse=inverse, ndim=1)
    for exponent in range(1, 254):
        stored = codec.encode(np.asarray(exponent, np.uint8))
        assert stored.dtype == np.float32 and stored.shape == (1,) and np.isfinite(1 / stored)
        assert codec.decode(stored) == exponent
