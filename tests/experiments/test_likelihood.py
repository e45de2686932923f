"""Likelihoods by precision: BF16's against reference logits, and what FP4 costs SmolLM2's MoE."""

import dataclasses

import numpy as np
import pytest

from experiments.likelihood import PLANS, LikelihoodConfig, measure, read_tokens, table
from tests.experiments.settings import composed
from tests.trace_jax.families import ROOT
from trace_jax.config import ConfigError, from_mapping
from trace_jax.data import smollm2_file

SMOLLM2 = "tests/data/smollm2_reference.npz"


def config(*overrides: str) -> LikelihoodConfig:
    return from_mapping(LikelihoodConfig, composed("likelihood", *overrides))


def test_bf16_has_the_likelihood_of_the_reference_logits():
    folder = ROOT / "qwen3_moe"
    with np.load(folder / "reference.npz") as file:
        tokens, logits = file["input_ids"], file["logits"].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(logprobs[:, :-1], tokens[:, 1:, None], -1).mean()
    found = measure(config(f"init_from={folder}", f"tokens={folder / 'reference.npz'}", "model=tiny_moe"))
    assert found["bf16"] == pytest.approx(expected, abs=0.02)
    assert list(found) == list(PLANS) and len(set(found.values())) == len(found)
    assert f"| nvfp4, cache | {found['nvfp4, cache']:.4f} |" in table(found)


def test_formats_whose_blocks_do_not_fit_are_left_out_and_said(capsys):
    folder = ROOT / "deepseek_v3"  # a cached vector of 40 + 8 values is no multiple of 32
    found = measure(config(f"init_from={folder}", f"tokens={folder / 'reference.npz'}", "model=tiny_moe"))
    said = capsys.readouterr().err
    assert set(PLANS) - set(found) == {name for name in PLANS if f"{name}: " in said} != set()
    assert {"bf16", "nvfp4, experts and cache"} <= set(found)


@pytest.mark.slow
def test_what_fp4_costs_smollm2():
    pytest.importorskip("gguf")
    try:
        smollm2_file()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    found = measure(config("init_from=smollm2", f"tokens={SMOLLM2}"))
    with np.load(SMOLLM2) as file:
        assert found["bf16"] == pytest.approx(-file["next_token_logprobs"].mean(), abs=0.005)
    rise = {name: nats - found["bf16"] for name, nats in found.items()}
    # Measured: 0.35, 0.20 and 0.08.
    assert 0.1 < rise["nvfp4, experts"] < 0.3 and 0.03 < rise["nvfp4, cache"] < 0.15
    assert 0.2 < rise["nvfp4, experts and cache"] < 0.5
    # Wider blocks under powers of two.
    assert rise["mxfp4, experts and cache"] > rise["nvfp4, experts and cache"]


def test_files_that_do_not_fit(tmp_path):
    np.savez(tmp_path / "a.npz", tokens=np.zeros((2, 4), np.int32))
    with pytest.raises(ConfigError, match="has no input_ids; it has tokens"):
        read_tokens(str(tmp_path / "a.npz"), 8)
    for ids, said in (
        (np.zeros((2, 1), np.int32), r"expected integers \[B, T\], T >= 2"),
        (np.zeros((2, 4)), "input_ids float64"),
        (np.full((2, 4), 8), "expected 0 to 7"),
        (np.full((2, 4), -1), "ids from -1"),
    ):
        np.savez(tmp_path / "b.npz", input_ids=ids)
        with pytest.raises(ConfigError, match=said):
            read_tokens(str(tmp_path / "b.npz"), 8)


def test_every_plan_is_another_one():
    assert len({plan and dataclasses.astuple(plan) for plan in PLANS.values()}) == len(PLANS)
