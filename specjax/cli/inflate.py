"""`specjax inflate`: a model grown to a size that nobody trained, written layer by layer."""

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from specjax.checkpoints.files import find
from specjax.checkpoints.inflating import inflate_folder
from specjax.cli.options import Inflate
from specjax.cli.values import check_seed, count_of
from specjax.models.memory import readable


def inflate(options: Inflate) -> int:
    """Runs `specjax inflate`; gives the exit code.

    Raises:
      CheckpointError: the model is missing or damaged, or one is written there already.
      ValueError: an option is wrong, or the model cannot be grown so.
    """
    check_seed(options.seed)
    parameters, files = count_of(options.parameters), find(options.model)
    shown = Progress(console=Console(stderr=True), disable=not sys.stderr.isatty())
    with shown as progress:
        task = progress.add_task("inflate", total=None)
        done = inflate_folder(
            files, Path(options.out), parameters, options.seed,
            told=lambda count, of: progress.update(task, completed=count, total=of),
        )  # fmt: skip
    print(
        f"wrote {options.out}: {done.parameters:,} parameters in {done.layers} layers, bfloat16, "
        f"{readable(done.size)}."
    )
    return 0
