"""What a chain of a pair's first draft gains: measured once, and kept.

It pays by what passes of the draft and of the model take here, and by how often the model accepts
the draft's tokens. The latter is what the draft's folder says; else it is measured along texts that
the model writes itself after a few prompts, as a draft often foresees answers better than anything
else; along bundled prompts where the model is too slow to write some.
"""

import contextlib
import datetime
import importlib.resources
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from specjax.base.progress import working
from specjax.checkpoints.acceptance import Acceptance
from specjax.checkpoints.pair import Pair
from specjax.decoding.link import overlaps
from specjax.methods import defaults, records
from specjax.methods.draftless import kind_of, step_seconds, texts_of
from specjax.methods.replay import Text, padded, padded_size
from specjax.trees.widths import is_number

_TIMED = (0, 1, 3, 7)
"""Levels of a chain whose passes are timed; the others lie between."""
_PROMPTS, _TOKENS = 16, 256
"""Bundled prompts, and their tokens, along which drafts are compared where no text is written."""


class Findings(NamedTuple):
    """What was measured of a pair.

    Attributes:
      date: when.
      level: seconds of a token of the draft.
      steps: seconds of a step without drafting, by the levels of its chain from 0 on.
      tokens: per step, by the levels from 1 on.
      along: tokens of the texts that tell so.
      written: whether the model wrote them.
    """

    date: str
    level: float
    steps: tuple[float, ...]
    tokens: tuple[float, ...]
    along: int
    written: bool

    def gain(self, levels: int) -> float:
        """Times plain decoding of a chain."""
        taken = self.steps[levels] + levels * self.level
        return self.tokens[levels - 1] * self.steps[0] / taken

    @property
    def best(self) -> int:
        """The levels of the fastest chain."""
        return max(range(1, len(self.steps)), key=self.gain)

    @property
    def pays(self) -> bool:
        """Whether it is to be taken rather than plain decoding."""
        return self.gain(self.best) >= defaults.LEAST_GAIN

    def __str__(self) -> str:
        whose = "that the model wrote" if self.written else "of bundled prompts"
        plain, best = self.steps[0], self.best
        return (
            f"a pass of the draft takes {self.level * 1e3:.3g} ms, one of the model "
            f"{plain * 1e3:.3g} ms, one over {best + 1} tokens "
            f"{self.steps[best] / plain:.2f} times that, and a chain {best} deep gives "
            f"{self.tokens[best - 1]:.2f} tokens a step along {self.along} {whose}: "
            f"{self.gain(best):.2f} times plain decoding ({self.date[:10]})"
        )


def findings(pair: Pair, temperature: float, batch: int) -> Findings:
    """What was measured of a pair and such rows here, now or before."""
    kind = kind_of(temperature)
    rows = records.setting(pair.target, pair.drafts[:1], batch, kind > 0)
    name = f"{rows}, temperature {kind:g}, a chain"
    if (kept := _of_json(records.recall_findings(name))) is not None:
        return kept
    found = measure(pair, kind, batch)
    with contextlib.suppress(OSError):  # it is measured anew then
        records.remember_findings(name, found._asdict())
    return found


@working("measuring once what the draft gains")
def measure(pair: Pair, temperature: float, batch: int) -> Findings:
    """Measures passes and acceptance; seconds, most of them compilation."""
    draft, sampled = pair.drafts[0], temperature > 0
    widths = defaults.WIDTHS if batch == 1 else defaults.WIDTHS_OF_MANY
    levels = range(len(widths["chain"]) + 1)
    timed = [each for each in _TIMED if each in levels]
    steps = step_seconds(pair.target, timed, batch, sampled)
    taken = np.interp(levels, timed, [steps[each] for each in timed])
    known = pair.acceptance
    if known is not None:
        written, along, tokens = True, known.along, known.at(temperature)
    else:
        texts = texts_of(pair, temperature)
        written, taken_along = bool(texts), texts or [_bundled(pair)]
        along = sum(text.written for text in taken_along)
        tokens = _tokens(pair, taken_along, temperature, levels[-1])
    return Findings(
        datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        step_seconds(draft, (0,), batch, sampled)[0],
        tuple(taken.tolist()),
        tokens[: levels[-1]],
        along,
        written,
    )


def acceptance_of(pair: Pair, temperatures: Sequence[float] = (0.0, 0.8, 1.0)) -> Acceptance:
    """What a draft's folder can say of its target, measured along what the target writes.

    Raises:
      ValueError: it wrote too little.
    """
    tokens, along = dict[float, tuple[float, ...]](), 0
    for temperature in temperatures:
        texts = texts_of(pair, temperature)
        if not texts:
            raise ValueError(f"the target wrote too little at temperature {temperature:g}.")
        tokens[temperature] = _tokens(pair, texts, temperature, len(defaults.WIDTHS["chain"]))
        along = along or sum(text.written for text in texts)
    return Acceptance(pair.target.config.num_parameters, along, tokens)


def _tokens(
    pair: Pair, texts: Sequence[Text], temperature: float, levels: int
) -> tuple[float, ...]:
    """Tokens per step of chains of 1 to `levels` tokens that may begin anywhere in the texts.

    A token of a drawn chain is accepted with the probability that the distributions share
    (Leviathan et al., 2211.17192), at temperature 0 where both have the same likeliest.
    """
    model, draft, size = pair.target, pair.drafts[0], padded_size(texts)
    reached: list[Float[np.ndarray, "n L"]] = []
    for text in texts:
        columns = range(text.start - 1, len(text.tokens) - 1)
        own = np.asarray(overlaps(model, draft, padded(text, size), columns, temperature))
        ahead = np.concatenate([own, np.full(levels, np.nan)])
        windows = np.lib.stride_tricks.sliding_window_view(ahead, levels)[: len(own)]
        reached.append(np.cumprod(windows, axis=1))
    survival = np.nanmean(np.concatenate(reached), axis=0)
    return tuple((1 + np.cumsum(survival)).tolist())


def _bundled(pair: Pair) -> Text:
    """Bundled prompts one after the other, as if most of them had been written."""
    lines = (importlib.resources.files("specjax") / "prompts.jsonl").read_text("utf-8")
    prompts = [json.loads(line)["prompt"] for line in lines.splitlines()[:_PROMPTS]]
    most = min(_TOKENS, pair.target.config.max_positions)
    tokens = pair.tokenizer("\n".join(prompts)).input_ids[:most]
    return Text(tuple(tokens), len(tokens) // 8)


def _of_json(values: Any) -> Findings | None:
    """What was written, or None if this version does not understand it."""
    match values:
        case {
            "date": str(date),
            "level": level,
            "steps": [*steps],
            "tokens": [*tokens],
            "along": int(along),
            "written": bool(written),
        } if all(is_number(each) and each > 0 for each in (level, *steps, *tokens)):
            if len(steps) == len(tokens) + 1 > 1:
                return Findings(date, level, tuple(steps), tuple(tokens), along, written)
    return None
