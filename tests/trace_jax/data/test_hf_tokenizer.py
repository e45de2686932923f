"""Tokenizers read from a folder: ids, special tokens, chat templates, and what is refused."""

import datetime
import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from trace_jax.data import HfTokenizer, Tokenizer, TokenizerError, load_tokenizer

SPECIALS = ["<pad>", "<s>", "</s>", "<|user|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|user|>{% endif %}"
)


def library_tokenizer(begins: bool) -> tokenizers.Tokenizer:
    """Bytes without merges: ids 0 to 3 are special, 4 to 259 bytes."""
    vocab = {
        token: id_ for id_, token in enumerate([*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.fixture
def save(tmp_path):
    def write(begins=True, files=(), **config):
        library_tokenizer(begins).save(str(tmp_path / "tokenizer.json"))
        named = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": "<pad>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(named | config))
        for name, text in dict(files).items():
            (tmp_path / name).write_text(text)
        return tmp_path

    return write


def test_a_folder_is_a_tokenizer(save):
    tokenizer = load_tokenizer(str(save()))
    assert isinstance(tokenizer, Tokenizer) and tokenizer.vocab_size == 260
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    text = "héllo\n 12"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and min(ids) > 3  # no special token is added
    assert tokenizer.decode([1, *ids, 0, 2, *ids]) == text  # up to the end, without special tokens
    assert tokenizer.encode("<|user|>a</s>")[::2] == [3, 2]  # special tokens that are written out


def test_the_begin_token_is_the_one_that_texts_begin_with(save):
    assert HfTokenizer.from_folder(save(begins=True)).bos_id == 1
    assert HfTokenizer.from_folder(save(begins=False)).bos_id is None
    assert HfTokenizer.from_folder(save(begins=True, add_bos_token=False)).bos_id is None
    assert HfTokenizer.from_folder(save(begins=False, add_bos_token=True)).bos_id == 1


def test_padding_is_the_end_token_where_there_is_none(save):
    assert HfTokenizer.from_folder(save(pad_token=None)).pad_id == 2


@pytest.mark.parametrize("config", [{"vocab_size": 300}, {"text_config": {"vocab_size": 300}}])
def test_the_vocabulary_is_that_of_the_model(save, config):
    tokenizer = HfTokenizer.from_folder(save(files={"config.json": json.dumps(config)}))
    assert tokenizer.vocab_size == 300
    # Padding of the embedding has no text, and a response must not look right without it.
    assert tokenizer.decode([*tokenizer.encode("a"), 299]) == "a\N{REPLACEMENT CHARACTER}"
    for id_ in (300, -1):
        with pytest.raises(TokenizerError, match=f"token id {id_} is outside the vocabulary of 300"):
            tokenizer.decode([id_])


def test_a_model_with_fewer_ids(save):
    with pytest.raises(TokenizerError, match="vocab_size is 100, but the tokenizer has ids up to 259"):
        HfTokenizer.from_folder(save(files={"config.json": '{"vocab_size": 100}'}))


MESSAGES = [{"role": "user", "content": "Hi"}]


def test_chat_templates_from_either_file(save):
    expected = "<s><|user|>Hi</s><|user|>"
    assert HfTokenizer.from_folder(save(chat_template=TEMPLATE)).chat(MESSAGES) == expected
    several = [{"name": "rag", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    tokenizer = HfTokenizer.from_folder(save(chat_template=several))
    assert tokenizer.chat(MESSAGES) == expected
    assert tokenizer.chat(MESSAGES, add_generation_prompt=False) == "<s><|user|>Hi</s>"
    own_file = save(
        chat_template=TEMPLATE, files={"chat_template.jinja": "{{ messages | tojson }} {{ mood }}"}
    )
    assert HfTokenizer.from_folder(own_file).chat(MESSAGES, mood="<ö>") == (
        '[{"role": "user", "content": "Hi"}] <ö>'  # plain JSON, nothing escaped
    )


def test_what_templates_use(save):
    def render(template, **variables):
        return HfTokenizer.from_folder(save(chat_template=template)).chat(MESSAGES, **variables)

    assert render("{{ strftime_now('%d %b %Y') }}", date=datetime.date(2024, 7, 26)) == "26 Jul 2024"
    assert render("{% for m in messages %}\n  {% if tools %}no{% endif %}\nx{% break %}{% endfor %}") == "x"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ thinking }}", "needs what it was not given: 'thinking' is undefined"),
        ("{{ messages[0]['name'] }}", "not given: 'dict object' has no attribute 'name'"),
        ("{{ raise_exception('roles must alternate') }}", "refused the conversation: roles must alternate"),
        ("{{ messages.append(1) }}", "refused the conversation: .*unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|not given"),
        ("{% if %}", "line 1 of the chat template"),
    ],
)
def test_templates_that_fail(save, template, message):
    with pytest.raises(TokenizerError, match=message):
        HfTokenizer.from_folder(save(chat_template=template)).chat(MESSAGES)


def test_no_template(save):
    with pytest.raises(TokenizerError, match="no chat template"):
        HfTokenizer.from_folder(save()).chat(MESSAGES)


def test_folders_that_are_not_tokenizers(save, tmp_path):
    with pytest.raises(TokenizerError, match="neither 'bytes' nor 'smollm2', and there is no such folder"):
        load_tokenizer(str(tmp_path / "none"))
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        HfTokenizer.from_folder(tmp_path)
    folder = save(eos_token=None)
    with pytest.raises(TokenizerError, match="has no eos_token"):
        HfTokenizer.from_folder(folder)
    with pytest.raises(TokenizerError, match="the eos token '<end>' is not in the tokenizer's vocabulary"):
        HfTokenizer.from_folder(save(eos_token="<end>"))
    for text, message in (("{", "is not JSON"), ("[]", "holds a list; expected an object")):
        (folder / "tokenizer_config.json").write_text(text)
        with pytest.raises(TokenizerError, match=rf"tokenizer_config\.json {message}"):
            HfTokenizer.from_folder(folder)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(TokenizerError, match=r"has no tokenizer_config\.json"):
        HfTokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot be read as a tokenizer"):
        HfTokenizer.from_folder(folder)
