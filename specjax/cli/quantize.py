"""`specjax quantize`: a model's matrices in 8 or 4 bits, written as others read them."""

from pathlib import Path

from specjax.base.progress import counted
from specjax.checkpoints.files import find
from specjax.checkpoints.quantizing import Quantized, quantize_folder
from specjax.cli.options import Quantize
from specjax.measure import prompts
from specjax.models.memory import readable


def quantize(options: Quantize) -> int:
    """Runs `specjax quantize`; gives the exit code.

    Raises:
      CheckpointError: the model is missing, damaged, quantized already or not of a family whose
        matrices can be, or a model is written there already.
      ValueError: there are no such bits or texts, or groups do not divide a matrix.
      OSError: the texts cannot be read.
    """
    files, out = find(options.model), Path(options.out)
    texts: list[str] = []
    if options.calibration is not None:
        texts = [text for _, text in prompts.read(options.calibration)]
    with counted("quantize") as told:
        done = quantize_folder(
            files, out, options.bits, options.group, told, options.kept, texts, options.table
        )
    print(f"wrote {out}: {_told(done)}")
    return 0


def _told(done: Quantized) -> str:
    """What was written, how large it is, and what stays as it is."""
    lines = [f"{done.matrices} matrices in {done.name}, {readable(done.size)} of "
             f"{readable(done.before)} (plain bfloat16 is {readable(done.plain)})."]  # fmt: skip
    if done.kept:
        named = ", ".join(f"{count} {name}" for name, count in done.kept.items())
        lines.append(f"In 8 bits, as 4 cost these most: {named}.")
    if done.tokens:
        lines.append(f"Calibrated with {done.tokens:,} tokens.")
    whole, eight = readable(done.outside), readable(done.packed_outside)
    if done.table:
        lines.append(f"Embeddings in 8 bits, a scale for each row, and norms: {eight} of {whole}.")
    else:
        lines.append(f"Embeddings and final norms stay as they are: {whole}.")
        if done.packed_outside < done.outside:
            lines[-1] += f" With --table 8 they take {eight}."
    return "\n".join(lines)
