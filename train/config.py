"""What a training run is: a frozen recipe, of which a file in `configs/` states one."""

import dataclasses
import difflib
import importlib.util
from pathlib import Path
from typing import Any, get_args, get_origin

from specjax.checkpoints.feature_drafts import config_for, layers_read
from specjax.checkpoints.files import Files, find
from specjax.checkpoints.names import shipped_draft
from specjax.models.config import Features, ModelConfig
from specjax.models.families.eagle import EAGLE3

TABLES = ("coverage", "width", "rules", "equal_nodes", "equal_time")
"""What `train.evaluate` measures."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Length and step sizes of one optimisation, `batch` sequences a step.

    The rate warms up linearly, stays, and falls linearly to zero over the last `decay_steps`.
    `matrix_rate` is Muon's, for matrices inside the layers; `other_rate` is AdamW's, for
    embeddings and norms. `dtype` is that of the matrix products.
    """

    steps: int
    batch: int
    warmup_steps: int = 20
    decay_steps: int = 0
    matrix_rate: float = 0.02
    other_rate: float = 3e-3
    weight_decay: float = 0.0
    dtype: str = "bfloat16"
    seed: int = 0
    save_every: int = 100
    evaluate_every: int = 100


@dataclasses.dataclass(frozen=True)
class Reading(Schedule):
    """A schedule over sequences of `length` corpus tokens.

    The last `long_steps` steps use sequences of `long_length` at the same tokens a step.
    """

    length: int = 512
    long_steps: int = 0
    long_length: int = 0


@dataclasses.dataclass(frozen=True)
class Head:
    """Drafts that read hidden states of their target, as EAGLE-3's heads do (arXiv 2503.01840).

    A head learns at so many `levels` (section 3.2, training-time test): at the first it reads the
    target's hidden states, at each later one what it made itself at the one before, and that weighs
    `decay` times as much. 0 levels: drafts are models of their own. `layers` are the hidden states,
    by the number of the target's layers before them (none: those that EAGLE-3 reads). With
    `from_target` a head begins as what of its target has its shapes (see `train.heads.begun`).

    `start` is the folder or the name of a head to fine-tune. Its shape, the hidden states that it
    reads and the tokens that it knows are then those of every head, and `draft`, `layers`,
    `vocabulary` and `from_target` say nothing.
    """

    levels: int = 0
    decay: float = 0.8
    layers: tuple[int, ...] = ()
    from_target: bool = True
    start: str = ""


@dataclasses.dataclass(frozen=True)
class Size:
    """A model's shape, apart from what drafts share with their target."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def beside(self, target: ModelConfig) -> ModelConfig:
        """The configuration of a draft of this size for `target`: its vocabulary, its context."""
        return ModelConfig(
            vocab_size=target.vocab_size,
            max_positions=target.max_positions,
            eos_ids=target.eos_ids,
            **dataclasses.asdict(self),
        )

    def reading(self, target: ModelConfig, layers: tuple[int, ...], known: int) -> ModelConfig:
        """The configuration of a head of this size that knows `known` tokens of `target`'s (0: all
        of them).
        """
        return dataclasses.replace(
            self.beside(target),
            family=EAGLE3.model_type,
            eos_ids=(),
            tie_embeddings=False,
            rope_theta=target.rope_theta,
            features=Features(layers, target.hidden_size),
            draft_vocab_size=known or None,
        )


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The user's `files`; without any, the standard library of the running interpreter.

    Files are plain text, folders of source code, or `.jsonl` with a `text`, a `prompt`
    or `turns` a line.
    Of every `slices` documents (top-level modules of the library) about one is held out and one
    is for development. The rest concerns the library alone: modules in `exclude` are left out,
    `test_share` of a batch's sequences come from its own tests, and `max_files` bounds the files
    of each split, tests apart (0: all).
    """

    files: tuple[str, ...] = ()
    slices: int = 20
    test_share: float = 0.25
    exclude: tuple[str, ...] = ("encodings", "pydoc_data", "lib2to3", "site-packages")
    max_files: int = 0


@dataclasses.dataclass(frozen=True)
class Collect:
    """The target's own continuations: `prompts` prompts of `prompt_tokens`, `new_tokens` each.

    Rows cycle through `temperatures`; `batch` rows are generated at a time, and `prompts` is
    rounded up to whole batches. With `rows` they are those of an engine, which begins the next text
    where one has ended; a batch is then what is written to disk at once. `dtype` is that of the
    target's weights. More `prompts` later go on from what there is.

    With `chat` the corpus' prompts are messages of a user, in the target's chat template; those
    that have more than `prompt_tokens` with it are left out.
    """

    prompts: int = 3072
    prompt_tokens: int = 64
    new_tokens: int = 128
    batch: int = 64
    temperatures: tuple[float, ...] = (0.0, 0.8, 1.0)
    seed: int = 1
    rows: int = 0
    dtype: str = "float32"
    chat: bool = False


@dataclasses.dataclass(frozen=True)
class Turns:
    """Prompts that a chat model writes itself, in place of the corpus': its own user turns.

    They have at most `tokens` tokens (0: none are written, and prompts come from the corpus), are
    sampled at each of `temperatures` in turn, `batch` at a time in the rows of `collect.rows`, and
    become as many as are collected. The first `free` batches begin as the target likes, the others
    with `beginnings` in turn (none: all are free): what a model asks by itself is of few kinds.
    """

    tokens: int = 0
    free: int = 0
    beginnings: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (1.0,)
    batch: int = 256
    seed: int = 4


@dataclasses.dataclass(frozen=True)
class Labels:
    """The target's distribution after every token, kept as its `top_k` probabilities.

    It is kept for all collected rows and for `corpus_rows` rows of `corpus_length` corpus tokens,
    about `tokens` tokens at a time. `dtype` is that of the target's matrix products.
    """

    top_k: int = 32
    corpus_rows: int = 256
    corpus_length: int = 1024
    tokens: int = 8192
    dtype: str = "bfloat16"
    seed: int = 2


@dataclasses.dataclass(frozen=True)
class Distil:
    """What a distillation step learns from.

    A step holds `schedule.batch` collected rows and `corpus_rows` corpus rows. `loss` is one of
    `train.loss.LOSSES` (DistillSpec, arXiv 2310.08461, compares them).
    """

    corpus_rows: int = 1
    loss: str = "forward_kl"


@dataclasses.dataclass(frozen=True)
class Boost:
    """Collective boost-tuning of a pool (SpecInfer, arXiv 2305.09781, section 3).

    Draft 0 learns from all samples; `rule`, one of `train.marking.RULES`, says what each later
    one learns from, given the earlier ones. A sample is a context and the target's next `window`
    tokens. `keep` is the weight of what a rule would drop (0: dropped, as published). `cover` is
    how many of a draft's most likely tokens a node has as children where a rule asks whether a
    tree covers the target's token. `strength` scales the soft rules. `elsewhere` is the weight,
    for later drafts, of what no rule weighs: prompts and corpus rows. `own_start` gives every
    draft a warm-up of its own. `sizes` replaces the recipe's draft size, a member each.
    """

    drafts: int = 3
    rule: str = "samples"
    window: int = 4
    keep: float = 0.0
    cover: int = 2
    strength: float = 1.0
    elsewhere: float = 1.0
    own_start: bool = False
    sizes: tuple[Size, ...] = ()


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Estimates while training: continuations of development prompts, for chains of `depth`.

    `temperatures` must hold 0 and one temperature at which rows are sampled. `tables` are those
    of `train.evaluate` that end a run.
    """

    prompts: int = 128
    prompt_tokens: int = 64
    new_tokens: int = 128
    batch: int = 64
    temperatures: tuple[float, ...] = (0.0, 0.8)
    depth: int = 8
    seed: int = 3
    tables: tuple[str, ...] = TABLES


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokens that drafts know: the `size` of them that the target takes most often in what is
    collected (0: all).
    """

    size: int = 0


@dataclasses.dataclass(frozen=True)
class Trigrams:
    """A trigram model of what the target says, to draft for it (arXiv 2308.04623).

    It holds the `width` likeliest successors of every token and of `contexts` pairs of tokens;
    0 contexts: none is made.
    """

    contexts: int = 0
    width: int = 8


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything a run needs; equal recipes on equal machines give equal weights.

    `target` is the shape of a target to train, or the folder of one that exists.
    """

    name: str
    target: ModelConfig | str
    draft: Size
    corpus: Corpus
    pretrain: Reading
    warm: Reading
    collect: Collect
    labels: Labels
    schedule: Schedule
    distil: Distil
    boost: Boost
    evaluation: Evaluation
    trigrams: Trigrams = Trigrams()
    turns: Turns = Turns()
    vocabulary: Vocabulary = Vocabulary()
    head: Head = Head()

    def size_of(self, member: int) -> Size:
        """The size of a member of the pool."""
        return self.boost.sizes[member] if self.boost.sizes else self.draft

    def layers_read(self, target: ModelConfig) -> tuple[int, ...]:
        """The hidden states of the target that heads read."""
        if self.head.start:
            read = config_for(self.started_from, target).features
            assert read is not None
            return read.layers
        return self.head.layers or layers_read(target.num_layers)

    @property
    def started_from(self) -> Files:
        """The head to fine-tune."""
        shipped = shipped_draft(self.head.start)
        return find(self.head.start) if shipped is None else Files(shipped)

    def config_of(self, member: int, target: ModelConfig) -> ModelConfig:
        """The configuration of a member of the pool, which may know fewer tokens while it is
        trained.
        """
        size = self.size_of(member)
        if not self.head.levels:
            return size.beside(target)
        if self.head.start:
            return config_for(self.started_from, target)
        return size.reading(target, self.layers_read(target), self.vocabulary.size)


def load_recipe(path: str, overrides: tuple[str, ...] = ()) -> Recipe:
    """The `RECIPE` of the Python file `path`, with overrides applied.

    An override is `group.field=value`, `target=FOLDER`, or `corpus=FILES`: names with commas
    between them, or as further overrides that follow it.

    Raises:
      ValueError: the file has no recipe, or an override names nothing (the nearest is named).
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"there is no configuration file {path!r}.")
    if file.suffix != ".py":
        raise ValueError(f"{path} is no Python file, so it defines no RECIPE.")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    recipe = getattr(module, "RECIPE", None)
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{path} defines no RECIPE of type train.config.Recipe.")
    for override in _joined(overrides):
        recipe = _override(recipe, override)
    if "" in recipe.corpus.files:
        raise ValueError(f"{path} needs a corpus: write corpus=FILES, texts or prompts.")
    if recipe.target == "":
        raise ValueError(f"{path} needs a target: write target=FOLDER, a Hugging Face folder.")
    return recipe


def _joined(overrides: tuple[str, ...]) -> list[str]:
    """Overrides, with the files that follow `corpus=` put behind it."""
    joined: list[str] = []
    for text in overrides:
        if "=" not in text and joined and joined[-1].startswith("corpus="):
            joined[-1] += f",{text}"
        else:
            joined.append(text)
    return joined


def _override(recipe: Recipe, text: str) -> Recipe:
    name, equals, value = text.partition("=")
    if equals and name == "target":
        return dataclasses.replace(recipe, target=value)
    if equals and name == "corpus":
        name = "corpus.files"
        if not value.strip(","):
            raise ValueError("corpus= names no file; write corpus=FILES, or leave it out.")
    group, dot, field = name.partition(".")
    known = {
        f"{g.name}.{f.name}": f
        for g in dataclasses.fields(recipe)
        if dataclasses.is_dataclass(getattr(recipe, g.name))
        for f in dataclasses.fields(getattr(recipe, g.name))
        if f.name != "sizes"
    }
    if not (equals and dot and name in known):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise ValueError(f"no setting {text!r}; write group.field=value, for example {near}=...")
    part = getattr(recipe, group)
    try:
        parsed = _parse(known[name].type, value)
    except ValueError:
        kind = type(getattr(part, field)).__name__
        raise ValueError(f"{name} is {value!r}; it must be of type {kind}.") from None
    return dataclasses.replace(recipe, **{group: dataclasses.replace(part, **{field: parsed})})


def _parse(kind: Any, value: str) -> Any:
    """A setting of a field's type, `tuple[int, ...]` for example."""
    if kind is bool:
        known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if value.lower() not in known:
            raise ValueError(value)
        return known[value.lower()]
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return tuple(item(each) for each in value.split(",") if each)
    return kind(value)
