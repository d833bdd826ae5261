"""What makes a recipe impossible, found before hours were spent on it."""

import dataclasses
import math
from typing import Any

from specjax.models.config import ModelConfig
from train.config import TABLES, Recipe, Schedule
from train.documents import SPLITS
from train.heldout import TOP
from train.loss import HARD, LOSSES
from train.marking import NAMES, RESIDUAL

DTYPES = ("float32", "bfloat16")

_LOWEST: dict[str, dict[str, int]] = {
    "corpus": {"slices": len(SPLITS), "max_files": 0},
    "pretrain": {"length": 1, "long_steps": 0},
    "warm": {"length": 1, "long_steps": 0},
    "collect": {
        "prompts": 1,
        "prompt_tokens": 1,
        "new_tokens": 1,
        "batch": 1,
        "seed": 0,
        "rows": 0,
    },
    "labels": {"top_k": 1, "corpus_rows": 0, "corpus_length": 2, "tokens": 1, "seed": 0},
    "distil": {"corpus_rows": 0},
    "boost": {"drafts": 1, "window": 1, "cover": 1},
    "evaluation": {
        "prompts": 1,
        "prompt_tokens": 1,
        "new_tokens": 1,
        "batch": 1,
        "depth": 1,
        "seed": 0,
    },
    "trigrams": {"contexts": 0, "width": 1},
    "turns": {"tokens": 0, "free": 0, "batch": 1, "seed": 0},
    "vocabulary": {"size": 0},
    "head": {"levels": 0},
}
_SHARES = ("corpus.test_share", "boost.keep", "head.decay")
_SCALES = ("boost.strength", "boost.elsewhere")
_RATES = ("matrix_rate", "other_rate", "weight_decay")
_OF_SCHEDULES = {"steps": 0, "batch": 1, "warmup_steps": 0, "decay_steps": 0, "save_every": 1,
                 "evaluate_every": 1, "seed": 0}  # fmt: skip


def check(recipe: Recipe) -> None:
    """Checks all that can be checked without data.

    Raises:
      ValueError: a setting is out of its range, unknown, or does not go with another.
    """
    for group in dataclasses.fields(recipe):
        part = getattr(recipe, group.name)
        lowest = _LOWEST.get(group.name, {})
        if isinstance(part, Schedule):
            lowest = lowest | _OF_SCHEDULES
            _schedule(group.name, part)
        for name, least in lowest.items():
            if getattr(part, name) < least:
                value = getattr(part, name)
                raise ValueError(f"{group.name}.{name} is {value}; it must be at least {least}.")
    _numbers(recipe)
    _names(recipe)
    _pool(recipe)
    if isinstance(recipe.target, ModelConfig):
        check_for(recipe, recipe.target)


def _schedule(name: str, schedule: Schedule) -> None:
    busy = schedule.warmup_steps + schedule.decay_steps
    if schedule.steps and busy > schedule.steps:
        raise ValueError(
            f"{name}.warmup_steps and {name}.decay_steps are {busy} together; "
            f"{name}.steps is {schedule.steps}."
        )
    _one_of(f"{name}.dtype", schedule.dtype, DTYPES)
    if getattr(schedule, "long_steps", 0) and getattr(schedule, "long_length", 0) < 1:
        raise ValueError(f"{name}.long_steps need a {name}.long_length of at least 1.")


def _numbers(recipe: Recipe) -> None:
    schedules = ("pretrain", "warm", "schedule")
    rates = [f"{schedule}.{rate}" for schedule in schedules for rate in _RATES]
    for name in (*_SHARES, *_SCALES, *rates):
        group, field = name.split(".")
        value, most = getattr(getattr(recipe, group), field), 1.0 if name in _SHARES else math.inf
        if not 0 <= value <= most or math.isinf(value):
            limit = "between 0 and 1" if name in _SHARES else "a number of at least 0"
            raise ValueError(f"{name} is {value}; it must be {limit}.")


def _names(recipe: Recipe) -> None:
    for table in recipe.evaluation.tables:
        _one_of("evaluation.tables", table, TABLES)
    _one_of("labels.dtype", recipe.labels.dtype, DTYPES)
    _one_of("collect.dtype", recipe.collect.dtype, DTYPES)
    _one_of("boost.rule", recipe.boost.rule, NAMES)
    _one_of("distil.loss", recipe.distil.loss, LOSSES)
    if recipe.boost.rule == RESIDUAL and recipe.distil.loss == HARD:
        raise ValueError(
            f"boost.rule={RESIDUAL} changes distributions, which distil.loss={HARD} ignores."
        )
    if not {0.0} < set(recipe.evaluation.temperatures):
        raise ValueError(
            f"evaluation.temperatures are {recipe.evaluation.temperatures}; they must hold 0 and "
            "one above."
        )
    for name in ("collect", "turns"):
        temperatures = getattr(recipe, name).temperatures
        if not temperatures or min(temperatures) < 0:
            raise ValueError(
                f"{name}.temperatures are {temperatures}; there must be some, none below 0."
            )
    if recipe.distil.corpus_rows and not recipe.labels.corpus_rows:
        raise ValueError(
            f"distil.corpus_rows is {recipe.distil.corpus_rows} and labels.corpus_rows is 0; a "
            "step learns from no corpus rows that are not labelled."
        )
    if recipe.turns.tokens and recipe.collect.chat:
        raise ValueError(
            f"turns.tokens is {recipe.turns.tokens} and collect.chat is True; prompts are written "
            "by the target or are the corpus', so turns.tokens must be 0 or collect.chat False."
        )
    if recipe.collect.chat and isinstance(recipe.target, ModelConfig):
        raise ValueError(
            "collect.chat is True and the target is trained here; only a given one, "
            "target=FOLDER, has a chat template."
        )
    if recipe.head.start and not recipe.head.levels:
        raise ValueError(
            f"head.start is {recipe.head.start!r} and head.levels 0; a head is fine-tuned at 1 "
            "level or more."
        )
    if recipe.turns.tokens and not recipe.collect.rows:
        raise ValueError(
            f"turns.tokens is {recipe.turns.tokens} and collect.rows is 0; turns are written in "
            "the rows of an engine, so collect.rows must be at least 1."
        )


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}.")


def _pool(recipe: Recipe) -> None:
    boost, schedule = recipe.boost, recipe.schedule
    if boost.sizes and len(boost.sizes) != boost.drafts:
        raise ValueError(
            f"boost.sizes names {len(boost.sizes)} drafts, boost.drafts is {boost.drafts}."
        )
    if not schedule.steps:
        raise ValueError("schedule.steps is 0; a draft learns from its target in at least 1.")
    if recipe.head.levels and recipe.warm.steps:
        raise ValueError(
            f"warm.steps is {recipe.warm.steps} and head.levels {recipe.head.levels}; a head "
            "learns nothing from a corpus alone, so warm.steps must be 0."
        )
    limits = (
        ("boost.window", boost.window, "collect.new_tokens", recipe.collect.new_tokens),
        ("boost.cover", boost.cover, "the number of known ranks", TOP),
        ("evaluation.depth", recipe.evaluation.depth, "evaluation.new_tokens",
         recipe.evaluation.new_tokens),
    )  # fmt: skip
    for name, value, other, most in limits:
        if value > most:
            raise ValueError(f"{name} is {value}; it must be at most {most}, {other}.")


def check_for(recipe: Recipe, target: ModelConfig) -> None:
    """Checks what depends on the target.

    Raises:
      ValueError: a draft's shape is impossible, or rows exceed the target's vocabulary or context.
    """
    for member in range(recipe.boost.drafts):
        own = recipe.config_of(member, target)
        if own.features is not None and own.hidden_size != target.hidden_size:
            raise ValueError(
                f"draft.hidden_size is {own.hidden_size}; a head has its target's embedding, whose "
                f"hidden size is {target.hidden_size}."
            )
    if recipe.head.levels:
        layers = recipe.layers_read(target)
        if not 0 <= min(layers) <= max(layers) <= target.num_layers:
            raise ValueError(
                f"head.layers are {layers}; the target has {target.num_layers} layers."
            )
    if recipe.labels.top_k >= target.vocab_size:
        raise ValueError(
            f"labels.top_k is {recipe.labels.top_k}; the target has {target.vocab_size} tokens."
        )
    if recipe.vocabulary.size >= target.vocab_size:
        raise ValueError(
            f"vocabulary.size is {recipe.vocabulary.size}; the target has {target.vocab_size} "
            "tokens, and a draft that knows all of them has vocabulary.size=0."
        )
    if recipe.trigrams.width > target.vocab_size:
        raise ValueError(
            f"trigrams.width is {recipe.trigrams.width}; the target has {target.vocab_size} tokens."
        )
    lengths = {
        "collect.prompt_tokens and collect.new_tokens": recipe.collect.prompt_tokens
        + recipe.collect.new_tokens,
        "evaluation.prompt_tokens and evaluation.new_tokens": recipe.evaluation.prompt_tokens
        + recipe.evaluation.new_tokens,
        "labels.corpus_length": recipe.labels.corpus_length,
        "pretrain.length": recipe.pretrain.length if recipe.pretrain.steps else 0,
        "pretrain.long_length": recipe.pretrain.long_length if recipe.pretrain.steps else 0,
        "warm.length": recipe.warm.length,
        "warm.long_length": recipe.warm.long_length,
    }
    for name, length in lengths.items():
        if length > target.max_positions:
            raise ValueError(
                f"{name} make {length} tokens a row; the target's context is "
                f"{target.max_positions}."
            )
