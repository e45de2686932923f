"""What the files of a Hugging Face folder say of its tokenizer, read as transformers does."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from trace_jax.config import read_json
from trace_jax.data.tokenizer import TokenizerError

_CONFIG = "tokenizer_config.json"
_MAP = "special_tokens_map.json"
_ADDED = "added_tokens.json"
_DECODER = "added_tokens_decoder"
_EXTRA = "extra_special_tokens"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Names of tokens that only some models have. `add_bos_token` is a setting.
_FURTHER_NAMES = re.compile("(?!add_).*_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class TokenizerFiles:
    """A folder with `tokenizer.json` and `tokenizer_config.json`, and perhaps those of the model.

    Where `tokenizer_config.json` has no `added_tokens_decoder`, an older `special_tokens_map.json` takes precedence
    over what it says of special tokens, and `added_tokens.json` says which tokens there are besides.

    Attributes:
      tokenizer: with all of the tokens that the files name; it neither cuts nor pads.

    Raises:
      TokenizerError: one of the two is missing; here and in every method, a file is not what it should be. Also a token
        without an id, or with another than is stated: the model would have no embedding for it.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._path = folder / _CONFIG
        self.tokenizer = _read_tokenizer(folder / "tokenizer.json")
        self._config = read_json(self._path, TokenizerError)
        self._is_old = _DECODER not in self._config
        self._said = str(self._path)  # where special tokens are named, for errors
        if self._is_old and (folder / _MAP).is_file():
            self._said += f" or {_MAP}"
            older = read_json(folder / _MAP, TokenizerError)
            lists = [x for x in (self._config.get(_EXTRA), older.get(_EXTRA)) if isinstance(x, list)]
            both = {_EXTRA: lists[0] + lists[1]} if len(lists) == 2 else {}
            self._config = {**self._config, **older, **both}
        self._add_tokens()

    def named_tokens(self) -> dict[str, tokenizers.AddedToken]:
        """Special tokens by the names that chat templates know them by, such as `eos_token`."""
        extra = self._extra()
        named = {
            name: value
            for name, value in self._config.items()
            if name in _NAMES or (_FURTHER_NAMES.fullmatch(name) and isinstance(value, str | dict))
        }
        named |= extra if isinstance(extra, dict) else {}
        return {name: self._token(name, value) for name, value in named.items() if value is not None}

    def adds_bos_token(self) -> bool:
        """Whether texts begin with `bos_token`: many models name one that they were never trained to begin with."""
        adds = self._config.get("add_bos_token")
        if adds is not None:
            return _typed(bool, adds, "add_bos_token", self._path)
        bos, first = self.named_tokens().get("bos_token"), self.tokenizer.encode("").ids[:1]
        return bos is not None and first == [self.tokenizer.token_to_id(bos.content)]

    def chat_template(self) -> str | None:
        """Jinja source of the default template."""
        path = self._folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template = self._config.get("chat_template")
        if isinstance(template, list):  # several, by name
            named = {e.get("name"): e.get("template") for e in template if isinstance(e, dict)}
            template = named.get("default")
        return None if template is None else _typed(str, template, "chat_template", self._path)

    def vocab_size(self) -> int:
        """That of the model, 0 where the folder has none."""
        return next((_typed(int, size, "vocab_size", path) for size, path in self._of_model("vocab_size")), 0)

    def end_ids(self) -> list[int]:
        """Ids of the tokens that the model's files say it ends with."""
        ids = []
        for stated, path in self._of_model("eos_token_id"):
            several = stated if isinstance(stated, list) else [stated]
            ids += [_typed(int, id_, "eos_token_id", path) for id_ in several]
        return ids

    def _of_model(self, key: str) -> Iterator[tuple[Any, Path]]:
        """What the model's files say of a key, with the file; multimodal models have a part for text."""
        for path in (self._folder / "config.json", self._folder / "generation_config.json"):
            config = read_json(path, TokenizerError) if path.is_file() else {}
            for part in (config, _typed(dict, config.get("text_config") or {}, "text_config", path)):
                if part.get(key) is not None:
                    yield part[key], path

    def _extra(self) -> list[Any] | dict[str, Any]:
        """Special tokens of the model's own: a list, or by name."""
        extra = self._config.get(_EXTRA) or self._config.get("additional_special_tokens")
        return _typed(list | dict, extra or [], "additional_special_tokens", self._said)

    def _add_tokens(self) -> None:
        tokenizer, named, extra = self.tokenizer, self.named_tokens(), self._extra()
        contents = {token.content for token in named.values()}
        listed = [
            self._token("additional_special_tokens", x) for x in (extra if isinstance(extra, list) else [])
        ]
        if self._is_old:
            # What `additional_special_tokens` lists is read there as it is below: a token, but no special one.
            special = contents | {token.content for token in listed if self._config.get(_EXTRA)}
            stated, path = self._stated_of_old(special), self._folder / _ADDED
        else:
            stated, path = self._stated(), self._path
        for id_, token in sorted(stated, key=lambda pair: pair[0]):
            token.special = token.special or token.content in contents
            tokenizer.add_tokens([token])
            found = tokenizer.token_to_id(token.content)
            if found != id_:
                raise TokenizerError(
                    f"{path} says that {token.content!r} is token {id_}, but tokenizer.json makes it {found}: "
                    "the two files do not belong together"
                )
        added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
        for name, token in [*named.items(), *(("special token", token) for token in listed)]:
            if tokenizer.token_to_id(token.content) is None:
                raise TokenizerError(
                    f"the {name} {token.content!r} of {self._said} is not in the tokenizer's vocabulary, and "
                    f"{_ADDED if self._is_old else _DECODER} gives it no id"
                )
            token = added.setdefault(token.content, token)
            token.special = token.special or name in named
            tokenizer.add_tokens([token])

    def _stated(self) -> list[tuple[int, tokenizers.AddedToken]]:
        """Tokens by the ids that they are said to have."""
        stated = self._config[_DECODER] or {}
        if not isinstance(stated, dict) or not all(id_.isdecimal() for id_ in stated):
            raise TokenizerError(f"{self._path} has {_DECODER}={stated!r}; expected tokens by their ids")
        return [(int(id_), self._token(_DECODER, value)) for id_, value in stated.items()]

    def _stated_of_old(self, special: set[str]) -> list[tuple[int, tokenizers.AddedToken]]:
        """Tokens of the older file. It has no flags: those of `tokenizer.json` hold, where it has the token."""
        path = self._folder / _ADDED
        added = {token.content: token for token in self.tokenizer.get_added_tokens_decoder().values()}
        return [
            (
                _typed(int, id_, content, path),
                added.get(content, tokenizers.AddedToken(content, special=content in special)),
            )
            for content, id_ in (read_json(path, TokenizerError) if path.is_file() else {}).items()
        ]

    def _token(self, key: str, value: Any) -> tokenizers.AddedToken:
        """Tokens are written as text, or as an object with their text in `content` and flags."""
        if isinstance(value, str):
            return tokenizers.AddedToken(value, special=True)
        if isinstance(value, dict) and isinstance(value.get("content"), str):
            special = key != _DECODER
            flags = {name: value[name] for name in _FLAGS if name in value}
            return tokenizers.AddedToken(value["content"], **({"special": special} | flags))
        raise TokenizerError(f"{self._said} has {key}={value!r}; expected text, or an object with content")


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise TokenizerError(
            f"{path.parent} has no {path.name}; expected a folder as Hugging Face tokenizers save it"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path} cannot be read as a tokenizer: {error}") from error
    # Settings of whoever saved the file: they would cut prompts, and add padding to their text.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _typed(kind: Any, value: Any, key: str, path: Path | str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TokenizerError(f"{path} has {key}={value!r}; expected {getattr(kind, '__name__', kind)}")
    return value
