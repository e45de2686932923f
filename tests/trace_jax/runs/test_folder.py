"""A run's folder belongs to one configuration."""

import json

import jax
import pytest

from trace_jax.runs import RunFolder, RunFolderError, describe_environment

CONFIG = {"method": "trace", "train": {"steps": 10, "lr": 1e-5, "betas": [0.9, 0.95]}, "task": {"params": {}}}


def change(**train):
    return {**CONFIG, "train": {**CONFIG["train"], **train}}


def test_new_run_stores_config_and_environment(tmp_path):
    run = RunFolder.open(tmp_path, "demo", CONFIG)
    assert RunFolder(tmp_path / "demo").config() == CONFIG == run.config()
    assert run.checkpoints_path.is_dir()
    (environment,) = run.environments()
    assert environment["packages"]["jax"] == jax.__version__
    assert environment["devices"] == {
        "platform": jax.devices()[0].platform,
        "kind": jax.devices()[0].device_kind,
        "count": jax.device_count(),
        "processes": 1,
    }


def test_resume_with_the_same_config(tmp_path):
    RunFolder.open(tmp_path, "demo", CONFIG)
    run = RunFolder.open(tmp_path, "demo", CONFIG)
    assert len(run.environments()) == 2


def test_resume_with_another_config_names_the_keys_and_loses_nothing(tmp_path):
    run = RunFolder.open(tmp_path, "demo", CONFIG)
    before = run.config_path.read_bytes()
    new = {**change(lr=2e-5, betas=[0.9, 0.99]), "seed": 1}
    del new["task"]
    with pytest.raises(RunFolderError) as error:
        RunFolder.open(tmp_path, "demo", new)
    message = str(error.value)
    for part in (
        "train.lr: 1e-05 in the run, 2e-05 now",
        "train.betas: [0.9, 0.95] in the run, [0.9, 0.99] now",
        "seed: absent in the run, 1 now",
        "task.params: {} in the run, absent now",
    ):
        assert part in message
    assert "train.steps" not in message
    assert run.config_path.read_bytes() == before


def test_only_a_folder_without_results_may_be_deleted(tmp_path):
    """Never taken over by itself: another process may be compiling its first step there."""
    run = RunFolder.open(tmp_path, "demo", CONFIG)
    with pytest.raises(RunFolderError, match=r"train\.lr: 1e-05 in the run, 2e-05 now.*or delete the folder"):
        RunFolder.open(tmp_path, "demo", change(lr=2e-5))
    (run.checkpoints_path / "1").mkdir()
    with pytest.raises(RunFolderError, match="or the values of the run to resume it"):
        RunFolder.open(tmp_path, "demo", change(lr=2e-5))


@pytest.mark.parametrize("may_change", ["train.steps", "train"])
def test_a_key_that_may_change_is_updated(tmp_path, may_change):
    RunFolder.open(tmp_path, "demo", CONFIG)
    run = RunFolder.open(tmp_path, "demo", change(steps=20), may_change=[may_change])
    assert run.config()["train"]["steps"] == 20
    with pytest.raises(RunFolderError, match="method: 'trace' in the run, 'qat' now"):
        RunFolder.open(tmp_path, "demo", {**change(steps=20), "method": "qat"}, may_change=[may_change])


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.tex").write_text("...")
    with pytest.raises(RunFolderError, match=r"holds files but no config.yaml"):
        RunFolder.open(tmp_path, "demo", CONFIG)


def test_a_start_killed_before_the_config_is_started_again(tmp_path):
    run = RunFolder(tmp_path / "demo")
    run.checkpoints_path.mkdir(parents=True)
    (run.path / ".config.yaml.tmp").write_text("meth")
    assert RunFolder.open(tmp_path, "demo", CONFIG).config() == CONFIG


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b"])
def test_bad_names(tmp_path, name):
    with pytest.raises(RunFolderError, match="run name"):
        RunFolder.open(tmp_path, name, CONFIG)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "is not a run's folder"), ("a: [", "not valid YAML"), ("- 1", "does not hold")],
)
def test_reading_what_is_no_run(tmp_path, content, message):
    run = RunFolder(tmp_path)
    if content is not None:
        run.config_path.write_text(content)
    with pytest.raises(RunFolderError, match=message):
        run.config()


def test_other_hosts_write_nothing(tmp_path):
    run = RunFolder.open(tmp_path, "demo", CONFIG, primary=False)
    assert run.path == tmp_path / "demo" and not run.path.exists()


def test_environment_is_json_and_works_outside_a_repository(tmp_path, monkeypatch):
    assert json.loads(json.dumps(describe_environment())) == describe_environment()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_environment()["git_commit"] is None
