"""A target and what drafts for it."""

import re
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jax.sharding import Mesh

from pallas_kernels.cpu import unable_here
from specjax.base.notices import notice
from specjax.base.progress import counted, working
from specjax.checkpoints import ngram_files, quantized, self_drafts, skipped_layers
from specjax.checkpoints.acceptance import Acceptance, read_acceptance
from specjax.checkpoints.corpus_files import load_corpus
from specjax.checkpoints.feature_drafts import is_feature_draft, load_feature_draft
from specjax.checkpoints.files import Files, config_of, find
from specjax.checkpoints.load import (
    STAGES,
    check_activations_for,
    folder_of,
    load_draft,
    load_target,
    pool_in,
)
from specjax.checkpoints.mtp_layers import MTP_DRAFT, mtp_draft
from specjax.checkpoints.names import shipped_draft, shipped_for
from specjax.checkpoints.tokenizers import Vocabulary, compared, fitted, vocabulary_of
from specjax.draft.ngram import NGram
from specjax.draft.retrieval import Corpus
from specjax.models import memory
from specjax.models.config import ModelConfig
from specjax.models.quantized import quantized_as
from specjax.models.transformer import Model
from specjax.parallel.mesh import mesh_of, settled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


NO_DRAFT = "none"
"""What `--draft` calls no draft."""
_LAYERS = re.compile("[0-9]+(-[0-9]+)?")
_OWN = 4
"""Bits of the target as its own draft where none is named."""


class Pair(NamedTuple):
    """A target with its tokenizer, and what drafts for it.

    `table` is an n-gram model of the draft's output, `smaller` a draft for the draft, `corpus` is
    of texts that drafts are retrieved from. `files` are those of a target that may be its own draft
    in fewer bits, where none is named. `acceptance` is what the first draft's folder says of this
    target, `table_acceptance` what the n-gram model's.
    """

    target: Model
    tokenizer: "PreTrainedTokenizerFast"
    drafts: list[Model]
    table: NGram | None = None
    smaller: Model | None = None
    files: Files | None = None
    acceptance: Acceptance | None = None
    table_acceptance: Acceptance | None = None
    corpus: Corpus | None = None


@working("loading the model")
def load_pair(
    model: str = "bundled",
    draft: str | None = None,
    *,
    dtype: str | None = None,
    stage: str | None = None,
    mesh: Mesh | None = None,
    positions: int | None = None,
    offload: str | None = None,
    memory: int | None = None,
    lora: str | None = None,
    activations: str | None = None,
) -> Pair:
    """A target and what drafts for it.

    Args:
      model: the target; see `load`.
      draft: folders or hub ids of drafts, separated by commas; "self:4bit" and "self:8bit" are the
        target's own weights in so many bits (see `specjax.checkpoints.self_drafts`), "self:skip" is
        the target without some layers, which "self:skip=10-14,17" names (see `skipped_layers`),
        "self:mtp" is the target's layer of multi-token prediction (see `mtp_layers`), "none" is
        none, "bundled" and "smollm2" are those that come with the package. By default these for the
        targets of that name, self:4bit for any other that is offloaded where it fits into memory,
        and none for the rest.
      dtype: of the target's weights, "float32" or "bfloat16"; None takes float32 on a CPU and
        bfloat16 elsewhere. Matrices that files hold in bfloat16 stay so on a CPU, and multiply
        float32 (see `load_model`).
      stage: an n-gram folder, that of a smaller draft and files of texts that drafts are retrieved
        from (`.jsonl` or plain text), separated by commas; "bundled/ngram" and
        "bundled/stage2" are the bundled ones. By default those that come with the drafts.
      mesh: the devices to lie on.
      positions: see `load`.
      offload: of the target, see `load`; drafts are always in memory.
      memory: bytes for an offloaded target's weights.
      lora: a LoRA adapter for the target, see `load`; drafts are without it, but for the target's
        own weights.
      activations: of the target, see `load`.

    Returns:
      The pair.

    Raises:
      CheckpointError: a folder, a file or a tensor is missing or not supported.
      ValueError: a draft has another vocabulary than the target, this cannot be offloaded so, or
        activations cannot be so.
    """
    check_activations_for(activations, is_offloaded=(offload, memory) != (None, None))
    found = named(model, draft, stage, lora)
    target, tokenizer = load_target(
        found.target, dtype=dtype, mesh=mesh, positions=positions, offload=offload, memory=memory,
        activations=activations,
    )  # fmt: skip
    pair = Pair(target, tokenizer, [])
    if found.drafts or found.stages:
        pair = _with_drafts(pair, found, mesh)
    whole = quantized_as(target) is None and mesh_of(target) is None
    if draft is None and whole and not pair.drafts and target.is_whole:
        pair = pair._replace(files=found.target)
    own = found.own
    if target.is_offloaded and draft is None:
        own = own_by_default(found, target.config)
    for bits in own:
        with counted(f"the model in {bits} bits") as progress:
            drafts = [*pair.drafts, self_drafts.self_draft(found.target, target, bits, progress)]
        pair = pair._replace(drafts=drafts)
    for text in found.skips:
        pair = pair._replace(drafts=[*pair.drafts, _without_layers(pair, text)])
    if found.has_mtp:
        pair = pair._replace(drafts=[*pair.drafts, mtp_draft(found.target, target, mesh=mesh)])
    return pair


def _without_layers(pair: Pair, text: str) -> Model:
    """The target without the layers of a text, or without those that are found for it."""
    target = pair.target
    if text:
        return skipped_layers.without(
            target, skipped_layers.layers_of(text, target.config.num_layers)
        )
    skipped_layers.without(target, ())  # which says where that cannot be
    with counted("which layers to leave out"):
        skipped = skipped_layers.found_for(target, pair.tokenizer)
    notice(f"{skipped_layers.SKIP} leaves out layers {', '.join(map(str, skipped))}.")
    return skipped_layers.without(target, skipped)


_own_drafts: "weakref.WeakKeyDictionary[Model, dict[str, Model]]" = weakref.WeakKeyDictionary()


def own_drafts(pair: Pair) -> list[str]:
    """The drafts of the model itself that a pair without one can have here, at some gain.

    They are to take at most half of what memory there is; their products must be those of
    `cpu_matmul`, as XLA unpacks codes in every pass.
    """
    if pair.files is None or unable_here(1) is not None:
        return []
    spare, config = memory.available(None), pair.target.config
    return [
        name
        for name, bits in self_drafts.NAMES.items()
        if spare is None or self_drafts.self_bytes(config, bits) <= spare // 2
    ]


def with_own_draft(pair: Pair, name: str) -> Pair:
    """A pair that has drafts as it is, another with the model in fewer bits; made once.

    Raises:
      ValueError: the model cannot be its own draft.
    """
    if pair.drafts:
        return pair
    if pair.files is None:
        raise ValueError(
            f"the setting drafts with {name}, and the model is none of full weights on one device."
        )
    known = _own_drafts.setdefault(pair.target, {})
    if name not in known:
        bits = self_drafts.bits_of(name)
        with counted(f"the model in {bits} bits") as progress:
            known[name] = self_drafts.self_draft(pair.files, pair.target, bits, progress)
    return pair._replace(drafts=[known[name]])


class Named(NamedTuple):
    """The files that `--model`, `--draft` and `--stage` name.

    `own` are the bits of drafts that are the target itself, `skips` the layers of those without
    them, as text ("": those that are found); with `has_mtp` the target's layer of multi-token
    prediction drafts.
    """

    target: Files
    drafts: tuple[Files, ...]
    stages: tuple[Path, ...]
    own: tuple[int, ...] = ()
    skips: tuple[str, ...] = ()
    has_mtp: bool = False


def named(
    model: str = "bundled",
    draft: str | None = None,
    stage: str | None = None,
    lora: str | None = None,
) -> Named:
    """What the options name; without a draft, what comes with the package for the target, if any.

    Raises:
      CheckpointError: there is nothing of a name.
      ValueError: there is no such draft of the model itself.
    """
    shipped = shipped_for(model)
    has_own = shipped is not None and draft in (None, model)
    target, drafts, own, skips = find(model, lora), list[Files](), list[int](), list[str]()
    has_mtp = False
    for name in [model] if has_own else names_in("" if draft == NO_DRAFT else draft):
        if name.partition("=")[0] == skipped_layers.SKIP:
            skips.append(name.partition("=")[2])
        elif name == MTP_DRAFT:
            has_mtp = True
        elif name.startswith(self_drafts.PREFIX):
            own.append(self_drafts.bits_of(name))
        elif (folder := shipped_for(name)) is not None:
            if name == "bundled":
                config_of(folder / "target")  # an installation may lack the bundled pair
            drafts += map(Files, pool_in(folder / "drafts"))
        elif (folder := shipped_draft(name)) is not None:
            drafts.append(Files(folder))
        else:
            drafts.append(find(folder_of(name, "drafts")))
    stages = [folder_of(name) for name in names_in(stage)]
    if shipped is not None and has_own and stage is None:
        stages = [shipped / each for each in STAGES if (shipped / each).is_dir()]
    return Named(target, tuple(drafts), tuple(stages), tuple(own), tuple(skips), has_mtp)


def own_by_default(found: Named, config: ModelConfig) -> tuple[int, ...]:
    """Bits of a target as its own draft, where its layers are read in every pass and none is named.

    None where it is quantized, or would take more than half of what memory there is.
    """
    if found.drafts or found.skips or found.has_mtp or quantized.is_quantized(found.target.path):
        return ()
    spare = memory.available(None)
    return (_OWN,) if spare is None or self_drafts.self_bytes(config, _OWN) <= spare // 2 else ()


def _with_drafts(pair: Pair, found: Named, mesh: Mesh | None) -> Pair:
    """The pair with the drafts, the n-gram model and the smaller draft that are named."""
    target = vocabulary_of(found.target, pair.target.config)
    drafts = [
        _draft(target, files, f"draft {number}", mesh, pair.target)
        for number, files in enumerate(found.drafts)
    ]
    first = None if not found.drafts else _acceptance(pair.target, found.drafts[0].path)
    pair = pair._replace(drafts=drafts, acceptance=first)
    texts = [each for each in found.stages if each.is_file()]
    if texts:
        corpus = load_corpus(texts, pair.tokenizer, target.rows)
        pair = pair._replace(corpus=settled(corpus, mesh))
    for each in (each for each in found.stages if each not in texts):
        if ngram_files.is_ngram(each):
            table = ngram_files.load_ngram(each, target.rows)
            said = _acceptance(pair.target, each)
            pair = pair._replace(table=settled(table, mesh), table_acceptance=said)
        else:
            smaller = _draft(target, Files(each), "the smaller draft", mesh)
            pair = pair._replace(smaller=smaller)
    return pair


def _acceptance(target: Model, folder: Path) -> Acceptance | None:
    """What the folder of what drafts says of a target of that size."""
    known = read_acceptance(folder)
    is_it = known is not None and known.target_parameters == target.config.num_parameters
    return known if is_it else None


def _draft(
    target: Vocabulary, files: Files, name: str, mesh: Mesh | None, of: Model | None = None
) -> Model:
    """A draft whose tokens are those of the target; tables may have other numbers of rows.

    One that reads hidden states reads those `of` the target.

    Raises:
      ValueError: they are not, or it is the draft of another.
    """
    if is_feature_draft(files):
        if of is None:
            raise ValueError(f"{name} ({files.path}) reads hidden states of a target.")
        return load_feature_draft(files, of, mesh=mesh)
    model = load_draft(files, mesh=mesh)
    verdict = compared(target, vocabulary_of(files, model.config))
    if not verdict.same:
        raise ValueError(
            f"{name} ({files.path}) has another vocabulary than the model: "
            f"{verdict.reason}; see specjax check-pair."
        )
    return fitted(model, target.rows, verdict.known)


def names_in(text: str | None) -> list[str]:
    """Names between commas; those of layers that are left out are part of a name."""
    found: list[str] = []
    for name in filter(None, map(str.strip, (text or "").split(","))):
        if found and found[-1].startswith(f"{skipped_layers.SKIP}=") and _LAYERS.fullmatch(name):
            found[-1] += f",{name}"
        else:
            found.append(name)
    return found
