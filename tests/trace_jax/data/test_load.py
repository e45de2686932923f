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
    for name in (None, "bytes", "one"):
        check_own_tokenizer(None, name, key="tokenizer")


@pytest.mark.parametrize("own", ["smollm2", "one", "bytes"])
def test_another_tokenizer_is_refused(folders, own):
    for name in (None, "other", "smollm2x"):
        shown = "not set" if name is None else name
        with pytest.raises(ConfigError) as error:
            check_own_tokenizer(own, name, key="task.tokenizer")
        assert str(error.value) == (
            f"init_from has a tokenizer of its own, {own}, but task.tokenizer is {shown}: the model would read the ids "
            f"as other words. Set task.tokenizer={own}."
        )
