"""Tokenizers by name, as configs give them."""

import functools
from pathlib import Path

from trace_jax.config import ConfigError
from trace_jax.data.hf_tokenizer import HfTokenizer
from trace_jax.data.smollm2 import smollm2_tokenizer
from trace_jax.data.tokenizer import ByteTokenizer, Tokenizer, TokenizerError

_SMOLLM2 = "smollm2"


@functools.cache
def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, `smollm2` (from its package), or a folder with a `tokenizer.json`.

    Raises:
      TokenizerError: neither, or the folder's files are not what they should be.
      FileNotFoundError: SmolLM2's package is not installed.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == _SMOLLM2:
        return smollm2_tokenizer()
    if not Path(name).is_dir():
        raise TokenizerError(
            f"tokenizer {name!r} is neither 'bytes' nor 'smollm2', and there is no such folder"
        )
    return HfTokenizer.from_folder(name)


def check_own_tokenizer(checkpoint: str | None, tokenizer: str | None, *, key: str) -> None:
    """Checks that a checkpoint that comes with a tokenizer is used with that one, and so with its end tokens.

    Args:
      checkpoint: `smollm2` or a folder; a folder without a `tokenizer.json` (a run) takes any tokenizer, as None does.
      tokenizer: as `load_tokenizer` takes it; None is the task's own.
      key: where the config names the tokenizer.

    Raises:
      ConfigError: another tokenizer.
    """
    if checkpoint is None or tokenizer == checkpoint:
        return
    if checkpoint != _SMOLLM2:
        if not (Path(checkpoint) / "tokenizer.json").is_file():
            return
        if tokenizer is not None and Path(tokenizer).resolve() == Path(checkpoint).resolve():
            return
    raise ConfigError(
        f"init_from={checkpoint} has a tokenizer of its own, but {key} is {tokenizer or 'not set'}: the model would "
        f"read the ids as other words. Set {key}={checkpoint}."
    )
