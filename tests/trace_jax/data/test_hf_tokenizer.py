"""Tokenizers read from a folder: ids, special tokens, chat templates, and what is refused."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from trace_jax.data import (
    HfTokenizer,
    Tokenizer,
    TokenizerError,
    decode_response,
    encode_text,
    load_tokenizer,
)

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
    with pytest.raises(TokenizerError, match="the tokenizer has no bos_token"):
        HfTokenizer.from_folder(save(bos_token=None, add_bos_token=True))


@pytest.mark.parametrize(
    ("begins", "config"),
    [(True, {}), (False, {}), (True, {"add_bos_token": False}), (False, {"add_bos_token": True})],
)
def test_templates_write_the_begin_token_once(save, begins, config):
    tokenizer = HfTokenizer.from_folder(save(begins=begins, chat_template=TEMPLATE, **config))
    text = tokenizer.chat(MESSAGES)
    assert text == "<s><|user|>Hi</s><|user|>"
    assert encode_text(tokenizer, text)[:2] == [1, 3]
    begin = [] if tokenizer.bos_id is None else [1]
    assert encode_text(tokenizer, "Hi") == [*begin, *tokenizer.encode("Hi")]


@pytest.mark.parametrize(
    "setting",
    [
        lambda library: library.enable_truncation(8),
        lambda library: library.enable_padding(length=20, pad_id=0),
    ],
)
def test_saved_truncation_and_padding_are_not_applied(save, setting):
    folder = save(begins=False)
    expected = HfTokenizer.from_folder(folder).encode("Hello, world!")
    library = library_tokenizer(begins=False)
    setting(library)
    library.save(str(folder / "tokenizer.json"))
    tokenizer = HfTokenizer.from_folder(folder)
    assert len(expected) == 13 and tokenizer.encode("Hello, world!") == expected
    assert tokenizer.bos_id is None


def stated(content, **flags):
    return {
        "content": content,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
    } | flags


def test_tokens_of_the_config_are_tokens(save):
    decoder = {
        "261": stated("<think>", special=False),
        "260": stated("<|tool|>", special=True, lstrip=True),
        "2": stated("</s>", special=True),
    }
    folder = save(
        begins=False,
        added_tokens_decoder=decoder,
        additional_special_tokens=["<|tool|>", "!"],
        mask_token="?",  # in the vocabulary, but no special token there
    )
    tokenizer = HfTokenizer.from_folder(folder)
    a, b = tokenizer.encode("ab")
    mark, question = tokenizer.encode("!?")
    assert tokenizer.vocab_size == 262
    assert tokenizer.encode("a  <|tool|>b<think>") == [a, 260, b, 261]
    assert tokenizer.decode([a, 260, mark, question, b, 261]) == "ab<think>"  # special ones are left out


OLD_NAMES = {
    "cls_token": {"content": "<|cls|>", "lstrip": True},
    "additional_special_tokens": ["<|tool|>", "!"],
}
OLD_IDS = {"<think>": 262, "<|tool|>": 261, "<|cls|>": 260, "</s>": 2}


def test_tokens_of_the_older_files(save):
    files = {"special_tokens_map.json": json.dumps(OLD_NAMES), "added_tokens.json": json.dumps(OLD_IDS)}
    template = "{{ cls_token }}{{ bos_token }}"
    tokenizer = HfTokenizer.from_folder(save(begins=False, files=files, chat_template=template))
    a, b = tokenizer.encode("ab")
    (mark,) = tokenizer.encode("!")
    assert tokenizer.vocab_size == 263
    assert tokenizer.encode("a<|tool|>b<think><|cls|>") == [a, 261, b, 262, 260]
    # Special are those with a name, in transformers too.
    assert tokenizer.decode([a, 260, 261, b, 262]) == "a<|tool|>b<think>"
    assert tokenizer.decode([mark, a]) == "a"
    assert tokenizer.chat(MESSAGES) == "<|cls|><s>"


def test_older_files_do_not_count_besides_the_newer_key(save):
    files = {"special_tokens_map.json": json.dumps(OLD_NAMES), "added_tokens.json": json.dumps(OLD_IDS)}
    folder = save(begins=False, files=files, added_tokens_decoder={"260": stated("<new>")})
    tokenizer = HfTokenizer.from_folder(folder)
    assert tokenizer.vocab_size == 261 and len(tokenizer.encode("<new><think>")) == 1 + len("<think>")


@pytest.mark.parametrize(
    ("names", "ids", "message"),
    [
        (
            OLD_NAMES,
            {},
            "'<|cls|>' of .* or special_tokens_map.json is not in .*, and added_tokens.json gives",
        ),
        (
            {},
            {"<new>": 300},
            "added_tokens.json says that '<new>' is token 300, but tokenizer.json makes it 260",
        ),
        ({}, {"<a>": 260, "<b>": 260}, "'<b>' is token 260, but tokenizer.json makes it 261"),
        ({}, {"<new>": "260"}, "added_tokens.json has <new>='260'; expected int"),
        ({"pad_token": 0}, {}, "or special_tokens_map.json has pad_token=0; expected text"),
    ],
)
def test_older_files_that_are_refused(save, names, ids, message):
    files = {"special_tokens_map.json": json.dumps(names), "added_tokens.json": json.dumps(ids)}
    with pytest.raises(TokenizerError, match=message.replace("|", r"\|")):
        HfTokenizer.from_folder(save(begins=False, files=files))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"added_tokens_decoder": {"300": stated("<new>")}},
            "'<new>' is token 300, but tokenizer.json makes it 260",
        ),
        ({"added_tokens_decoder": {"5": stated("<s>")}}, "'<s>' is token 5, but tokenizer.json makes it 1"),
        ({"added_tokens_decoder": {"x": stated("<s>")}}, "expected tokens by their ids"),
        (
            {"additional_special_tokens": ["<new>"]},
            "special token '<new>' .* not in the tokenizer's vocabulary",
        ),
        (
            {"extra_special_tokens": {"image": "<new>"}},
            "the image '<new>' .* not in the tokenizer's vocabulary",
        ),
        ({"cls_token": "<new>"}, "the cls_token '<new>' .* not in the tokenizer's vocabulary"),
        ({"pad_token": 0}, "pad_token=0; expected text, or an object with content"),
        ({"additional_special_tokens": "<s>"}, "additional_special_tokens='<s>'; expected"),
        ({"add_bos_token": "yes"}, "add_bos_token='yes'; expected bool"),
        ({"chat_template": {}}, "chat_template={}; expected str"),
    ],
)
def test_tokens_that_are_refused(save, config, message):
    with pytest.raises(TokenizerError, match=message):
        HfTokenizer.from_folder(save(**config))


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, {}, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": None}, (2,)),
        ({"eos_token_id": [3, 2]}, {}, (2, 3)),
        ({"eos_token_id": 0}, {"eos_token_id": [2, 3]}, (2, 0, 3)),
        ({"text_config": {"eos_token_id": 3}}, {}, (2, 3)),
    ],
)
def test_a_response_ends_with_any_end_token_of_the_model(save, config, generation, expected):
    files = {"config.json": json.dumps(config), "generation_config.json": json.dumps(generation)}
    tokenizer = HfTokenizer.from_folder(save(files=files))
    assert (tokenizer.eos_id, tokenizer.eos_ids) == (2, expected)
    a, b = tokenizer.encode("ab")
    for end in expected:
        assert tokenizer.decode([a, end, b]) == decode_response(tokenizer, [a, end, b]) == "a"


@pytest.mark.parametrize(
    ("ids", "message"), [("2", "eos_token_id='2'; expected int"), ([2, 260], "end token 260 is")]
)
def test_end_tokens_that_are_refused(save, ids, message):
    with pytest.raises(TokenizerError, match=message):
        HfTokenizer.from_folder(save(files={"config.json": json.dumps({"eos_token_id": ids})}))


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
    assert HfTokenizer.from_folder(own_file).chat(MESSAGES, variables={"mood": "<ö>"}) == (
        '[{"role": "user", "content": "Hi"}] <ö>'  # plain JSON, nothing escaped
    )


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
    with pytest.raises(
        TokenizerError, match=r"the eos_token '<end>' .* is not in the tokenizer's vocabulary"
    ):
        HfTokenizer.from_folder(save(eos_token="<end>"))
    for text, message in (("{", "is not JSON"), ("[]", "holds list; expected a mapping")):
        (folder / "tokenizer_config.json").write_text(text)
        with pytest.raises(TokenizerError, match=rf"tokenizer_config\.json {message}"):
            HfTokenizer.from_folder(folder)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(TokenizerError, match=r"has no tokenizer_config\.json"):
        HfTokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot be read as a tokenizer"):
        HfTokenizer.from_folder(folder)
