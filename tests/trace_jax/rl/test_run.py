"""What a run takes from the checkpoint that it starts from: the model, the tokenizer and its end tokens."""

import dataclasses
import json
import shutil

import pytest
import tokenizers

from tests.trace_jax import small
from tests.trace_jax.families import ROOT, config_of
from trace_jax.config import ConfigError
from trace_jax.rl import run
from trace_jax.rl.run import RunConfig, make_loop, with_checkpoint
from trace_jax.tasks import ChatConfig, TaskConfig


@pytest.fixture
def checkpoint(tmp_path):
    """A folder whose tokenizer ends with token 1, and whose model also ends with 2 and 0."""
    vocab = {token: id_ for id_, token in enumerate(["<end>", "</s>", "<turn>", *"0123456789+*="])}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="="))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    library.save(str(tmp_path / "tokenizer.json"))
    template = "{{ messages[0].content }}{% if think is false %}</s>{% endif %}"
    named = {"eos_token": "</s>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 0]}')
    shutil.copy(ROOT / "olmoe" / "config.json", tmp_path)  # eos_token_id is 2
    return str(tmp_path)


def config(checkpoint, tokenizer, **task):
    return RunConfig(
        name="a",
        init_from=checkpoint,
        model=small.MODEL,
        method=small.method("trace"),
        task=TaskConfig(tokenizer=tokenizer, **task),
    )


def test_the_model_is_the_checkpoints(checkpoint):
    assert with_checkpoint(config(checkpoint, checkpoint)).model == dataclasses.replace(
        config_of("olmoe"), dtype=small.MODEL.dtype, remat=small.MODEL.remat
    )


@pytest.mark.parametrize("tokenizer", [None, "bytes", "smollm2"])
def test_another_tokenizer_is_refused(checkpoint, tokenizer):
    for init_from in {checkpoint, "smollm2"} - {tokenizer}:
        with pytest.raises(ConfigError, match=rf"Set task\.tokenizer={init_from}\."):
            with_checkpoint(config(init_from, tokenizer))


def test_a_response_ends_with_any_end_token_of_the_checkpoint(checkpoint):
    loop = make_loop(with_checkpoint(config(checkpoint, checkpoint)))
    assert loop.sampler.sampling.stop_tokens == (1, 2, 0)
    task_json = json.dumps({"tokenizer": checkpoint})
    evaluator = run._evaluator(config_of("olmoe"), task_json, "eval", "bf16", 8, 0.0)
    assert evaluator.sampler.sampling.stop_tokens == (1, 2, 0)


def test_the_chat_of_a_task_sets_variables_of_the_template(checkpoint):
    chat = ChatConfig(variables={"think": False})
    loop = make_loop(with_checkpoint(config(checkpoint, checkpoint, chat=chat)))
    assert loop.task.sample(0).prompt.endswith("=</s>")


def test_a_run_names_the_tokenizer_of_its_ids(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.yaml").write_text(f"task: {{tokenizer: {checkpoint}}}\n")
    assert with_checkpoint(config(str(folder), checkpoint)).init_from == str(folder)
    with pytest.raises(ConfigError, match=rf"Set task\.tokenizer={checkpoint}\."):
        with_checkpoint(config(str(folder), "bytes"))
    (folder / "config.yaml").write_text("task: {tokenizer: null}\n")
    with_checkpoint(config(str(folder), "bytes"))  # the task's own characters are no name
