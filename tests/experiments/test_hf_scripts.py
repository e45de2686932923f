"""check_hf and export_hf, as they are called."""

import sys

import hydra
import numpy as np
import pytest

from experiments import check_hf, export_hf, train
from experiments.common import CONFIGS
from tests.trace_jax import small
from tests.trace_jax.hf.folders import TINY, configured, in_mxfp4, split
from trace_jax.config import ConfigError, from_mapping
from trace_jax.hf import CheckpointFormatError, load_quantized
from trace_jax.hf.folder import INDEX

QWEN = TINY / "qwen3_moe"


def check(monkeypatch, capsys, checkpoint, reference, *options):
    """(exit status, printed numbers)."""
    monkeypatch.setattr(
        sys, "argv", ["check_hf", "--checkpoint", str(checkpoint), "--reference", str(reference), *options]
    )
    try:
        check_hf.main()
        status = 0
    except SystemExit as exit:
        status = exit.code
    printed = capsys.readouterr()
    return status, dict(line.split() for line in printed.out.splitlines()), printed.err


def test_logits_are_the_references(monkeypatch, capsys):
    status, found, _ = check(monkeypatch, capsys, QWEN, QWEN / "reference.npz")
    assert status == 0 and float(found["max_abs_diff"]) < 1e-4 and float(found["top1_agreement"]) == 1.0


def test_other_logits_are_told(monkeypatch, capsys, tmp_path):
    reference = dict(np.load(QWEN / "reference.npz"))
    reference["logits"][1, 2, 3] += 0.25
    np.savez(tmp_path / "other.npz", **reference)
    status, found, _ = check(monkeypatch, capsys, QWEN, tmp_path / "other.npz")
    assert status == 1 and float(found["max_abs_diff"]) == pytest.approx(0.25, abs=1e-3)
    assert check(monkeypatch, capsys, QWEN, tmp_path / "other.npz", "--tolerance", "0.3")[0] == 0
    reference["logits"][0, 0, 0] = np.nan
    np.savez(tmp_path / "nan.npz", **reference)
    assert check(monkeypatch, capsys, QWEN, tmp_path / "nan.npz", "--tolerance", "1e9")[0] == 1


def test_references_that_do_not_fit(monkeypatch, capsys, tmp_path):
    reference = dict(np.load(QWEN / "reference.npz"))
    np.savez(tmp_path / "ids.npz", input_ids=reference["input_ids"])
    status, _, said = check(monkeypatch, capsys, QWEN, tmp_path / "ids.npz")
    assert status == 2 and "has no logits" in said
    np.savez(tmp_path / "short.npz", input_ids=reference["input_ids"], logits=reference["logits"][..., :-1])
    status, _, said = check(monkeypatch, capsys, QWEN, tmp_path / "short.npz")
    assert status == 2 and "expected [B, T] and [B, T, 160]" in said
    status, _, said = check(monkeypatch, capsys, tmp_path, tmp_path / "short.npz")
    assert status == 2 and "has no config.json" in said


def export_config(*options: str) -> export_hf.ExportConfig:
    with hydra.initialize_config_dir(CONFIGS, version_base="1.3"):
        return from_mapping(export_hf.ExportConfig, hydra.compose("export_hf", list(options)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["format=gguf", "run=a"], "format is 'gguf'"),
        (["format=bf16"], "expected exactly one of them"),
        (["format=bf16", "run=a", "checkpoint=b"], "expected exactly one of them"),
        (["format=modelopt", "run=a", "down_input_scale=1.0"], "expected both or none"),
        (["format=bf16", "run=a", "native_fp4=true"], "are for NVFP4 exports"),
        (["format=mxfp4", "run=a", "native_fp4=true"], "are for NVFP4 exports"),
        (["run=a"], "format"),
    ],
)
def test_options_of_an_export_that_make_no_sense(options, said):
    with pytest.raises(ConfigError, match=said):
        export_config("out=c", *options)


def test_an_export_is_checked_with_its_own_values(monkeypatch, capsys, tmp_path):
    """The dequantized export, exported again in BF16, has the same logits: values of FP4 are exact in BF16."""
    options = (f"checkpoint={QWEN}", "format=compressed-tensors", f"out={tmp_path / 'nvfp4'}")
    export_hf.export(export_config(*options))
    assert load_quantized(tmp_path / "nvfp4").config.family == "qwen3_moe"
    status, found, _ = check(monkeypatch, capsys, tmp_path / "nvfp4", QWEN / "reference.npz")
    # Of random weights little is left by FP4; but the right experts are in the right places.
    assert status == 1 and 0.5 < float(found["top1_agreement"]) < 1
    config, params = check_hf.load_dense(str(tmp_path / "nvfp4"))
    export_hf.export_bf16(params, config, tmp_path / "dense")
    tokens, _ = check_hf.read_reference(str(QWEN / "reference.npz"), config.vocab_size)
    logits = [
        check_hf.logits_of(config, check_hf.load_dense(str(tmp_path / name))[1], tokens)
        for name in ("nvfp4", "dense")
    ]
    assert np.array_equal(*logits)


def test_a_run_knows_the_folder_that_it_began_from(tmp_path, capsys):
    """Through a warm start; what is gone, or no folder, is said."""
    for name, start in (
        ("warm", QWEN),
        ("run", tmp_path / "warm"),
        ("lost", tmp_path / "gone"),
        ("smol", "smollm2"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(f"init_from: {start}\n")

    def source(name):
        return export_hf.source_of(export_config("format=bf16", f"out={tmp_path}", f"run={tmp_path / name}"))

    assert source("run") == source("warm") == str(QWEN)
    assert source("lost") is source("smol") is None
    said = capsys.readouterr().err
    assert (
        f"began from {tmp_path / 'gone'}, which is gone: no tokenizer" in said and "SmolLM2's package" in said
    )


def test_gpt_oss_leaves_in_mxfp4_as_it_came(tmp_path):
    """Values are the folder's; codes are those of a rollout of its masters."""
    folder, dense = in_mxfp4(TINY / "gpt_oss", tmp_path)
    for name, source in (("again", folder), ("quantized", dense)):
        options = (f"checkpoint={source}", "format=mxfp4", f"out={tmp_path / name}")
        export_hf.export(export_config(*options))
        assert small.equal_trees(
            check_hf.load_dense(str(tmp_path / name))[1], check_hf.load_dense(str(dense))[1]
        )
    with pytest.raises(CheckpointFormatError, match="has no counterpart in the mxfp4 layout"):
        export_hf.export(export_config(f"checkpoint={QWEN}", "format=mxfp4", f"out={tmp_path / 'qwen'}"))


def broken_folders(path) -> dict[str, tuple[object, str]]:
    """Folder and message of each kind of damage that is found in a folder's names or sizes."""
    shards = {name: split(QWEN, path / name) for name in ("index", "shard", "cut")}
    (shards["index"] / INDEX).unlink()
    shard = "model-00002-of-00003.safetensors"
    (shards["shard"] / shard).unlink()
    data = (shards["cut"] / shard).read_bytes()
    (shards["cut"] / shard).write_bytes(data[:-1])
    return {
        "index": (shards["index"], f"but no {INDEX}"),
        "shard": (shards["shard"], f"has no {shard}, which its index names"),
        "cut": (shards["cut"], f"{shard} is truncated"),
        "type": (
            configured(QWEN, path / "type", model_type="gpt2"),
            "known are deepseek_v3, gpt_oss, mixtral",
        ),
        "sizes": (
            configured(QWEN, path / "sizes", moe_intermediate_size=48),
            "expected (64, 48) by config.json",
        ),
    }


@pytest.mark.parametrize("kind", ["index", "shard", "cut", "type", "sizes"])
def test_scripts_end_with_the_message_of_a_bad_folder(monkeypatch, capsys, tmp_path, kind):
    """Exit status 2 and one line, no traceback."""
    folder, said = broken_folders(tmp_path)[kind]
    status, _, printed = check(monkeypatch, capsys, folder, QWEN / "reference.npz")
    assert status == 2 and said in printed and "Traceback" not in printed
    monkeypatch.setattr(train, "enable_compilation_cache", lambda root: None)  # it is the whole process's
    monkeypatch.setattr(sys, "argv", ["train", f"root={tmp_path / 'runs'}", f"init_from={folder}"])
    with pytest.raises(SystemExit) as stopped:
        train.main()
    printed = capsys.readouterr().err
    assert stopped.value.code == 2
    assert printed.startswith("CheckpointFormatError: ") and said in printed and "Traceback" not in printed
