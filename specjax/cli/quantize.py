"""`specjax quantize`: a model's matrices in 8 or 4 bits, written as others read them."""

from functools import partial
from pathlib import Path

import jax

from specjax.base.progress import counted, working
from specjax.base.sampling import Sampling
from specjax.checkpoints.files import CheckpointError, find
from specjax.checkpoints.load import load
from specjax.checkpoints.quantizing import Quantized, quantize_folder
from specjax.cli.options import Quantize
from specjax.decoding.generate import generate
from specjax.measure import prompts
from specjax.models.memory import readable

_OWN = "self"
"""The calibration with what the model writes."""
_ROWS, _TOKENS = 24, 512
"""How many texts it writes, and tokens of each, as far as its context goes."""


def quantize(options: Quantize) -> int:
    """Runs `specjax quantize`; gives the exit code.

    Raises:
      CheckpointError: the model is missing, damaged, quantized already or not of a family whose
        matrices can be, or a model is written there already.
      ValueError: there are no such bits or texts, or groups do not divide a matrix.
      OSError: the texts cannot be read.
    """
    files, out = find(options.model), Path(options.out)
    texts = (
        None if options.calibration is None else partial(_texts, options.model, options.calibration)
    )
    with counted("quantize") as progress:
        done = quantize_folder(
            files, out, options.bits, options.group, progress, options.kept, texts, options.table
        )
    print(f"wrote {out}: {_told(done)}")
    return 0


def _texts(model: str, calibration: str) -> list[str]:
    """The texts of a file, or the model's own."""
    if calibration != _OWN:
        return [text for _, text in prompts.read(calibration)]
    with working("quantize: the model writes texts"):
        return _own_texts(model)


def _own_texts(name: str) -> list[str]:
    """What a model writes from its start token on, at temperature 1 (arXiv 2305.17888).

    Raises:
      CheckpointError: it cannot be loaded, or nothing says with which token texts start.
    """
    model, tokenizer = load(name, dtype="float32")
    starts = [tokenizer.bos_token_id, *model.config.eos_ids]
    start = next((token for token in starts if token is not None), None)
    if start is None:
        raise CheckpointError(
            f"{name} names no start or end token from which the model could write texts; "
            "give --calibration a file of them."
        )
    made = generate(
        jax.random.key(0), model, None, [[start]] * _ROWS,
        max_new_tokens=min(_TOKENS, model.config.max_positions) - 1,
        sampling=Sampling(temperature=1.0), stop_at_eos=False,
    )  # fmt: skip
    rows = made.tokens.tolist()
    return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in rows]


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
