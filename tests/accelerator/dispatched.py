"""A command of `specjax` with what was the fastest in rows of `pallas_kernels.bench`.

    python -m tests.accelerator.dispatched rows.json roofline --shapes llama-3.2-1b

They are taken for the dispatcher's own table, as after `--write`; shapes that are far from all of
them are measured as they are met.
"""

import json
import sys
from pathlib import Path

from pallas_kernels import bench
from pallas_kernels.tree_attention import tuning
from specjax.cli.main import main


def choose(file: str) -> None:
    """Lets the dispatcher go by a file of rows."""
    rows = json.loads(Path(file).read_text("utf-8"))["rows"]
    table = {tuning.device(): bench.fastest(rows)}
    tuning.measured = lambda: table


if __name__ == "__main__":
    choose(sys.argv[1])
    raise SystemExit(main(sys.argv[2:]))
