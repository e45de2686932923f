"""Per-step alignment report: the rollout's audit sample against the trainer's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.arrays import Fp4Array
from trace_jax.alignment.metrics import CODE_METRICS, compare_codes
from trace_jax.quant import SiteAudit


def audit_report(
    rollout: dict[str, Fp4Array], trainer: dict[str, SiteAudit], fed: np.ndarray
) -> dict[str, dict[str, np.ndarray]]:
    """Compares audited rows at every site and layer.

    Args:
        rollout: codes by site, `[L, A, S, ...]`, on the host.
        trainer: the trainer's audit of the same sequences.
        fed: bool `[A, S]`, rows that were fed on both sides.

    Returns:
        Per site, float arrays `[L]`: `d_act`, `code_mismatch`, `adjacent_share`, `scale_mismatch` as used (after
        guidance), the same with suffix `_before` by the trainer's own rounding, `unguided_share` of the rows,
        `saturated_share` of the values, and `scale_miss`, the scale mismatch of guided rows.

    Raises:
        ValueError: the two sides audited different sites or rows.
    """
    if set(rollout) != set(trainer):
        raise ValueError(
            f"rollout audited {sorted(rollout)}, trainer {sorted(trainer)}; expected the same sites."
        )
    report = {}
    for site, theirs in rollout.items():
        ours = trainer[site]
        if tuple(theirs.words.shape) != tuple(ours.used.words.shape):
            raise ValueError(
                f"audit of {site!r}: rollout rows {theirs.words.shape}, trainer rows {ours.used.words.shape}."
            )
        theirs = jax.tree.map(jnp.asarray, theirs)
        rows = np.broadcast_to(
            fed.reshape(1, *fed.shape, *(1,) * (theirs.row_exponent.ndim - 3)), theirs.row_exponent.shape
        )
        after = jax.device_get(compare_codes(theirs, ours.used, rows))
        before = jax.device_get(compare_codes(theirs, ours.own, rows))
        guided = np.asarray(ours.guided)
        axes = tuple(range(1, rows.ndim))
        count = np.maximum(rows.sum(axis=axes), 1)
        missed = jax.device_get(compare_codes(theirs, ours.used, rows & guided))["scale_mismatch"]
        report[site] = {
            **{name: after[name] for name in CODE_METRICS},
            **{f"{name}_before": before[name] for name in CODE_METRICS},
            "unguided_share": (rows & ~guided).sum(axis=axes) / count,
            "saturated_share": (np.asarray(ours.saturated) * rows).sum(axis=axes)
            / (count * theirs.shape[-1]),
            "scale_miss": missed,
        }
    return report


def flatten_report(report: dict[str, dict[str, np.ndarray]]) -> tuple[dict[str, float], dict[str, Any]]:
    """Scalars `alignment/<site>/<metric>` (mean over layers), and `alignment_by_layer/<site>/<metric>` lists."""
    scalars, lists = {}, {}
    for site, metrics in report.items():
        for name, values in metrics.items():
            if name == "scale_miss":
                continue
            scalars[f"alignment/{site}/{name}"] = float(np.mean(values))
            lists[f"alignment_by_layer/{site}/{name}"] = [float(v) for v in values]
    return scalars, lists
