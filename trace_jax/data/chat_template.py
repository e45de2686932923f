"""Chat templates of published models: Jinja with what Hugging Face's templates expect around them."""

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trace_jax.data.tokenizer import TokenizerError

# What `render` itself gives every template.
_OWN = ("messages", "add_generation_prompt", "strftime_now")


class ChatTemplate:
    """A template and the special tokens that it writes. What is not given to it prints as nothing.

    Args:
      source: Jinja.
      special_tokens: text by name, such as `{"eos_token": "</s>"}`.

    Raises:
      TokenizerError: a syntax error, with its line.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self._template, self._variables = _compile(source)
        self._special_tokens = special_tokens

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        date: datetime.date,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The conversation as text; see `HfTokenizer.chat`."""
        allowed = self._variables - set(_OWN)
        unknown = sorted(set(variables) - allowed)
        if unknown:
            raise TokenizerError(
                f"the chat template takes no variable {unknown[0]!r}; expected one of {sorted(allowed)}"
            )
        own = dict(zip(_OWN, (messages, add_generation_prompt, date.strftime), strict=True))
        # Templates tell "no tools" by None as well as by absence.
        given = {"tools": None, "documents": None, **self._special_tokens, **variables, **own}
        try:
            return self._template.render(given)
        except jinja2.UndefinedError as error:
            raise TokenizerError(f"the chat template needs what it was not given: {error.message}") from error
        except RecursionError as error:
            raise TokenizerError(
                "the chat template calls itself without end, or the conversation is nested too deeply: "
                f"{error}"
            ) from error
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise TokenizerError(f"the chat template refused the conversation: {error}") from error


class _Generation(Extension):
    """`{% generation %}` marks what the assistant says, for loss masks; here its contents are only rendered."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML; models were trained on plain JSON."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.cache
def _compile(source: str) -> tuple[jinja2.Template, frozenset[str]]:
    """The template, and the names that it reads from outside."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    try:
        variables = meta.find_undeclared_variables(environment.parse(source))
        return environment.from_string(source), frozenset(variables)
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(f"line {error.lineno} of the chat template: {error.message}") from error
