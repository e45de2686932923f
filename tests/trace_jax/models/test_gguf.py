"""Llama models from GGUF files that are written here, tensor by tensor."""

import sys

import numpy as np
import pytest

from tests.trace_jax.models import gguf_files
from tests.trace_jax.models.gguf_files import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, MLP, VOCAB, write
from trace_jax.models import ModelConfig
from trace_jax.models.gguf import GgufError, read_llama
from trace_jax.models.rope import RopeConfig

gguf = pytest.importorskip("gguf")


@pytest.fixture
def tensors(rng):
    return gguf_files.random_tensors(rng)


def test_layout(tmp_path, tensors):
    config, parameters = read_llama(write(tmp_path / "m.gguf", tensors))
    assert config == ModelConfig(
        family="llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dense_layers=LAYERS,
        dense_hidden_size=MLP,
        rope=RopeConfig(theta=1e5),
        norm_eps=1e-5,
        qk_norm="none",
        tied_embedding=True,
    )
    assert all(array.dtype == np.float32 for array in parameters.values())

    def layer(n, name):
        return tensors[f"blk.{n}.{name}.weight"]

    for n in range(LAYERS):
        expected = {
            ("attention", "norm"): layer(n, "attn_norm"),
            ("attention", "value"): layer(n, "attn_v").T,
            ("attention", "output"): layer(n, "attn_output").T,
            ("dense", "norm"): layer(n, "ffn_norm"),
            ("dense", "gate_up"): np.concatenate([layer(n, "ffn_gate"), layer(n, "ffn_up")]).T,
            ("dense", "down"): layer(n, "ffn_down").T,
        }
        # Of each head's rows, the even ones and then the odd ones.
        for name, source, heads in (("query", "attn_q", HEADS), ("key", "attn_k", KV_HEADS)):
            rows = [
                h * HEAD_DIM + r for h in range(heads) for half in (0, 1) for r in range(half, HEAD_DIM, 2)
            ]
            expected["attention", name] = layer(n, source)[rows].T
        for path, array in expected.items():
            np.testing.assert_array_equal(parameters[path][n], array, err_msg=str(path))
    np.testing.assert_array_equal(parameters["embedding",], tensors["token_embd.weight"])
    np.testing.assert_array_equal(parameters["final_norm",], tensors["output_norm.weight"])
    assert set(parameters) == {*expected, ("embedding",), ("final_norm",)}


def test_a_head_of_its_own(tmp_path, tensors):
    tensors["output.weight"] = tensors["token_embd.weight"] + 1
    config, parameters = read_llama(write(tmp_path / "m.gguf", tensors))
    assert not config.tied_embedding
    np.testing.assert_array_equal(parameters["head",], tensors["output.weight"].T)


def test_quantized_tensors(tmp_path, tensors):
    name = "blk.1.ffn_gate.weight"
    path = write(tmp_path / "m.gguf", tensors, types={name: gguf.GGMLQuantizationType.Q4_1})
    blocks = tensors[name].reshape(MLP, -1, 32)
    # Q4_1: 16 steps between a block's minimum and maximum, both of which FP16 rounds.
    steps = (blocks.max(-1) - blocks.min(-1)) / 15
    found = read_llama(path)[1]["dense", "gate_up"][1, :, :MLP].T.reshape(blocks.shape)
    assert (abs(found - blocks) <= 0.52 * steps[..., None] + 2e-3).all() and (found != blocks).any()


def test_tensors_that_are_not_as_expected(tmp_path, tensors):
    path, name = tmp_path / "m.gguf", "blk.1.attn_v.weight"
    write(path, {key: value for key, value in tensors.items() if key != name})
    with pytest.raises(
        GgufError, match=r"m\.gguf has no tensor 'blk\.1\.attn_v\.weight'; expected one of shape \(32, 64\)"
    ):
        read_llama(path)
    write(path, tensors | {name: tensors[name][:-1]})
    with pytest.raises(
        GgufError, match=r"'blk\.1\.attn_v\.weight' of .* has shape \(31, 64\); expected \(32, 64\)"
    ):
        read_llama(path)
    write(
        path,
        tensors
        | {
            "rope_freqs.weight": np.ones(8, np.float32),
            "blk.2.attn_norm.weight": tensors["output_norm.weight"],
        },
    )
    with pytest.raises(GgufError, match=r"no place for: blk\.2\.attn_norm\.weight, rope_freqs\.weight"):
        read_llama(path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"architecture": "qwen3"}, "is of architecture 'qwen3'; expected 'llama'"),
        ({"block_count": None}, r"has no metadata entry 'llama\.block_count'"),
        ({"expert_count": 8}, "has 8 experts a layer; expected a dense model"),
        ({"rope.dimension_count": 8}, "rotates 8 of a head's 16 dimensions"),
    ],
)
def test_models_of_another_kind(tmp_path, tensors, entries, message):
    path = write(tmp_path / "m.gguf", tensors, **entries)
    with pytest.raises(GgufError, match=message):
        read_llama(path)


def test_files_that_are_damaged_or_missing(tmp_path, tensors, monkeypatch):
    path = write(tmp_path / "m.gguf", tensors)
    content = path.read_bytes()
    for damaged in (
        b"",
        b"not GGUF at all, whatever it is called",
        content[:100],
        content[: len(content) // 2],
    ):
        path.write_bytes(damaged)
        with pytest.raises(GgufError, match=r"m\.gguf is not a GGUF file, or a truncated one"):
            read_llama(path)
    with pytest.raises(FileNotFoundError, match=r"no GGUF file at .*none\.gguf"):
        read_llama(tmp_path / "none.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(GgufError, match=r"pip install 'trace-jax\[smollm2\]'"):
        read_llama(path)
