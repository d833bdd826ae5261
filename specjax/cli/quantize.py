"""`specjax quantize`: a model's matrices in 8 or 4 bits, written as others read them."""

from pathlib import Path

from specjax.base.progress import counted
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
    files, out = find(options.model), Path(options.out)
    with counted("quantize") as told:
        done = quantize_folder(files, out, options.bits, options.group, told)
    sizes = f"{readable(done.size)} of {readable(done.before)}"
    print(f"wrote {out}: {done.matrices} matrices in {done.name}, {sizes}.")
    return 0
