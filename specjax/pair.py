"""A target and what drafts for it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jax.sharding import Mesh

from specjax import checkpoint, folder, ngram_folder, vocabulary
from specjax.draft.ngram import NGram
from specjax.folder import Files, config_of, find
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
    found = named(model, draft, stage)
    target = checkpoint.load_model(found.target, dtype, mesh, positions)
    tokenizer = vocabulary.tokenizer_of(found.target.folder)
    drafts = [
        _draft(target, found.target, files, f"draft {number}", mesh)
        for number, files in enumerate(found.drafts)
    ]
    return _with_stages(Pair(target, tokenizer, drafts), found, mesh)


class Named(NamedTuple):
    """The files that `--model`, `--draft` and `--stage` name."""

    target: Files
    drafts: tuple[Files, ...]
    stages: tuple[Path, ...]


def named(model: str = "bundled", draft: str | None = None, stage: str | None = None) -> Named:
    """What the options name: with the bundled target what is bundled, with any other nothing.

    Raises:
      CheckpointError: there is nothing of a name.
    """
    bundled = model == "bundled" and draft in (None, "bundled")
    target, drafts = find(model), []
    for name in ["bundled"] if bundled else names_in(draft):
        if name == "bundled":
            config_of(folder.BUNDLED / "target")  # an installation may lack the bundled pair
            drafts += map(Files, checkpoint.pool_in(folder.BUNDLED / "drafts"))
        else:
            drafts.append(find(checkpoint.folder_of(name, "drafts")))
    stages = [checkpoint.folder_of(name) for name in names_in(stage)]
    if bundled and stage is None:
        stages = [each for each in checkpoint.BUNDLED_STAGES if each.is_dir()]
    return Named(target, tuple(drafts), tuple(stages))


def _draft(target: Model, of: Files, files: Files, name: str, mesh: Mesh | None) -> Model:
    """A draft whose tokens are those of the target; tables may have other numbers of rows.

    Raises:
      ValueError: they are not.
    """
    model = checkpoint.load_model(files, None, mesh, split=False)
    verdict = vocabulary.compared(of, target.config, files, model.config)
    if not verdict.same:
        raise ValueError(
            f"{name} ({files.folder}) has another vocabulary than the model: "
            f"{verdict.said}; see specjax check-pair."
        )
    return vocabulary.fitted(model, target.config.vocab_size, verdict.known)


def _with_stages(pair: Pair, found: Named, mesh: Mesh | None) -> Pair:
    """The pair with the n-gram model and the smaller draft that are named."""
    for each in found.stages:
        if ngram_folder.is_ngram(each):
            table = ngram_folder.load_ngram(each, pair.target.config.vocab_size)
            pair = pair._replace(table=settled(table, mesh))
        else:
            smaller = _draft(pair.target, found.target, Files(each), "the smaller draft", mesh)
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
