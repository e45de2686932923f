"""Tokenizers by name, as configs give them."""

import functools
from pathlib import Path

from trace_jax.data.hf_tokenizer import HfTokenizer
from trace_jax.data.smollm2 import smollm2_tokenizer
from trace_jax.data.tokenizer import ByteTokenizer, Tokenizer, TokenizerError


@functools.cache
def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, `smollm2` (from its package), or a folder with a `tokenizer.json`.

    Raises:
      TokenizerError: neither, or the folder's files are not what they should be.
      FileNotFoundError: SmolLM2's package is not installed.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "smollm2":
        return smollm2_tokenizer()
    if not Path(name).is_dir():
        raise TokenizerError(
            f"tokenizer {name!r} is neither 'bytes' nor 'smollm2', and there is no such folder"
        )
    return HfTokenizer.from_folder(name)
