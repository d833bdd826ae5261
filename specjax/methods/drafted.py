"""What a chain of a pair's first draft gains, and its n-gram model: measured once, and kept.

Drafting pays by what it and passes of the model take here, and by how often the model accepts what
is drafted. The latter is what the folders of the draft and of the n-gram model say; else it is
measured along texts that the model writes itself after a few prompts, as a draft often foresees
answers better than anything else; along bundled prompts where the model is too slow to write some.
"""

import contextlib
import datetime
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from specjax.base.progress import working
from specjax.checkpoints.acceptance import Acceptance
from specjax.checkpoints.pair import Pair
from specjax.decoding.pass_times import overlaps
from specjax.methods import defaults, records
from specjax.methods.draftless import ANY, bundled, kind_of, step_seconds, texts_of
from specjax.methods.method import Setting
from specjax.methods.registry import build, setting_of
from specjax.methods.replay import Text, likeliest_along, padded, padded_size, replay
from specjax.trees.widths import is_number

_TIMED = (0, 1, 3, 7)
"""Nodes whose passes are timed; the others lie between."""


class Drafting(NamedTuple):
    """What a method drafts.

    Attributes:
      method: "chain" or "ngram".
      seconds: of a step's drafting, by its nodes from 1 on.
      tokens_per_step: by the nodes from 1 on.
      num_tokens: of the texts that tell so.
      is_written: whether the model wrote these texts.
    """

    method: str
    seconds: tuple[float, ...]
    tokens_per_step: tuple[float, ...]
    num_tokens: int
    is_written: bool

    def setting(self, nodes: int) -> Setting:
        """The method with so many nodes."""
        return setting_of(f"{self.method}:{nodes}")


class Findings(NamedTuple):
    """What was measured of a pair.

    Attributes:
      date: when.
      step_seconds: of a step without drafting, by its nodes from 0 on.
      found: what drafts.
    """

    date: str
    step_seconds: tuple[float, ...]
    found: tuple[Drafting, ...]

    def seconds(self, one: Drafting, nodes: int) -> float:
        """Of a step."""
        return self.step_seconds[nodes] + one.seconds[nodes - 1]

    def gain(self, one: Drafting, nodes: int) -> float:
        """Times plain decoding."""
        plain = self.step_seconds[0]
        return one.tokens_per_step[nodes - 1] * plain / self.seconds(one, nodes)

    @property
    def best(self) -> tuple[Drafting, int]:
        """The fastest method, and its nodes."""
        every = [(one, 1 + n) for one in self.found for n in range(len(one.seconds))]
        return max(every, key=lambda each: self.gain(*each))

    @property
    def setting(self) -> Setting:
        """The fastest one."""
        one, nodes = self.best
        return one.setting(nodes)

    @property
    def pays(self) -> bool:
        """Whether it is to be taken rather than plain decoding."""
        return self.gain(*self.best) >= defaults.LEAST_GAIN

    def __str__(self) -> str:
        (one, nodes), plain = self.best, self.step_seconds[0]
        whose = "that the model wrote" if one.is_written else "of bundled prompts"
        return (
            f"a step of {one.setting(nodes).label} takes {self.seconds(one, nodes) / plain:.2f} "
            f"times a plain one of {plain * 1e3:.3g} ms ({self.step_seconds[nodes] / plain:.2f} "
            f"without drafting) and gives {one.tokens_per_step[nodes - 1]:.2f} tokens along "
            f"{one.num_tokens} {whose}: {self.gain(one, nodes):.2f} times plain decoding "
            f"({self.date[:10]})"
        )


def findings(pair: Pair, temperature: float, batch: int) -> Findings:
    """What was measured of a pair and such rows here, now or before."""
    kind = kind_of(temperature)
    rows = records.setting(pair.target, pair.drafts[:1], batch, kind > 0)
    what = "a chain" if pair.table is None else "a chain or an n-gram model"
    name = f"{rows}, temperature {kind:g}, {what}"
    if (kept := _of_json(records.recall_findings(name))) is not None:
        return kept
    found = measure(pair, kind, batch)
    with contextlib.suppress(OSError):  # it is measured anew then
        each = [one._asdict() for one in found.found]
        records.remember_findings(name, found._asdict() | {"found": each})
    return found


@working("measuring once what the draft gains")
def measure(pair: Pair, temperature: float, batch: int) -> Findings:
    """Measures passes and acceptance; seconds, most of them compilation."""
    longest = _longest(pair, batch)
    told = {"chain": pair.acceptance} if pair.table is None else {
        "chain": pair.acceptance, "ngram": pair.table_acceptance
    }  # fmt: skip
    texts = [] if all(told.values()) else texts_of(pair, temperature)
    found = []
    for method, known in told.items():
        if known is None:
            known = _acceptance(pair, method, {temperature: texts or [bundled(pair)]}, longest)
            is_written = bool(texts)
        else:
            is_written = True
        tokens = known.at(temperature)[:longest]
        drafts = _draft_seconds(pair, method, len(tokens), batch, temperature > 0)
        found.append(Drafting(method, drafts, tokens, known.num_tokens, is_written))
    timed = [each for each in _TIMED if each <= longest]
    steps = step_seconds(pair.target, timed, batch, temperature > 0, bundled(pair).tokens)
    between = np.interp(range(longest + 1), timed, [steps[each] for each in timed])
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Findings(now, tuple(between.tolist()), tuple(found))


def _longest(pair: Pair, batch: int) -> int:
    """The most tokens of a chain that are weighed."""
    widths = defaults.WIDTHS if batch == 1 else defaults.WIDTHS_OF_MANY
    most = pair.drafts[0].config.block_levels
    return len(widths["chain"]) if most is None else min(len(widths["chain"]), most)


def _draft_seconds(
    pair: Pair, method: str, longest: int, batch: int, sampled: bool
) -> tuple[float, ...]:
    """Of a step's drafting, by its nodes from 1 on; of an n-gram model those of the most nodes."""
    if method == "chain":
        draft = pair.drafts[0]
        one = step_seconds(draft, (0,), batch, sampled)[0]
        passes = 1 if draft.config.block_levels is not None else longest
        return tuple(one * min(nodes, passes) for nodes in range(1, longest + 1))
    drafter = build(setting_of(method, budget=longest), pair)
    empty = likeliest_along(pair.target, [ANY], 0)
    return (replay(drafter, [ANY], empty, [longest], batch).draft_seconds,) * longest


def acceptance_of(
    pair: Pair, method: str = "chain", temperatures: Sequence[float] = (0.0, 0.8, 1.0)
) -> Acceptance | None:
    """What the folder of a draft, or of an n-gram model, can say of its target.

    None where the target writes too little.
    """
    found = {temperature: texts_of(pair, temperature) for temperature in temperatures}
    if not all(found.values()):
        return None
    return _acceptance(pair, method, found, _longest(pair, 1))


def _acceptance(
    pair: Pair, method: str, texts: dict[float, list[Text]], longest: int
) -> Acceptance:
    """Tokens per step of 1 to `longest` nodes along texts of each temperature."""
    tokens_of = of_chains if method == "chain" else partial(_of_trees, method=method)
    tokens = {each: tokens_of(pair, own, each, longest) for each, own in texts.items()}
    count = min(map(_written, texts.values()))
    return Acceptance(pair.target.config.num_parameters, count, tokens)


def _of_trees(
    pair: Pair, texts: Sequence[Text], temperature: float, longest: int, method: str
) -> tuple[float, ...]:
    """Tokens per step of chosen trees of 1 to `longest` nodes that follow the texts."""
    del temperature  # a token is accepted if the text goes on with it, however that was drawn
    nodes = range(1, longest + 1)
    drafter = build(setting_of(method, budget=longest), pair)
    found = replay(drafter, texts, likeliest_along(pair.target, texts, 0), nodes).tokens
    steps = {each: sum(text.written / per for text, per in zip(texts, found[each], strict=True))
             for each in nodes}  # fmt: skip
    return tuple(_written(texts) / steps[each] for each in nodes)


def _written(texts: Sequence[Text]) -> int:
    return sum(text.written for text in texts)


def of_chains(
    pair: Pair, texts: Sequence[Text], temperature: float, longest: int
) -> tuple[float, ...]:
    """Tokens per step of chains of 1 to `longest` tokens that may begin anywhere in the texts.

    A token of a drawn chain is accepted with the probability that the distributions share
    (Leviathan et al., 2211.17192), at temperature 0 where both have the same likeliest.
    """
    model, draft, size = pair.target, pair.drafts[0], padded_size(texts)
    reached: list[Float[np.ndarray, "n L"]] = []
    for text in texts:
        columns = range(text.start - 1, len(text.tokens) - 1)
        own = np.asarray(overlaps(model, draft, padded(text, size), columns, temperature, longest))
        levels = np.broadcast_to(own, (longest, len(columns)))
        ahead = np.pad(levels, ((0, 0), (0, longest)), constant_values=np.nan)
        windows = [row[at : at + len(columns)] for at, row in enumerate(ahead)]
        reached.append(np.cumprod(np.stack(windows, axis=1), axis=1))
    survival = np.nanmean(np.concatenate(reached), axis=0)
    return tuple((1 + np.cumsum(survival)).tolist())


def _of_json(values: Any) -> Findings | None:
    """What was written, or None if this version does not understand it."""
    match values:
        case {"date": str(date), "step_seconds": [*steps], "found": [_, *_] as found} if all(
            map(_is_positive, steps)
        ):
            every = [_drafting(each, len(steps) - 1) for each in found]
            known = tuple(each for each in every if each is not None)
            if len(known) == len(found):
                return Findings(date, tuple(steps), known)
    return None


def _drafting(values: Any, longest: int) -> Drafting | None:
    match values:
        case {
            "method": "chain" | "ngram" as method,
            "seconds": [_, *_] as seconds,
            "tokens_per_step": [*tokens],
            "num_tokens": int(count),
            "is_written": bool(is_written),
        } if all(map(_is_positive, (*seconds, *tokens))):
            if len(seconds) == len(tokens) <= longest:
                return Drafting(method, tuple(seconds), tuple(tokens), count, is_written)
    return None


def _is_positive(value: Any) -> bool:
    return is_number(value) and value > 0
