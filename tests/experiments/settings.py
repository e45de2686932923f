"""The smallest run that has everything: overrides for the scripts, and runs inside the test process."""

from pathlib import Path

from hydra import compose, initialize_config_dir

from experiments.common import CONFIGS
from trace_jax.config import from_mapping
from trace_jax.rl.run import RunConfig

TINY = (
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.head_dim=16",
    "model.num_experts=4",
    "model.expert_hidden_size=32",
    "rl.prompts=2",
    "rl.group_size=4",
    "rl.max_new_tokens=8",
    "rl.decode_chunk=4",
    "rl.audit_sequences=1",
)


def composed(script: str, *overrides: str):
    """The script's Hydra config, as its command line would build it."""
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        return compose(script, overrides=list(overrides))


def run_config(root: Path, *overrides: str) -> RunConfig:
    return from_mapping(RunConfig, composed("train", f"root={root}", *TINY, *overrides))
