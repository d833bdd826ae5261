"""A command of `specjax` with other kernels than those of the dispatcher's own table.

    python -m tests.accelerator.dispatched rows.json roofline --shapes llama-3.2-1b
    python -m tests.accelerator.dispatched triton verify

Either what was the fastest in the rows of `pallas_kernels.bench`, as after its `--write`, or one
implementation wherever it can run.
"""

import json
import sys
from pathlib import Path

from pallas_kernels import bench
from pallas_kernels.tree_attention import tuning
from specjax.cli.main import main


def choose(kernels: str) -> None:
    """Lets the dispatcher go by a file of rows, or take one implementation."""
    if not kernels.endswith(".json"):
        tuning.choice = lambda at: kernels
        return
    rows = json.loads(Path(kernels).read_text("utf-8"))["rows"]
    table = {tuning.device(): bench.fastest(rows)}
    tuning.measured = lambda: table


if __name__ == "__main__":
    choose(sys.argv[1])
    raise SystemExit(main(sys.argv[2:]))
