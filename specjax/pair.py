"""A target and what drafts for it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jax.sharding import Mesh

from specjax import checkpoint, ngram_folder
from specjax.draft.ngram import NGram
from specjax.model import Model
from specjax.sharding import settled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Pair(NamedTuple):
    """A target with its tokenizer, and what drafts for it.

    `table` is an n-gram model of the draft's output, `smaller` a draft for the draft.
    """

    target: Model
    tokenizer: "PreTrainedTokenizerFast"
    drafts: list[Model]
    table: NGram | None = None
    smaller: Model | None = None


def load_pair(
    model: str = "bundled",
    draft: str | None = None,
    dtype: str | None = None,
    stage: str | None = None,
    mesh: Mesh | None = None,
    positions: int | None = None,
) -> Pair:
    """The target and drafts that `--model`, `--draft` and `--stage` name, on a mesh if given one.

    Draft folders are separated by commas, as are an n-gram folder and that of a smaller draft
    (bundled/ngram and bundled/stage2 are the bundled ones). Without them the bundled target comes
    with what is bundled, and any other with none.

    Raises:
      CheckpointError: a folder, a file or a tensor is missing or not supported.
      ValueError: a draft has another vocabulary than the target.
    """
    target, tokenizer = checkpoint.load(model, dtype, mesh, positions)
    bundled = model == "bundled" and draft in (None, "bundled")
    drafts = [] if draft is None and not bundled else checkpoint.load_drafts(
        "bundled" if bundled or draft == "bundled" else names_in(draft), None, mesh)  # fmt: skip
    check_vocabularies(target, drafts)
    folders = [checkpoint.folder_of(name) for name in names_in(stage)]
    if bundled and stage is None:
        folders = [folder for folder in checkpoint.BUNDLED_STAGES if folder.is_dir()]
    return _with_stages(Pair(target, tokenizer, drafts), folders, mesh)


def _with_stages(pair: Pair, folders: Sequence[Path], mesh: Mesh | None) -> Pair:
    """The pair with the n-gram model and the smaller draft of some folders."""
    for folder in folders:
        if ngram_folder.is_ngram(folder):
            table = ngram_folder.load_ngram(folder, pair.target.config.vocab_size)
            pair = pair._replace(table=settled(table, mesh))
        else:
            smaller = checkpoint.load_model(folder, mesh=mesh, split=False)
            check_vocabularies(pair.target, [smaller])
            pair = pair._replace(smaller=smaller)
    return pair


def names_in(text: str | None) -> list[str]:
    """Names between commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def check_vocabularies(target: Model, drafts: Sequence[Model]) -> None:
    """Checks that all drafts have the target's vocabulary.

    Raises:
      ValueError: one has not.
    """
    for number, one in enumerate(drafts):
        if one.config.vocab_size != target.config.vocab_size:
            raise ValueError(
                f"draft {number} has a vocabulary of {one.config.vocab_size} tokens and the model "
                f"one of {target.config.vocab_size}; they must be the same."
            )
