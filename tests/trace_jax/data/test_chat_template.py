"""Chat templates: the text that transformers makes of them, what they may use, and what is refused."""

import datetime
import json
from pathlib import Path

import pytest

from trace_jax.data import TokenizerError
from trace_jax.data.chat_template import ChatTemplate

# Templates in the manner of published models, with what `apply_chat_template` of transformers makes of them.
REFERENCE = json.loads(
    (Path(__file__).parents[2] / "data" / "chat_templates.json").read_text(encoding="utf-8")
)
MESSAGES = [{"role": "user", "content": "Hi"}]
DAY = datetime.date(2024, 7, 26)


def render(source, *, messages=MESSAGES, special_tokens=None, add_generation_prompt=True, **variables):
    template = ChatTemplate(source, special_tokens or {})
    return template.render(
        messages, date=DAY, add_generation_prompt=add_generation_prompt, variables=variables
    )


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=lambda case: case["template"])
def test_the_text_is_that_of_transformers(case):
    text = render(
        "\n".join(REFERENCE["templates"][case["template"]]),
        messages=case["messages"],
        special_tokens=case["special_tokens"],
        add_generation_prompt=case["add_generation_prompt"],
        **case["variables"],
    )
    assert text == case["text"]


def test_what_templates_use():
    assert render("{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024"
    assert render("{% for m in messages %}\n  {% if tools %}no{% endif %}\nx{% break %}{% endfor %}") == "x"
    assert render("{{ messages | tojson(indent=1) }}{{ 'ö' | tojson }}") == (
        '[\n {\n  "role": "user",\n  "content": "Hi"\n }\n]"ö"'
    )


def test_what_is_not_given_prints_as_nothing():
    assert render("{{ thinking }}{{ messages[0]['name'] }}{{ bos_token }}.") == "."
    assert render("{% if tools is none and documents is none %}none{% endif %}") == "none"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ thinking.effort }}", "needs what it was not given: 'thinking' is undefined"),
        ("{{ raise_exception('roles must alternate') }}", "refused the conversation: roles must alternate"),
        ("{{ messages.append(1) }}", "refused the conversation: .*unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|not given"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "calls itself without end"),
        ("{% if %}", "line 1 of the chat template"),
        ("{% generation %}", "line 1 of the chat template"),
    ],
)
def test_templates_that_fail(template, message):
    with pytest.raises(TokenizerError, match=message):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ effort }}",
        "{% if not effort is defined %}{% set effort = 'low' %}{% endif %}{{ effort }}",
        "{% set effort = effort | default('low') %}{{ effort }}",
        "{% macro say() %}{{ effort }}{% endmacro %}{{ say() }}",
    ],
)
def test_variables(template):
    assert render(template, effort="high") == "high"
    with pytest.raises(TokenizerError, match=r"takes no variable 'efort'; expected one of \['effort'\]"):
        render(template, efort="high")
    with pytest.raises(TokenizerError, match="takes no variable 'strftime_now'"):
        render(template + "{{ strftime_now('%d') }}", strftime_now="1")
