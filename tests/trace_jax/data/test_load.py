"""Which tokenizer goes with a checkpoint."""

import pytest

from trace_jax.config import ConfigError
from trace_jax.data import check_own_tokenizer


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The names of two folders with a tokenizer and one without, relative to the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "other", "run"):
        (tmp_path / name).mkdir()
    for name in ("one", "other"):
        (tmp_path / name / "tokenizer.json").write_text("{}")
    return tmp_path


def test_a_checkpoint_takes_its_own_tokenizer(folders):
    check_own_tokenizer("smollm2", "smollm2", key="tokenizer")
    for name in ("one", "./one", "other/../one", str(folders / "one")):
        check_own_tokenizer("one", name, key="tokenizer")


def test_where_there_is_none_any_will_do(folders):
    for checkpoint in (None, "run", "missing"):
        for name in (None, "bytes", "one"):
            check_own_tokenizer(checkpoint, name, key="tokenizer")


@pytest.mark.parametrize("checkpoint", ["smollm2", "one"])
def test_another_tokenizer_is_refused(folders, checkpoint):
    for name in (None, "bytes", "other", "smollm2x"):
        shown = "not set" if name is None else name
        with pytest.raises(ConfigError) as error:
            check_own_tokenizer(checkpoint, name, key="task.tokenizer")
        assert str(error.value) == (
            f"init_from={checkpoint} has a tokenizer of its own, but task.tokenizer is {shown}: the model would read "
            f"the ids as other words. Set task.tokenizer={checkpoint}."
        )
