"""How long a run will take and how much memory, before it starts."""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from specjax.base.progress import duration
from specjax.models import memory
from specjax.models.config import ModelConfig
from train.collect import num_chunks
from train.config import Collect, Evaluation, Reading, Recipe, Schedule
from train.labels import corpus_pieces
from train.loop import steps_done
from train.report import flops_per_token, matmul_rate
from train.work import Work

SHARE = 0.4
"""Of the machine's rate of large matrix products that stages reach: 0.43 to 0.48 in training, 0.38
in collecting (the bundled recipe, train/LOG.md)."""
_COLUMNS = 8
"""A pass of fewer columns takes as long."""
_DEV_ROWS = 64
_LOGITS, _STATE = 3, 6
"""Copies of a pass's logits, and of trained weights with their moments and gradients, at once."""
_PROCESS = 600 * 2**20
"""Bytes of a process with jax and its programs."""


class Left:
    """Seconds that the stages of a run have left; what stages took corrects those after them."""

    def __init__(self, work: Work, stages: Sequence[str]) -> None:
        seconds = seconds_of(work)
        self._seconds = {name: seconds[name] for name in stages if name in seconds}
        self._expected = self._taken = 0.0
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Of all stages that have not ended."""
        pace = self._taken / self._expected if self._expected > 1 else 1.0
        return pace * sum(self._seconds.values())

    def begin(self) -> None:
        """A stage begins."""
        self._began = time.monotonic()

    def end(self, stage: str) -> bool:
        """A stage has ended; gives whether it was one of those that take time."""
        if stage not in self._seconds:
            return False
        self._expected += self._seconds.pop(stage)
        self._taken += time.monotonic() - self._began
        return True

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in self._seconds.items()
                          if seconds >= 1)  # fmt: skip
        return f"about {duration(self.seconds)}" + (f" ({parts})" if parts else "")


def seconds_of(work: Work) -> dict[str, float]:
    """What each stage of a run still has to do, at `SHARE` of this machine's rate.

    The tables of `train.evaluate` are not among them.
    """
    recipe, target = work.recipe, config_of(work)
    found: dict[str, float] = dict.fromkeys(("pretrain", "collect", "label", "warm", "boost"), 0.0)
    if not isinstance(recipe.target, str):
        found["pretrain"] = _reading(recipe.pretrain, target, work.pretrained)
    forward = flops_per_token(target, 0) / 3
    for name, settings in work.collections.items():
        missing = _missing(work.collected(name), num_chunks(settings))
        rows = max(_COLUMNS, settings.batch)
        tokens = missing * (rows * settings.new_tokens + settings.batch * settings.prompt_tokens)
        found["collect"] += _seconds(tokens * forward, recipe.collect.dtype)
    labels, width = recipe.labels, _width(recipe.collect)
    pieces = corpus_pieces(labels)
    corpus = pieces[0].stop * labels.corpus_length if pieces else 0
    for folder, count, tokens in (
        (work.collected_labels, num_chunks(recipe.collect), recipe.collect.batch * width),
        (work.corpus_labels, len(pieces), corpus),
    ):
        found["label"] += _seconds(_missing(folder, count) * tokens * forward, labels.dtype)
    starts = {work.warmed(member): member for member in range(recipe.boost.drafts)}
    for folder, member in starts.items():
        found["warm"] += _reading(recipe.warm, work.draft_config(member), folder)
    tokens = _distilled(recipe)
    for member in range(recipe.boost.drafts):
        steps = recipe.schedule.steps - steps_done(work.drafted(member))
        flops = flops_per_token(work.draft_config(member), width) * max(recipe.head.levels, 1)
        found["boost"] += _seconds(steps * tokens * flops, recipe.schedule.dtype)
    return found


def config_of(work: Work) -> ModelConfig:
    """The target's shape, of which no weights are read."""
    return work.read_config() if isinstance(work.recipe.target, str) else work.recipe.target


def _reading(schedule: Reading, config: ModelConfig, folder: Path) -> float:
    steps = schedule.steps - steps_done(folder)
    flops = flops_per_token(config, schedule.length)
    evaluations = -(-steps // schedule.evaluate_every)
    measured = evaluations * _DEV_ROWS * schedule.length * flops / 3
    seconds = _seconds(steps * schedule.batch * schedule.length * flops, schedule.dtype)
    return seconds + _seconds(measured, "float32")


def _seconds(flops: float, dtype: str) -> float:
    return flops / (SHARE * matmul_rate(dtype))


def _missing(folder: Path, count: int) -> int:
    return max(0, count - sum(1 for _ in folder.glob("*.npz")))


def _width(settings: Collect | Evaluation) -> int:
    return settings.prompt_tokens + settings.new_tokens


def _distilled(recipe: Recipe) -> int:
    """Tokens of a step of distillation."""
    corpus = recipe.distil.corpus_rows * recipe.labels.corpus_length
    return recipe.schedule.batch * _width(recipe.collect) + corpus


def bytes_of(work: Work) -> dict[str, int]:
    """Bytes of memory at the most, by stage, the process and what it holds included."""
    recipe, target = work.recipe, config_of(work)
    held = _PROCESS + 4 * target.num_parameters
    sizes = [work.draft_config(member) for member in range(recipe.boost.drafts)]
    draft = max(sizes, key=lambda config: config.num_parameters)
    found = {
        "collect": held + max(_collecting(each, target) for each in work.collections.values()),
        "label": held + recipe.labels.tokens * _logits(target),
        "warm": held + _training(recipe.warm, draft, recipe.warm.batch * recipe.warm.length),
        "boost": held + _training(recipe.schedule, draft, _distilled(recipe)),
    }
    if not isinstance(recipe.target, str):
        schedule = recipe.pretrain
        tokens = schedule.batch * schedule.length
        found["pretrain"] = _PROCESS + _training(schedule, target, tokens)
    return found


def _logits(config: ModelConfig) -> int:
    return 4 * _LOGITS * config.vocab_size


def _collecting(settings: Collect | Evaluation, target: ModelConfig) -> int:
    slot = 2 * 4 * target.num_layers * target.num_kv_heads * target.head_dim
    return settings.batch * (_width(settings) * slot + _logits(target))


def _training(schedule: Schedule, config: ModelConfig, tokens: int) -> int:
    if not schedule.steps:
        return 0
    layer = 12 * config.hidden_size + 4 * config.intermediate_size
    kept = 4 * config.num_layers * layer + _logits(config)
    return 4 * _STATE * config.num_parameters + tokens * kept


def tell(work: Work, stages: Sequence[str]) -> Left:
    """Says on standard error how long a run will take, and how much memory."""
    left, spare = Left(work, stages), memory.available(None)
    sizes = {name: size for name, size in bytes_of(work).items() if name in stages}
    most = max(sizes, key=lambda name: sizes[name], default=None)
    text = f"this takes {left} on this machine, compilation apart"
    if most is not None:
        text += f", and about {memory.readable(sizes[most])} of memory, in the stage {most}"
        if spare is not None:
            text += f", of {memory.readable(spare)} to spare"
    say(f"{text}.")
    if "evaluate" in stages and (tables := work.recipe.evaluation.tables):
        say(
            f"its {len(tables)} tables ({', '.join(tables)}) come on top, all five half an hour "
            "or more; evaluation.tables= leaves them out."
        )
    if most is not None and spare is not None and sizes[most] > spare:
        say("that is more memory than there is to spare; " + _LESS[most])
    return left


_LESS: Mapping[str, str] = {
    "pretrain": "a smaller pretrain.batch or pretrain.length takes less.",
    "collect": "a smaller collect.batch and evaluation.batch take less.",
    "label": "a smaller labels.tokens takes less.",
    "warm": "a smaller warm.batch or warm.length takes less.",
    "boost": "a smaller schedule.batch, distil.corpus_rows or labels.corpus_length takes less.",
}


def say(sentence: str) -> None:
    """A line on standard error, in the first of several processes."""
    if jax.process_index() == 0:
        print(f"train.run: {sentence}", file=sys.stderr, flush=True)
