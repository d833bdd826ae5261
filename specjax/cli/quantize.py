"""`specjax quantize`: a model's matrices in 8 or 4 bits, written as others read them."""

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from specjax.checkpoints.files import find
from specjax.checkpoints.quantizing import quantize_folder
from specjax.cli.options import Quantize
from specjax.models.memory import readable


def quantize(options: Quantize) -> int:
    """Runs `specjax quantize`; gives the exit code.

    Raises:
      CheckpointError: the model is missing, damaged, quantized already or not of a family whose
        matrices can be, or a model is written there already.
      ValueError: there are no such bits, or groups do not divide a matrix.
    """
    files = find(options.model)
    shown = Progress(console=Console(stderr=True), disable=not sys.stderr.isatty())
    with shown as progress:
        task = progress.add_task("quantize", total=None)
        done = quantize_folder(
            files, Path(options.out), options.bits, options.group,
            told=lambda count, of: progress.update(task, completed=count, total=of),
        )  # fmt: skip
    print(
        f"wrote {options.out}: {done.matrices} matrices in {done.name}, "
        f"{readable(done.size)} of {readable(done.before)}."
    )
    return 0
