"""What the scripts share: strict configs from Hydra, readable failures, and JAX's compilation cache."""

import functools
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import jax
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from trace_jax.alignment.summary import ReportError
from trace_jax.config import ConfigError, from_mapping, to_mapping
from trace_jax.data import DataError, TokenizerError
from trace_jax.guidance import RecordError
from trace_jax.hf import CheckpointFormatError, is_hf_folder, read_model_config
from trace_jax.models import GgufError, ModelConfig, run_like
from trace_jax.parallel import MeshConfig
from trace_jax.quant import PlanError
from trace_jax.rl import MethodConfig, NonFiniteError, OptimizerConfig, RLConfig
from trace_jax.rl.run import SMOLLM2, with_vocabulary
from trace_jax.rl.supervised import SupervisedConfig
from trace_jax.runs import CheckpointError, MetricsError, RunFolder, RunFolderError
from trace_jax.tasks import TaskConfig, TaskError

CONFIGS = str(Path(__file__).resolve().parent.parent / "configs")

# Errors whose message says all there is to say. Anything else is a bug and keeps its traceback.
EXPECTED_ERRORS = (
    CheckpointError,
    CheckpointFormatError,
    ConfigError,
    DataError,
    FileNotFoundError,
    GgufError,
    MetricsError,
    NonFiniteError,
    PlanError,
    RecordError,
    ReportError,
    RunFolderError,
    TaskError,
    TokenizerError,
)


# The dataclasses' own defaults, as the group option `defaults`: every field can be set on the command line, a key that
# no dataclass has is refused, and no default is written twice.
for _group, _default in {
    "mesh": MeshConfig(),
    "method": MethodConfig(name="unnamed"),
    "model": ModelConfig(),
    "optimizer": OptimizerConfig(),
    "rl": RLConfig(),
    "task": TaskConfig(),
    "warmstart": SupervisedConfig(),
}.items():
    ConfigStore.instance().store(group=_group, name="defaults", node=to_mapping(_default))


def script(main: Callable) -> Callable:
    """Ends a script with the message of an expected error and exit status 2, without a traceback.

    In a sweep the rest still runs, and Hydra then reports the error in its own way.
    """

    @functools.wraps(main)
    def run(*args):
        logging.getLogger().setLevel(
            logging.WARNING
        )  # Hydra sets INFO, and checkpoint libraries are chatty there
        try:
            return main(*args)
        except EXPECTED_ERRORS as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
                raise  # Hydra runs the rest of the sweep, then reports this one
            raise SystemExit(2) from None

    return run


def enable_compilation_cache(root: str) -> None:
    """Keeps compiled programs in `<root>/.jax_cache`, so that a resume or a second comparison starts at once."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(Path(root).absolute() / ".jax_cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


def run_model(folder: str) -> tuple[ModelConfig, TaskConfig, dict[str, Any]]:
    """Model, with its task's vocabulary, task, and the whole stored config of a run or a warm start.

    Raises:
        RunFolderError: there is no run in `folder`.
    """
    stored = RunFolder(Path(folder)).config()
    task = from_mapping(TaskConfig, stored["task"])
    return with_vocabulary(from_mapping(ModelConfig, stored["model"]), task), task, stored


def checkpoint_model(init_from: str | None, model: ModelConfig) -> ModelConfig:
    """What `init_from` says the model is: a Hugging Face folder or a run do, `smollm2` and None leave it to `model`."""
    if is_hf_folder(init_from):
        return run_like(read_model_config(init_from)[2], model)
    return model if init_from in (None, SMOLLM2) else run_model(init_from)[0]


def method_config(name: str) -> MethodConfig:
    """The preset `configs/method/<name>.yaml`.

    Raises:
        ConfigError: no such preset; the message lists them.
    """
    presets = sorted(path.stem for path in (Path(CONFIGS) / "method").glob("*.yaml"))
    if name not in presets:
        raise ConfigError(f"unknown method {name!r}; expected one of {', '.join(presets)}.")
    return from_mapping(MethodConfig, hydra.compose(config_name=f"method/{name}").method, prefix="method")
