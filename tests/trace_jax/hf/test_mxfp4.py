"""gpt-oss in MXFP4: masters, rollouts and exports of a folder as it is published."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.check_hf import load_dense, logits_of, read_reference
from kernels_pallas.arrays import Fp4Array
from kernels_pallas.formats import MXFP4, unpack_codes
from kernels_pallas.quantize import dequantize
from tests.trace_jax import small
from tests.trace_jax.hf.folders import TINY, changed, in_mxfp4
from trace_jax.hf import CheckpointFormatError, export_mxfp4, load_model, load_quantized
from trace_jax.hf.codecs import BlockWords
from trace_jax.hf.folder import SINGLE, Folder
from trace_jax.hf.model import by_path
from trace_jax.quant import QuantPlan

SOURCE = TINY / "gpt_oss"
PLAN = QuantPlan(format="mxfp4", kv=False)  # heads of 16 hold no block of 32
EXPERTS = ("moe.gate_up", "moe.down")
BLOCKS = "model.layers.1.mlp.experts.gate_up_proj_blocks"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(in MXFP4, the same values in BF16)."""
    return in_mxfp4(SOURCE, tmp_path_factory.mktemp("gpt_oss"))


def tensors_of(folder) -> dict[str, np.ndarray]:
    with Folder(folder) as opened:
        return {name: opened.read(name) for name in opened.names}


def codes_of(packed: Fp4Array) -> np.ndarray:
    return np.asarray(unpack_codes(packed.words, axis=-2))


def test_every_byte_of_blocks_and_back(rng):
    """Against a decoder of single nibbles; all codes are kept but -0, which is 0."""
    stored = rng.integers(0, 256, (3, 10, 2, 16)).astype(np.uint8)
    codec = BlockWords()
    words = codec.decode(stored)
    assert words.dtype == np.uint32 and words.shape == (3, 10, 8)
    assert codec.stored_shape(words.shape) == stored.shape
    codes = np.stack([stored & 15, stored >> 4], -1).reshape(3, 10, 64)
    assert len(np.unique(codes)) == 16
    kept = np.where(codes == 8, 0, codes)
    assert np.array_equal(unpack_codes(jnp.asarray(words), axis=-1), kept)
    found = codec.encode(words)
    assert np.array_equal(found, (kept[..., 0::2] | kept[..., 1::2] << 4).reshape(stored.shape))
    assert np.array_equal(codec.decode(found), words)


def test_masters_are_the_checkpoints_values(folders):
    found, expected = (load_model(folder) for folder in folders)
    assert found.config == expected.config
    assert small.equal_trees(found.params, expected.params)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(found.params))


def test_logits_are_those_of_the_dequantized_model(folders):
    config, params = load_dense(str(folders[1]))
    tokens, reference = read_reference(str(SOURCE / "reference.npz"), config.vocab_size)
    with jax.default_matmul_precision("highest"):
        expected = logits_of(config, params, tokens)
        assert np.array_equal(logits_of(config, load_model(folders[0]).params, tokens), expected)
        assert np.array_equal(logits_of(config, load_dense(str(folders[0]))[1], tokens), expected)
    # Of random weights little is left by FP4; but the right experts are in the right places.
    assert 0.5 < (expected.argmax(-1) == reference.argmax(-1)).mean() < 1


def test_packed_experts_hold_the_checkpoints_codes(folders):
    tensors, rollout = tensors_of(folders[0]), by_path(load_quantized(folders[0]).rollout)
    for param, name in (("moe.gate_up", "gate_up_proj"), ("moe.down", "down_proj")):
        packed = rollout[param]
        assert packed.format == MXFP4 and packed.axis == -2
        packed.check()
        for layer in range(4):
            module = f"model.layers.{layer}.mlp.experts.{name}"
            blocks, scales = tensors[f"{module}_blocks"], tensors[f"{module}_scales"]
            codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:2], -1).swapaxes(1, 2)
            assert (codes == 8).any()
            order = np.arange(codes.shape[-1])
            if param == "moe.gate_up":  # gate and up rows in turn
                order = np.concatenate([order[0::2], order[1::2]])
            found = Fp4Array(**{leaf: getattr(packed, leaf)[layer] for leaf in LEAVES}, format=MXFP4, axis=-2)
            assert np.array_equal(codes_of(found), np.where(codes == 8, 0, codes)[..., order])
            assert np.array_equal(found.scales, scales.swapaxes(1, 2)[..., order])
    for param, value in rollout.items():
        assert param in EXPERTS or value.dtype == jnp.bfloat16


LEAVES = ("words", "scales", "row_exponent")


def test_rounding_the_masters_again_keeps_all_values_and_most_codes(folders):
    """A block without a 4 or 6 gets half its scale, and codes of twice the value."""
    loaded = by_path(load_quantized(folders[0]).rollout)
    again = by_path(small.sync(load_model(folders[0]).params, PLAN, "bfloat16"))
    values = jax.jit(functools.partial(dequantize, dtype=jnp.float32))
    for param in loaded:
        if param not in EXPERTS:
            assert np.array_equal(loaded[param], again[param])
            continue
        first, second = loaded[param], again[param]
        assert np.array_equal(values(first), values(second))
        magnitudes = codes_of(first) & 7
        largest = magnitudes.reshape(*magnitudes.shape[:2], -1, 32, magnitudes.shape[-1]).max(-2)
        kept = largest >= 6
        assert 0.5 < kept.mean() < 1
        assert np.array_equal(np.asarray(first.scales)[kept], np.asarray(second.scales)[kept])
        assert (np.asarray(first.scales)[~kept] > np.asarray(second.scales)[~kept]).all()
        per_code = np.repeat(kept, 32, -2)
        assert np.array_equal(codes_of(first)[per_code], codes_of(second)[per_code])


def test_rollouts_of_the_folder_and_of_its_masters_are_the_same(folders):
    config = load_quantized(folders[0]).config
    sampler = small.sampler(PLAN, None, config)
    runs = [
        sampler.generate(weights, small.PROMPTS, small.keys_for(small.PROMPTS), weight_version=0)
        for weights in (
            load_quantized(folders[0]).rollout,
            small.sync(load_model(folders[0]).params, PLAN, "bfloat16"),
        )
    ]
    assert np.array_equal(runs[0].tokens, runs[1].tokens)
    assert np.array_equal(runs[0].logprobs, runs[1].logprobs) and np.abs(runs[0].logprobs).max() > 0


def test_an_export_has_the_checkpoints_bytes(folders, tmp_path):
    loaded = load_quantized(folders[0])
    export_mxfp4(loaded.rollout, loaded.config, PLAN, tmp_path / "out", source=folders[0])
    written, original = tensors_of(tmp_path / "out"), tensors_of(folders[0])
    assert written.keys() == original.keys()
    for name, x in original.items():
        if name.endswith("_blocks"):
            low, high = x & 15, x >> 4
            x = np.where(low == 8, 0, low) | np.where(high == 8, 0, high) << 4
        assert written[name].dtype == x.dtype and np.array_equal(written[name], x), name
    stated = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stated.pop("quantization_config")["quant_method"] == "mxfp4"
    assert stated == json.loads((SOURCE / "config.json").read_text())
    assert "E8M0" in (tmp_path / "out" / "README.md").read_text()
    again = load_quantized(tmp_path / "out")
    assert again.config == loaded.config and small.equal_trees(again.rollout, loaded.rollout)


def test_what_has_no_such_export(folders, tmp_path):
    loaded = load_quantized(folders[0])
    with pytest.raises(CheckpointFormatError, match="to nvfp4; expected MXFP4 experts for mxfp4"):
        export_mxfp4(loaded.rollout, loaded.config, QuantPlan(), tmp_path / "out")
    _, masters = small.masters()
    rollout = small.sync(masters, PLAN, "bfloat16")
    with pytest.raises(CheckpointFormatError, match="no counterpart in the mxfp4 layout, which is gpt-oss's"):
        export_mxfp4(rollout, small.MODEL, PLAN, tmp_path / "out")
    poisoned = by_path(loaded.rollout)["moe.down"].scales.at[2, 1, 0, 5].set(255)
    state = jax.tree.map(
        lambda x: poisoned if x.shape == poisoned.shape and x.dtype == "uint8" else x, loaded.rollout
    )
    with pytest.raises(CheckpointFormatError, match=r"layers\.2\.mlp\.experts\.down_proj_scales .* is NaN"):
        export_mxfp4(state, loaded.config, PLAN, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_block_without_a_scale_is_refused(folders, tmp_path):
    scales = BLOCKS.replace("blocks", "scales")

    def poison(tensors):
        tensors[scales][3, 4, 1] = 255

    folder = changed(folders[0], tmp_path / "nan", poison)
    for load in (load_model, load_quantized):
        with pytest.raises(CheckpointFormatError, match=f"{scales} in .*: a block's scale is NaN"):
            load(folder)


def test_blocks_that_do_not_fit_the_model(folders, tmp_path):
    def shorter(tensors):
        tensors[BLOCKS] = np.ascontiguousarray(tensors[BLOCKS][:, :, :1])

    def floating(tensors):
        tensors[BLOCKS] = tensors[BLOCKS].astype(np.float32)

    def without_scales(tensors):
        del tensors[BLOCKS.replace("blocks", "scales")]

    for change, said in (
        (shorter, r"has shape \(8, 128, 1, 16\); expected \(8, 128, 2, 16\)"),
        (floating, r"is F32; expected one of \('U8',\)"),
        (without_scales, "lacks model.layers.1.mlp.experts.gate_up_proj_scales"),
    ):
        folder = changed(folders[0], tmp_path / change.__name__, change)
        for load in (load_model, load_quantized):
            with pytest.raises(CheckpointFormatError, match=said):
                load(folder)
    assert (folders[0] / SINGLE).exists()
