"""Run folders: resolved config, metrics, checkpoints, progress and environment. Knows no model.

A run is a named folder that all hosts agree on:

    config.yaml         resolved configuration; a resume under another one is refused
    environment.json    commit, versions and devices of every start
    metrics.jsonl       one row a step, the record of the run
    tensorboard/        the scalars of metrics.jsonl
    checkpoints/<step>  Orbax checkpoints with checksums
    figures/
"""

from trace_jax.runs.checkpoints import CheckpointError, Checkpoints, Restored
from trace_jax.runs.environment import describe_environment
from trace_jax.runs.folder import RunFolder, RunFolderError
from trace_jax.runs.metrics import MetricsError, MetricsWriter, read_metrics
from trace_jax.runs.progress import Progress

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "MetricsError",
    "MetricsWriter",
    "Progress",
    "Restored",
    "RunFolder",
    "RunFolderError",
    "describe_environment",
    "read_metrics",
]
