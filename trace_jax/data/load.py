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


def check_own_tokenizer(own: str | None, tokenizer: str | None, *, key: str) -> None:
    """Checks that a checkpoint is used with the tokenizer that its ids are of, and so with its end tokens.

    Args:
      own: the checkpoint's tokenizer, as `load_tokenizer` takes it; None, if it names none, takes any.
      tokenizer: the one that is used; None is the task's own.
      key: where the config names that.

    Raises:
      ConfigError: another tokenizer.
    """
    if own is None or tokenizer == own:
        return
    if tokenizer is not None and Path(tokenizer).resolve() == Path(own).resolve():
        return
    raise ConfigError(
        f"init_from has a tokenizer of its own, {own}, but {key} is {tokenizer or 'not set'}: the model would read the "
        f"ids as other words. Set {key}={own}."
    )
