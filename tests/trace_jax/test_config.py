"""Strict conversion of mappings to config dataclasses: every refusal names key, value and what is allowed."""

import dataclasses
import re
from typing import Literal

import pytest
import yaml
from omegaconf import OmegaConf

from trace_jax.config import ConfigError, from_mapping, to_mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    kind: Literal["adamw", "sgd"] = "adamw"

    def __post_init__(self):
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, got {self.warmup_steps}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    name: str
    optimizer: Optimizer = Optimizer()
    reference: Optimizer | None = None
    sites: tuple[str, ...] = ()
    params: dict = dataclasses.field(default_factory=dict)
    limit: float | None = None
    verbose: bool = False


def test_builds_nested_and_returns_to_the_same_mapping():
    mapping = {
        "name": "demo",
        "optimizer": {"learning_rate": 1, "warmup_steps": 3, "kind": "sgd"},
        "reference": {"learning_rate": 0.5, "warmup_steps": 0, "kind": "adamw"},
        "sites": ["moe_input", "kv"],
        "params": {"max_digits": 2, "operations": ["add"]},
        "limit": 2,
        "verbose": True,
    }
    config = from_mapping(Run, mapping)
    assert config.optimizer == Optimizer(learning_rate=1.0, warmup_steps=3, kind="sgd")
    assert type(config.optimizer.learning_rate) is float
    assert config.sites == ("moe_input", "kv")
    assert to_mapping(config) == mapping
    assert from_mapping(Run, yaml.safe_load(yaml.safe_dump(to_mapping(config)))) == config


def test_takes_a_hydra_config_and_resolves_it():
    node = OmegaConf.create({"name": "a", "sites": ["${name}"], "optimizer": {"warmup_steps": 2}})
    assert from_mapping(Run, node) == Run(name="a", sites=("a",), optimizer=Optimizer(warmup_steps=2))
    with pytest.raises(ConfigError, match="name"):
        from_mapping(Run, OmegaConf.create({"name": "???"}))


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (
            {"name": "a", "optimizer": {"learning_rte": 0.1}},
            r"unknown key 'optimizer.learning_rte' \(value 0.1\). Did you mean 'learning_rate'\? "
            r"Allowed here: kind, learning_rate, warmup_steps",
        ),
        ({"name": "a", "xyz": 1}, r"unknown key 'xyz' \(value 1\). Allowed here: limit, name"),
        ({}, "name: required by Run, but not given"),
        ({"name": 3}, r"name: expected str, got 3 \(int\)"),
        ({"name": "a", "optimizer": 3}, r"optimizer: expected Optimizer, got 3 \(int\)"),
        ({"name": "a", "optimizer": {"warmup_steps": 1.5}}, r"optimizer.warmup_steps: expected int, got 1.5"),
        (
            {"name": "a", "optimizer": {"warmup_steps": True}},
            r"optimizer.warmup_steps: expected int, got True",
        ),
        ({"name": "a", "limit": True}, r"limit: expected float \| None, got True"),
        (
            {"name": "a", "optimizer": {"learning_rate": "0.1"}},
            r"optimizer.learning_rate: expected float, got '0.1'",
        ),
        (
            {"name": "a", "optimizer": {"kind": "lion"}},
            r"optimizer.kind: expected .*'adamw', 'sgd'.*, got 'lion'",
        ),
        ({"name": "a", "reference": {"kid": 1}}, r"unknown key 'reference.kid' .*Did you mean 'kind'"),
        ({"name": "a", "sites": "kv"}, r"sites: expected tuple\[str, ...\], got 'kv'"),
        ({"name": "a", "sites": [1]}, r"sites: expected tuple\[str, ...\], got"),
        (
            {"name": "a", "optimizer": {"warmup_steps": -1}},
            "^optimizer: warmup_steps must be at least 0, got -1",
        ),
        ([1], r"expected a mapping for Run, got \[1\]"),
    ],
)
def test_refuses(mapping, message):
    with pytest.raises(ConfigError) as error:
        from_mapping(Run, mapping)
    assert re.search(message, str(error.value)), str(error.value)


def test_to_mapping_refuses_what_a_file_cannot_hold():
    with pytest.raises(ConfigError, match=r"params\.f: .*object"):
        to_mapping(Run(name="a", params={"f": object()}))
