"""Table and figures from run folders.

    python -m experiments.report runs/demo/bf16_0 runs/demo/qat_0 --out runs/report

Runs of one method are seeds of it. Writes `summary.json`, `summary.md` and `figures/*.png`.
"""

import argparse
from pathlib import Path

from experiments.common import script
from trace_jax.alignment.comparison import group_by_method, write_report
from trace_jax.rl.run import read_run


@script
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--out", default="runs/report", help="folder of the report")
    parser.add_argument("--baseline", default="qat", help="method that ratios refer to")
    parser.add_argument("--yardstick", default="bf16", help="method whose own gap ratios refer to")
    arguments = parser.parse_args()
    runs = [read_run(folder)[1] for folder in arguments.runs]
    table = write_report(
        group_by_method(runs),
        Path(arguments.out),
        baseline=arguments.baseline,
        yardstick=arguments.yardstick,
    )
    print(table)


if __name__ == "__main__":
    main()
