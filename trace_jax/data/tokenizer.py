"""Tokenizers without a vocabulary file: one token per character, or per UTF-8 byte."""

from collections.abc import Iterable, Iterator
from typing import Protocol, SupportsIndex, runtime_checkable

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
_FIRST = 3


class TokenizerError(ValueError):
    """A tokenizer or chat template that cannot be used; the message names the file, the token or the variable."""


@runtime_checkable
class Tokenizer(Protocol):
    """What the pipelines and the rollout need of a tokenizer; ids are in [0, vocab_size).

    `bos_id` begins every sequence; None for models that are trained without such a token. `eos_id` ends the answers
    that a model is trained on, and any of `eos_ids`, which has it, ends a response.
    """

    vocab_size: int
    pad_id: int
    bos_id: int | None
    eos_id: int
    eos_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without special tokens."""
        ...

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Text of `ids` up to the first end token; padding and begin tokens are left out."""
        ...


def decode_response(tokenizer: Tokenizer, ids: Iterable[SupportsIndex]) -> str:
    """Text of what a policy sampled, up to the first end token.

    A model's vocabulary may be larger than the tokenizer's (embeddings are padded); such an id becomes U+FFFD.
    """
    parts: list[str] = []
    known: list[int] = []
    for id_ in map(int, ids):
        if id_ in tokenizer.eos_ids:
            break
        if id_ < tokenizer.vocab_size:
            known.append(id_)
        else:
            parts += [tokenizer.decode(known), "\N{REPLACEMENT CHARACTER}"]
            known = []
    return "".join([*parts, tokenizer.decode(known)])


class CharTokenizer:
    """One token per character of a fixed alphabet; ids 0, 1, 2 are padding, begin and end."""

    pad_id, bos_id, eos_id, eos_ids = PAD_ID, BOS_ID, EOS_ID, (EOS_ID,)

    def __init__(self, alphabet: str):
        repeated = sorted({char for char in alphabet if alphabet.count(char) > 1})
        if not alphabet or repeated:
            raise ValueError(
                f"alphabet {alphabet!r} is empty or repeats {repeated}: give each character once"
            )
        self.alphabet = alphabet
        self.vocab_size = _FIRST + len(alphabet)
        self._ids = {char: _FIRST + index for index, char in enumerate(alphabet)}

    def encode(self, text: str) -> list[int]:
        """Raises TokenizerError, naming the character, for one outside the alphabet."""
        try:
            return [self._ids[char] for char in text]
        except KeyError as error:
            char = error.args[0]
            raise TokenizerError(
                f"character {char!r} at position {text.index(char)} of {text!r} is not in the alphabet "
                f"{self.alphabet!r}"
            ) from None

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Raises ValueError for an id outside the vocabulary."""
        return "".join(self.alphabet[id_ - _FIRST] for id_ in _content(ids, self.vocab_size))


class ByteTokenizer:
    """One token per UTF-8 byte, so any text has one; ids 0, 1, 2 are padding, begin and end."""

    pad_id, bos_id, eos_id, eos_ids = PAD_ID, BOS_ID, EOS_ID, (EOS_ID,)
    vocab_size = _FIRST + 256

    def encode(self, text: str) -> list[int]:
        return [_FIRST + byte for byte in text.encode()]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """A sampled sequence need not be valid UTF-8: broken bytes become U+FFFD."""
        return bytes(id_ - _FIRST for id_ in _content(ids, self.vocab_size)).decode(errors="replace")


def _content(ids: Iterable[SupportsIndex], vocab_size: int) -> Iterator[int]:
    for id_ in map(int, ids):
        if not 0 <= id_ < vocab_size:
            raise ValueError(f"token id {id_} is outside the vocabulary of {vocab_size}")
        if id_ == EOS_ID:
            return
        if id_ >= _FIRST:
            yield id_
