"""Steps of an engine with a fixed setting, and how well the goodput's acceptance foretells them.

    python -m benchmarks.simulation.recorded_steps humaneval.jsonl --setting chain:7 --temperature 0

Prints how accepted tokens of steps of a text correlate, one to sixteen steps apart, and the share
of their variance that `Acceptance` explains when the steps are replayed through it in order.
"""

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple
from unittest import mock

import numpy as np
import tyro

import specjax
from specjax.checkpoints.pair import Pair, load_pair
from specjax.engine.speculation import setting_of
from specjax.goodput.acceptance import Acceptance, curve_of
from specjax.goodput.policy import PLAIN, Decision, DraftSetting, Outcome, Timed
from specjax.measure import prompts
from specjax.methods import records
from specjax.methods.switch import switching

APART = (1, 2, 4, 8, 12, 16)
LEAST_LEFT = 32
"""Tokens that a text still has to be given at least for a step to count: its end cuts steps."""


@dataclasses.dataclass(frozen=True)
class Recording:
    """What is recorded."""

    file: tyro.conf.Positional[str]
    """Of prompts."""
    setting: str = "chain:7"
    """What every step drafts with."""
    temperature: float = 0.0
    """Of all requests."""
    texts: int = 32
    """How many prompts."""
    new: int = 128
    """Tokens of each text."""
    rows: int = 4
    """Requests at a time."""


class Step(NamedTuple):
    """What a step gave a text, and how many tokens it still lacked before."""

    text: int
    outcome: Outcome
    left: int


def record(pair: Pair, recording: Recording) -> tuple[list[Step], DraftSetting]:
    """The steps of all texts in the order in which they were made."""
    drafter = switching(pair, (PLAIN, recording.setting))
    engine = specjax.Engine(pair.target, drafter, rows=recording.rows)
    steps: list[Step] = []
    texts: dict[Hashable, int] = {}
    left: dict[int, int] = defaultdict(lambda: recording.new)
    engine.start()
    engine.fix(recording.setting)
    policy = engine.speculation.policy
    assert policy is not None
    learn = policy.observe_step

    def observe_step(
        decision: Decision, outcomes: Sequence[Outcome], timed: Timed | None, cached: int
    ) -> None:
        for outcome in outcomes:
            text = texts.setdefault(outcome.request, len(texts))
            steps.append(Step(text, outcome._replace(request=text, chances=None), left[text]))
            left[text] -= outcome.tokens
        learn(decision, outcomes, timed, cached)

    listed = [pair.tokenizer(text).input_ids[:400] for _, text in prompts.read(recording.file)]
    with mock.patch.object(policy, "observe_step", observe_step):
        asyncio.run(_all(engine, listed[: recording.texts], recording))
    engine.close()
    return steps, setting_of(drafter, recording.setting)


async def _all(
    engine: specjax.Engine, texts: Sequence[Sequence[int]], recording: Recording
) -> None:
    waiting = iter(texts)

    async def one() -> None:
        for tokens in waiting:
            asked = specjax.Request(
                prompt=tokens, max_new_tokens=recording.new, temperature=recording.temperature,
                ignore_eos=True,
            )  # fmt: skip
            async for _ in engine.submit(asked):
                pass

    await asyncio.gather(*(one() for _ in range(recording.rows)))


def correlations(steps: Sequence[Step]) -> Mapping[int, float]:
    """Of accepted tokens of two steps of a text, by how far apart they are."""
    texts: dict[int, list[int]] = defaultdict(list)
    for step in steps:
        if step.left > LEAST_LEFT:
            texts[step.text].append(step.outcome.accepted)
    mean = np.mean([each for own in texts.values() for each in own])
    variance = np.mean([(each - mean) ** 2 for own in texts.values() for each in own])
    found = {}
    for apart in APART:
        pairs = [
            (one - mean) * (other - mean)
            for own in texts.values()
            for one, other in zip(own, own[apart:], strict=False)
        ]
        found[apart] = float(np.mean(pairs) / variance)
    return found


def replay(
    steps: Sequence[Step], setting: DraftSetting, temperature: float
) -> tuple[float, float, float]:
    """Accepted tokens of a step as foretold and as they were, and the explained variance."""
    acceptance, name = Acceptance([setting]), curve_of(setting)
    foretold, given = [], []
    for step in steps:
        if step.left > LEAST_LEFT:
            expected = acceptance.expected(name, step.text, temperature)
            foretold.append(expected.tokens[-1])
            given.append(step.outcome.accepted)
        acceptance.observe(name, step.outcome, setting.depth, True, setting.is_chain)
        if step.outcome.ended:
            acceptance.forget(step.text)
    error = np.mean(np.square(np.subtract(foretold, given)))
    return float(np.mean(foretold)), float(np.mean(given)), float(1 - error / np.var(given))


def main() -> None:
    """Records, and prints what was found."""
    recording = tyro.cli(Recording, config=(tyro.conf.FlagCreatePairsOff,))
    records.use_compilation_cache()
    steps, setting = record(load_pair("bundled"), recording)
    foretold, given, explained = replay(steps, setting, recording.temperature)
    apart = ", ".join(f"{n} apart {own:.2f}" for n, own in correlations(steps).items())
    print(f"{setting.name}, T = {recording.temperature:g}: {len(steps)} steps; {apart}; accepted "
          f"{given:.2f} a step, foretold {foretold:.2f}, variance explained "
          f"{explained:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
