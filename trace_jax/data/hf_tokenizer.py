"""Tokenizers of published models: the `tokenizers` library on a `tokenizer.json`, with the model's chat template."""

import datetime
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import tokenizers

from trace_jax.data.chat_template import ChatTemplate
from trace_jax.data.hf_files import TokenizerFiles
from trace_jax.data.tokenizer import TokenizerError


class HfTokenizer:
    """A `tokenizers.Tokenizer` with the special tokens and the chat template that go with it.

    Special tokens that are written out in a text (as chat templates do) are encoded as such.

    Args:
      tokenizer: text to ids and back.
      special_tokens: text by name, as templates use them: `eos_token` ends a response, `bos_token` may begin a text,
        `pad_token` pads (the end token where there is none).
      add_bos_token: whether every text begins with `bos_token`: many models have one but were trained without it.
      end_ids: of further tokens that end a response.
      chat_template: Jinja source, None where the model has none.
      vocab_size: number of ids of the model, whose embedding may be padded; the tokenizer's own if 0.

    Raises:
      TokenizerError: no `eos_token`, a special token that the vocabulary lacks, fewer ids than the tokenizer has, an
        end token outside the vocabulary, or a template with a syntax error.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        add_bos_token: bool = False,
        end_ids: Iterable[int] = (),
        chat_template: str | None = None,
        vocab_size: int = 0,
    ):
        needed = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if 0 < vocab_size < needed:
            raise TokenizerError(f"vocab_size is {vocab_size}, but the tokenizer has ids up to {needed - 1}")
        self.vocab_size = vocab_size or needed
        self._tokenizer = tokenizer
        ids = {name: self._id(name, token) for name, token in special_tokens.items()}
        for name in ("eos_token", *(("bos_token",) if add_bos_token else ())):
            if name not in ids:
                raise TokenizerError(
                    f"the tokenizer has no {name}, only {sorted(ids)}: name it in tokenizer_config.json"
                )
        self.eos_id = ids["eos_token"]
        self.eos_ids = tuple(dict.fromkeys((self.eos_id, *end_ids)))
        outside = [id_ for id_ in self.eos_ids if not 0 <= id_ < self.vocab_size]
        if outside:
            raise TokenizerError(f"end token {outside[0]} is outside the vocabulary of {self.vocab_size}")
        self.bos_id = ids["bos_token"] if add_bos_token else None
        self.pad_id = ids.get("pad_token", self.eos_id)
        self._template = None if chat_template is None else ChatTemplate(chat_template, special_tokens)

    @classmethod
    def from_folder(cls, folder: str | os.PathLike) -> "HfTokenizer":
        """Reads a folder as Hugging Face writes it.

        That is `tokenizer.json` and `tokenizer_config.json`; where they are there, `chat_template.jinja` and, for the
        size of the vocabulary and further end tokens, the model's `config.json` and `generation_config.json`.

        Raises:
          TokenizerError: one of the first two is missing, a file is not what it should be, no end token is named, or
            a token has no id in the vocabulary or another than is stated.
        """
        files = TokenizerFiles(Path(folder))
        return cls(
            files.tokenizer,
            special_tokens={name: token.content for name, token in files.named_tokens().items()},
            add_bos_token=files.adds_bos_token(),
            end_ids=files.end_ids(),
            chat_template=files.chat_template(),
            vocab_size=files.vocab_size(),
        )

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without adding special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Text of `ids` up to the first end token, special tokens left out.

        An id that only a padded embedding has becomes U+FFFD.

        Raises:
          TokenizerError: an id outside the vocabulary.
        """
        parts: list[str] = []
        kept: list[int] = []
        for id_ in map(int, ids):
            if not 0 <= id_ < self.vocab_size:
                raise TokenizerError(f"token id {id_} is outside the vocabulary of {self.vocab_size}")
            if id_ in self.eos_ids:
                break
            if self._tokenizer.id_to_token(id_) is None:
                parts += [self._tokenizer.decode(kept, skip_special_tokens=True), "\N{REPLACEMENT CHARACTER}"]
                kept = []
            else:
                kept.append(id_)
        return "".join([*parts, self._tokenizer.decode(kept, skip_special_tokens=True)])

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        date: datetime.date | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the model was trained to see it, up to where it answers.

        Args:
          messages: such as `{"role": "user", "content": "Hi"}`.
          date: the day for templates that print one; None is today.
          add_generation_prompt: whether the assistant's turn is begun.
          variables: what else the template takes, such as `tools` or `enable_thinking`.

        Raises:
          TokenizerError: no template, a variable that it does not take, or it refuses the conversation.
        """
        if self._template is None:
            raise TokenizerError("the tokenizer has no chat template: give it one, or prompts without chat")
        return self._template.render(
            messages,
            date=date or datetime.date.today(),
            add_generation_prompt=add_generation_prompt,
            variables=variables or {},
        )

    def _id(self, name: str, token: str) -> int:
        id_ = self._tokenizer.token_to_id(token)
        if id_ is None:
            raise TokenizerError(f"the {name} {token!r} is not in the tokenizer's vocabulary")
        return id_
