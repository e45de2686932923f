"""Table and figures from run folders.

    python -m experiments.report runs/demo/bf16_0 runs/demo/qat_0 --out runs/report

Runs of one method are seeds of it. Writes `summary.json`, `summary.md` and `figures/*.png`.
"""

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.common import script
from trace_jax.alignment.comparison import group_by_method, write_report
from trace_jax.alignment.summary import ReportError
from trace_jax.config import to_mapping
from trace_jax.rl.run import RunConfig, label, read_run
from trace_jax.runs import RunFolder


def check_comparable(configs: Sequence[RunConfig], folders: Sequence[str]) -> None:
    """Raises ReportError if runs of one label differ in more than seed, name, folder and warm start."""
    first: dict[str, tuple[dict, str]] = {}
    for config, folder in zip(configs, folders, strict=True):
        settings = to_mapping(dataclasses.replace(config, seed=0, name="", root="", init_from=None))
        name = label(config.method, config.rl)
        other, where = first.setdefault(name, (settings, folder))
        different = [
            f"{section}.{key}" if isinstance(value, dict) else section
            for section, value in settings.items()
            for key in (value if isinstance(value, dict) else [section])
            if (value[key] != other[section].get(key) if isinstance(value, dict) else value != other[section])
        ]
        if different:
            raise ReportError(
                f"{folder} and {where} are both {name!r}, but differ in {', '.join(different)}; seeds of one method "
                "must be alike. Report them apart, or give the methods different names."
            )


@script
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--out", default="runs/report", help="folder of the report")
    parser.add_argument("--baseline", default="qat", help="method that ratios refer to")
    parser.add_argument("--yardstick", default="bf16", help="method whose own gap ratios refer to")
    arguments = parser.parse_args()
    configs, runs = zip(*(read_run(folder) for folder in arguments.runs), strict=True)
    check_comparable(configs, arguments.runs)
    table = write_report(
        group_by_method(runs),
        Path(arguments.out),
        baseline=arguments.baseline,
        yardstick=arguments.yardstick,
        notes={
            "command": shlex.join(["python", "-m", "experiments.report", *sys.argv[1:]]),
            "environments": {folder: RunFolder(Path(folder)).environments() for folder in arguments.runs},
        },
    )
    print(table)


if __name__ == "__main__":
    main()
