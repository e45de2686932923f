"""JSON Lines by index: every mistake is found when the file is opened, with its line."""

import grain
import pytest

from trace_jax.data import DataError, JsonlSource, Row

FIELDS = {"prompt": (str,), "answer": (str, int), "extra": (object,)}


def source(tmp_path, text, fields=FIELDS):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return JsonlSource(path, fields)


def test_rows_keep_their_lines_and_lose_other_fields(tmp_path):
    rows = source(
        tmp_path,
        '{"prompt": "ä", "answer": 3, "extra": [1], "more": 0}\n\n{"extra": null, "answer": "b", "prompt": "c"}',
    )
    assert len(rows) == 2
    assert rows[0] == Row(1, {"prompt": "ä", "answer": 3, "extra": [1]})
    assert rows[1] == Row(3, {"prompt": "c", "answer": "b", "extra": None})


def test_grain_reads_it(tmp_path):
    rows = source(tmp_path, "".join(f'{{"n": {n}}}\n' for n in range(20)), {"n": (int,)})
    dataset = grain.MapDataset.source(rows).seed(1).shuffle()
    seen = [dataset[index].fields["n"] for index in range(20)]
    assert seen != list(range(20)) and sorted(seen) == list(range(20))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"rows\.jsonl is empty; expected a JSON object a line with prompt, answer, extra"),
        ("\n \n", "is empty"),
        ('\n{"prompt": ', "line 2 is not JSON: "),
        (b'{"prompt": "\xff"}', "line 1 is not JSON: .*utf-8"),
        ("[1]", "line 1 is a JSON list; expected an object"),
        ('{"prompt": "a", "extra": 0}', "line 1 has no 'answer'; it has 'prompt', 'extra'"),
        ('{"prompt": 1, "answer": 2, "extra": 0}', r"line 1: 'prompt' is 1 \(int\); expected str"),
        ('{"prompt": "", "answer": true, "extra": 0}', r"'answer' is True \(bool\); expected str or int"),
        ('{"prompt": "", "answer": null, "extra": 0}', r"'answer' is None \(NoneType\); expected str or int"),
    ],
)
def test_what_is_refused(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        source(tmp_path, text)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no JSONL file at .*none\.jsonl"):
        JsonlSource(tmp_path / "none.jsonl", FIELDS)
