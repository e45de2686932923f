"""The report of several methods: summary as JSON and Markdown, and figures."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trace_jax.alignment.plots import save_figures
from trace_jax.alignment.summary import ReportError, Run, against, markdown_table, summarize


def group_by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of one method together, in the order of first appearance.

    Raises:
        ReportError: one method and seed twice.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        same = groups.setdefault(run.method, [])
        if any(run.seed == other.seed for other in same):
            raise ReportError(
                f"two runs of {run.method!r} with seed {run.seed}: they would count as two seeds. Leave one out."
            )
        same.append(run)
    return groups


def write_report(
    methods: dict[str, list[Run]],
    folder: Path,
    *,
    baseline: str = "qat",
    yardstick: str = "bf16",
    notes: dict[str, Any] | None = None,
) -> str:
    """Writes `summary.json`, `summary.md` and `figures/*.png` under `folder`; returns the Markdown.

    `notes` are kept in the summary as they are (scores of the warm start, environment, command).
    """
    summaries = {method: summarize(runs) for method, runs in methods.items()}
    ratios = against(methods, yardstick=yardstick, baseline=baseline)
    summary = {"methods": summaries, "ratios": ratios, "notes": notes or {}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(_without_nan(summary), indent=1, allow_nan=False) + "\n")
    text = "\n\n".join(
        [markdown_table(summaries), _ratio_table(ratios, baseline, yardstick), _layer_table(summaries)]
    )
    (folder / "summary.md").write_text(text + "\n")
    save_figures(methods, folder / "figures")
    return text


def _without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity: null in their place."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _ratio_table(ratios: dict[str, dict[str, Any]], baseline: str, yardstick: str) -> str:
    columns = sorted({key for row in ratios.values() for key in row})
    absent = [name for name in dict.fromkeys((baseline, yardstick)) if name not in ratios]
    lines = [f"No ratios to `{name}`: it is not among the methods.\n" for name in absent]
    if not columns:
        return "\n".join(lines)
    lines += [
        f"Ratios to `{baseline}` and to `{yardstick}`'s gap to its own rollout, 95 % intervals:",
        "",
        "| method | " + " | ".join(c.replace("_over_", " / ") for c in columns) + " |",
        "|" + "---|" * (len(columns) + 1),
    ]
    for method, row in ratios.items():
        cells = [
            f"{v['value']:.3g} [{v['low']:.3g}, {v['high']:.3g}]" if (v := row.get(c)) else "-"
            for c in columns
        ]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _layer_table(summaries: dict[str, dict[str, Any]]) -> str:
    lines = [
        "Codes that differ from the rollout's after guidance, % by layer:",
        "",
        "| method | site | layers |",
    ]
    lines.append("|---|---|---|")
    for method, summary in summaries.items():
        for site, values in summary["code_mismatch_by_layer"].items():
            lines.append(f"| {method} | {site} | {' / '.join(f'{100 * v:.3g}' for v in values)} |")
    return "\n".join(lines)
