"""Tokenizers of published models: the `tokenizers` library on a `tokenizer.json`, with the model's chat template."""

import datetime
import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import jinja2
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TokenizerError(ValueError):
    """A tokenizer or chat template that cannot be used; the message names the file, the token or the variable."""


class HfTokenizer:
    """A `tokenizers.Tokenizer` with the special tokens and the chat template that go with it.

    Special tokens that are written out in a text (as chat templates do) are encoded as such.

    Args:
      tokenizer: text to ids and back.
      eos: the token that ends a response.
      bos: the token that every text begins with, None where the model was trained without one.
      pad: padding; the end token where there is none.
      chat_template: Jinja source, None where the model has none.
      vocab_size: number of ids of the model, whose embedding may be padded; the tokenizer's own if 0.

    Raises:
      TokenizerError: a special token that the vocabulary lacks, fewer ids than the tokenizer has, or a template with a
        syntax error.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        eos: str,
        bos: str | None = None,
        pad: str | None = None,
        chat_template: str | None = None,
        vocab_size: int = 0,
    ):
        needed = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if 0 < vocab_size < needed:
            raise TokenizerError(f"vocab_size is {vocab_size}, but the tokenizer has ids up to {needed - 1}")
        self.vocab_size = vocab_size or needed
        self._tokenizer = tokenizer
        self.eos_id = self._id("eos", eos)
        self.bos_id = None if bos is None else self._id("bos", bos)
        self.pad_id = self.eos_id if pad is None else self._id("pad", pad)
        self._special = {"eos_token": eos, "bos_token": bos or "", "pad_token": pad or eos}
        self._template = None if chat_template is None else _compile(chat_template)

    @classmethod
    def from_folder(cls, folder: str | os.PathLike) -> "HfTokenizer":
        """Reads a folder as Hugging Face writes it.

        That is `tokenizer.json` and `tokenizer_config.json`; where they are there, `chat_template.jinja` and, for the
        size of the vocabulary, the model's `config.json`.

        Raises:
          TokenizerError: one of the first two is missing, a file is not what it should be, or no end token is named.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(
                f"{folder} has no tokenizer.json; expected a folder as Hugging Face tokenizers save it"
            )
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{path} cannot be read as a tokenizer: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        eos = _token(config, "eos_token")
        if eos is None:
            raise TokenizerError(
                f"{folder / 'tokenizer_config.json'} has no eos_token: nothing would end a response"
            )
        model = _read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
        return cls(
            tokenizer,
            eos=eos,
            bos=_begin(tokenizer, config),
            pad=_token(config, "pad_token"),
            chat_template=_template_source(folder, config),
            vocab_size=model.get("vocab_size") or model.get("text_config", {}).get("vocab_size") or 0,
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
            if id_ == self.eos_id:
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
        **variables: Any,
    ) -> str:
        """The conversation as the model was trained to see it, up to where it answers.

        Args:
          messages: such as `{"role": "user", "content": "Hi"}`.
          date: the day for templates that print one; None is today.
          add_generation_prompt: whether the assistant's turn is begun.
          variables: what else the template takes, such as `tools` or `enable_thinking`.

        Raises:
          TokenizerError: no template, a variable that it prints is not given, or it refuses the conversation.
        """
        if not self.has_chat_template:
            raise TokenizerError("the tokenizer has no chat template: give it one, or prompts without chat")
        day = date or datetime.date.today()
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                strftime_now=day.strftime,
                **(self._special | variables),
            )
        except jinja2.UndefinedError as error:
            raise TokenizerError(f"the chat template needs what it was not given: {error.message}") from error
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise TokenizerError(f"the chat template refused the conversation: {error}") from error

    def _id(self, kind: str, token: str) -> int:
        id_ = self._tokenizer.token_to_id(token)
        if id_ is None:
            raise TokenizerError(f"the {kind} token {token!r} is not in the tokenizer's vocabulary")
        return id_


class _Missing(jinja2.Undefined):
    """May be tested, as templates do with what is optional; to print it would silently leave something out."""

    __str__ = jinja2.StrictUndefined.__str__


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    """Jinja's own filter escapes for HTML; models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


@functools.cache
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], undefined=_Missing
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(f"line {error.lineno} of the chat template: {error.message}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise TokenizerError(f"{path.parent} has no {path.name}") from error
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} holds a {type(content).__name__}; expected an object")
    return content


def _token(config: Mapping[str, Any], name: str) -> str | None:
    """Special tokens are written as text, or as an object with their text in `content`."""
    token = config.get(name)
    return token["content"] if isinstance(token, dict) else token


def _begin(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any]) -> str | None:
    """The token that texts begin with: many models name a `bos_token` that they were never trained to begin with."""
    adds = config.get("add_bos_token")
    if adds is None:
        first = tokenizer.encode("").ids[:1]
        adds = bool(first) and tokenizer.id_to_token(first[0]) == _token(config, "bos_token")
    return _token(config, "bos_token") if adds else None


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        return next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template
