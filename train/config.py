"""What a training run is: a frozen recipe, of which a file in `configs/` states one."""

import dataclasses
import difflib
import importlib.util
from pathlib import Path
from typing import Any

from specjax.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Length and step sizes of one optimisation.

    `length` tokens a sequence, `batch` sequences a step; the last `long_steps` steps use
    sequences of `long_length` at the same tokens a step. The rate warms up linearly, stays, and
    falls linearly to zero over the last `decay_steps`. `matrix_rate` is Muon's, for matrices
    inside the layers; `other_rate` is AdamW's, for embeddings and norms.
    """

    steps: int
    batch: int
    length: int
    long_steps: int = 0
    long_length: int = 0
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
class Corpus:
    """The Python standard library of the running interpreter, split by top-level module.

    Of every `slices` modules about one is held out and one is for development; modules in
    `exclude` are left out. `test_share` of a batch's sequences come from the library's own tests.
    `max_files` bounds the files of each split, tests apart (0: all).
    """

    slices: int = 20
    test_share: float = 0.25
    exclude: tuple[str, ...] = ("encodings", "pydoc_data", "lib2to3", "site-packages")
    max_files: int = 0


@dataclasses.dataclass(frozen=True)
class Collect:
    """The target's own continuations: `prompts` prompts of `prompt_tokens`, `new_tokens` each.

    Rows cycle through `temperatures`; `batch` rows are generated at a time, and `prompts` is
    rounded up to whole batches.
    """

    prompts: int = 3072
    prompt_tokens: int = 64
    new_tokens: int = 128
    batch: int = 64
    temperatures: tuple[float, ...] = (0.0, 0.8, 1.0)
    seed: int = 1


@dataclasses.dataclass(frozen=True)
class Labels:
    """The target's law after every token, kept as its `top_k` probabilities.

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

    A step holds `schedule.batch` collected rows and `corpus_rows` corpus rows. `hard` is the
    share of cross-entropy on the row's own next token in the loss; the rest is forward KL.
    """

    corpus_rows: int = 1
    hard: float = 0.0


@dataclasses.dataclass(frozen=True)
class Boost:
    """Collective boost-tuning of a pool (SpecInfer, arXiv 2305.09781, section 3).

    A sample is a context and the target's next `window` tokens. Draft 0 learns from all; each
    later one from the samples on which no earlier draft gives all `window` tokens. `keep` is the
    share of marked samples a later draft still sees (0: as published).
    """

    drafts: int = 3
    window: int = 4
    keep: float = 0.0


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Held-out estimates: continuations of development prompts, measured for chains of `depth`.

    `temperatures` must hold 0 and one temperature at which rows are sampled.
    """

    prompts: int = 128
    prompt_tokens: int = 64
    new_tokens: int = 128
    batch: int = 64
    temperatures: tuple[float, ...] = (0.0, 0.8)
    depth: int = 8
    seed: int = 3


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything a run needs; equal recipes on equal machines give equal weights."""

    name: str
    target: ModelConfig
    draft: ModelConfig
    corpus: Corpus
    pretrain: Schedule
    warm: Schedule
    collect: Collect
    labels: Labels
    schedule: Schedule
    distil: Distil
    boost: Boost
    evaluation: Evaluation


def load_recipe(path: str, overrides: tuple[str, ...] = ()) -> Recipe:
    """The `RECIPE` of the Python file `path`, with `group.field=value` overrides applied.

    Raises:
      ValueError: the file has no recipe, or an override names nothing (the nearest is named).
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"there is no configuration file {path!r}.")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    recipe = getattr(module, "RECIPE", None)
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{path} defines no RECIPE of type train.config.Recipe.")
    for override in overrides:
        recipe = _override(recipe, override)
    return recipe


def _override(recipe: Recipe, text: str) -> Recipe:
    name, equals, value = text.partition("=")
    group, dot, field = name.partition(".")
    known = {
        f"{g.name}.{f.name}": f
        for g in dataclasses.fields(recipe)
        if dataclasses.is_dataclass(getattr(recipe, g.name))
        for f in dataclasses.fields(getattr(recipe, g.name))
    }
    if not (equals and dot and name in known):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise ValueError(f"no setting {text!r}; write group.field=value, for example {near}=...")
    part = getattr(recipe, group)
    try:
        parsed = _parse(getattr(part, field), value)
    except ValueError:
        kind = type(getattr(part, field)).__name__
        raise ValueError(f"{name} is {value!r}; it must be of type {kind}.") from None
    return dataclasses.replace(recipe, **{group: dataclasses.replace(part, **{field: parsed})})


def _parse(current: Any, value: str) -> Any:
    if isinstance(current, bool):
        return value.lower() in ("1", "true", "yes")
    if isinstance(current, tuple):
        kind: type = type(current[0]) if current else str
        return tuple(kind(item) for item in value.split(",") if item)
    return type(current)(value)
