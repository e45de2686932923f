import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax.data import ByteTokenizer, CharTokenizer, Tokenizer, decode_response


@given(st.text())
def test_bytes_round_trip(text):
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text


@given(st.text(alphabet="0123456789+=;"))
def test_characters_round_trip(text):
    tokenizer = CharTokenizer("0123456789+=;")
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and all(3 <= id_ < tokenizer.vocab_size for id_ in ids)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("tokenizer", [CharTokenizer("ab"), ByteTokenizer()])
def test_decode_stops_at_the_end_and_leaves_specials_out(tokenizer):
    a, b = tokenizer.encode("ab")
    ids = [tokenizer.bos_id, tokenizer.pad_id, a, tokenizer.pad_id, b, tokenizer.eos_id, a]
    assert tokenizer.decode(ids) == "ab"
    assert isinstance(tokenizer, Tokenizer)


def test_unknown_character_is_named():
    with pytest.raises(ValueError, match=r"character 'x' at position 2 of '1\+x'"):
        CharTokenizer("1+").encode("1+x")


def test_id_outside_the_vocabulary_is_named():
    with pytest.raises(ValueError, match="token id 5 is outside the vocabulary of 5"):
        CharTokenizer("ab").decode([3, 5])


def test_broken_bytes_decode_to_a_replacement():
    assert ByteTokenizer().decode([3 + 0xFF]) == "�"


@pytest.mark.parametrize("alphabet", ["", "aa"])
def test_bad_alphabet(alphabet):
    with pytest.raises(ValueError, match="give each character once"):
        CharTokenizer(alphabet)


def test_ids_of_a_padded_embedding_are_shown_as_unknown():
    tokenizer = CharTokenizer("ab")
    assert decode_response(tokenizer, [3, 5, 4, 99]) == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"
    assert decode_response(tokenizer, [3, 2, 4, 99]) == "a"
    assert decode_response(tokenizer, []) == ""
