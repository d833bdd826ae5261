"""Contestants side by side on the same texts: each cell is a run with plain decoding's beside it.

A machine drifts, so all of a round run one after the other on one prompt, in an order that turns,
and a contestant is compared with the plain run of its own round.
"""

import dataclasses
import itertools
import statistics
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cells import Cells, Json
from benchmarks.texts import Text
from specjax.base.pytree import replace
from specjax.base.sampling import Sampling, fold
from specjax.decoding.request import OUTPUT_BUCKETS, PROMPT_BUCKETS, Request, bucket, prepare
from specjax.draft import Drafter
from specjax.measure import timing
from specjax.methods.method import Setting
from specjax.methods.setting import to_json
from specjax.models.transformer import Model
from specjax.verify.rules import AUTO


class Sampled(NamedTuple):
    """How a text is drawn; `top_k` of 0 is no limit."""

    temperature: float
    top_k: int = 0


class Run(NamedTuple):
    """A text that was generated; steps and nodes where they are known."""

    tokens: list[int]
    seconds: float
    steps: int | None = None
    nodes: int | None = None


class Contestant(Protocol):
    """Who generates texts."""

    @property
    def name(self) -> str:
        """In the table."""
        ...

    @property
    def key(self) -> Json:
        """What its runs depend on."""
        ...

    def warm(self, text: Text, sampled: Sampled) -> None:
        """Compiles what a text of this size needs."""
        ...

    def run(self, text: Text, sampled: Sampled) -> Run:
        """Generates a text of exactly `text.new_tokens` tokens, its prompt included in the time."""
        ...


@dataclasses.dataclass
class Ours:
    """A setting with a rule.

    Attributes:
      name: in the table.
      target: the model.
      drafter: what drafts for it, made of the setting.
      setting: a method and its tree.
      rule: the verification rule's name, or "auto".
      seed: of all random numbers.
    """

    name: str
    target: Model
    drafter: Drafter
    setting: Setting
    rule: str = AUTO
    seed: int = 0

    @property
    def key(self) -> Json:
        """Its setting, trees, rule and seed."""
        return {
            "by": "specjax",
            "setting": to_json(self.setting),
            "trees": str(self.drafter.construction),
            "rule": self.rule,
            "seed": self.seed,
        }

    def warm(self, text: Text, sampled: Sampled) -> None:
        """Compiles the loop for a text of this size."""
        timing.warm_up(self._request(text, sampled))

    def run(self, text: Text, sampled: Sampled) -> Run:
        """Generates a text."""
        made, seconds = timing.timed(self._request(text, sampled))
        tokens = made.tokens[0, : made.lengths[0]].tolist()
        return Run(tokens, seconds, int(made.steps[0]), int(made.nodes[0]))

    def _request(self, text: Text, sampled: Sampled) -> Request:
        number = zlib.crc32(text.name.encode()) >> 1
        request = prepare(
            fold(jax.random.key(self.seed), number)[None],
            *(self.target, self.drafter, [list(text.tokens)]),
            max_new_tokens=text.room,
            sampling=Sampling(sampled.temperature, top_k=sampled.top_k),
            verify=self.rule,
            stop_at_eos=False,
        )
        limits = request.rows.limits
        own = jnp.full_like(limits.max_new_tokens, text.new_tokens)
        rows = replace(request.rows, limits=replace(limits, max_new_tokens=own))
        return request._replace(rows=rows)


Held = Mapping[str, Json]
"""A contestant's cells, by the name of the text."""


@dataclasses.dataclass
class Rounds:
    """What is compared.

    Attributes:
      cells: where runs are kept.
      table: of the cells.
      plain: plain decoding, whom all are compared with.
    """

    cells: Cells
    table: str
    plain: Contestant

    def run(
        self, contests: Mapping[Sampled, Sequence[Contestant]], texts: Sequence[Text]
    ) -> dict[tuple[Sampled, str], Held]:
        """The cells of every contestant: those that are kept, and the others measured.

        One compiled size after the other, and of each as many contestants at a time as a process
        can hold programs of (`timing.MOST_MAPS`).
        """
        for _, alike in itertools.groupby(sorted(texts, key=size_of), key=size_of):
            own = list(alike)
            for group in self._groups(contests, own):
                for number, text in enumerate(own):
                    for sampled, some in group.items():
                        self._round(sampled, some, text, number)
            timing.forget_programs()
        return {
            (sampled, each.name): {text.name: self._held(each, sampled, text) for text in texts}
            for sampled, some in contests.items()
            for each in some
        }

    def _held(self, each: Contestant, sampled: Sampled, text: Text) -> Any:
        """The cell of a run; None where it is missing."""
        return self.cells.held(self.table, self._key(each, sampled, text))

    def _missing(
        self, some: Sequence[Contestant], sampled: Sampled, text: Text
    ) -> list[Contestant]:
        return [each for each in some if self._held(each, sampled, text) is None]

    def _groups(
        self, contests: Mapping[Sampled, Sequence[Contestant]], texts: Sequence[Text]
    ) -> Iterator[dict[Sampled, list[Contestant]]]:
        """Contestants that lack a cell of these texts, as many at a time as fit, warmed.

        A program serves all temperatures, so those of one contestant follow each other.
        """
        places: dict[str, list[tuple[Sampled, Contestant]]] = {}
        for sampled, some in contests.items():
            for each in some:
                places.setdefault(repr(each.key), []).append((sampled, each))
        group: dict[Sampled, list[Contestant]] = {}
        for sampled, each in itertools.chain(*places.values()):
            if not any(self._missing([each], sampled, text) for text in texts):
                continue
            if group and timing.mapped() > timing.MOST_MAPS:
                yield group
                jax.clear_caches()
                group = {}
            if not group:
                self.plain.warm(texts[0], sampled)
            each.warm(texts[0], sampled)
            group.setdefault(sampled, []).append(each)
        if group:
            yield group

    def _round(self, sampled: Sampled, some: Sequence[Contestant], text: Text, number: int) -> None:
        """Runs those of `some` that lack this text's cell, and plain decoding before them."""
        missing = self._missing(some, sampled, text)
        if not missing:
            return
        turn = number % len(missing)
        plain = self.plain.run(text, sampled)
        for each in (*missing[turn:], *missing[:turn]):
            is_plain = each.key == self.plain.key
            run = plain if is_plain else each.run(text, sampled)
            value = {
                "tokens": len(run.tokens),
                "seconds": run.seconds,
                "steps": run.steps,
                "nodes": run.nodes,
                "repeated": timing.repeated([np.asarray(run.tokens)]),
                "same_as_plain": _common(run.tokens, plain.tokens),
                "plain_tokens": len(plain.tokens),
                "plain_seconds": plain.seconds,
            }
            self.cells.keep(self.table, self._key(each, sampled, text), value)

    def _key(self, each: Contestant, sampled: Sampled, text: Text) -> Json:
        """What a cell depends on; a contestant's own key says who it is."""
        return {
            "contestant": dict(each.key),
            "plain": dict(self.plain.key),
            "sampled": list(sampled),
            "prompt": list(text.tokens),
            "new_tokens": text.new_tokens,
            "room": text.room,
        }


def size_of(text: Text) -> tuple[int, int]:
    """The compiled size that a text needs."""
    return (
        bucket(len(text.tokens), PROMPT_BUCKETS),
        bucket(text.room, OUTPUT_BUCKETS),
    )


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def figures(held: Sequence[Json]) -> Json:
    """Runs of a contestant together.

    Tokens per step and a second are over all of them; the speed-up is the median over texts of
    that over plain decoding in the same round; `same` is the mean share of a text up to where it
    differs from plain decoding's.
    """
    tokens, seconds = (sum(each[name] for each in held) for name in ("tokens", "seconds"))
    steps, nodes = (sum(each[name] or 0 for each in held) for name in ("steps", "nodes"))
    ratios = [
        each["tokens"] / each["seconds"] * each["plain_seconds"] / each["plain_tokens"]
        for each in held
    ]
    return {
        "texts": len(held),
        "tokens_per_step": tokens / steps if steps else None,
        "nodes": nodes / steps if steps and held[0]["nodes"] is not None else None,
        "tokens_per_second": tokens / seconds,
        "speedup": statistics.median(ratios),
        "speedups": ratios,
        "repeated": statistics.fmean(each["repeated"] for each in held),
        "same": statistics.fmean(each["same_as_plain"] / each["tokens"] for each in held),
    }
