"""How long an engine's programs take, measured on rows that hold no request.

Each measurement is a generator that yields after every program that it has handed over and waited
for, so that whoever runs it can leave it there when a request comes, and returns what it found.
"""

import math
import time
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import TypeVar

import numpy as np

from specjax.engine.device import Device, Measured, Plan
from specjax.goodput.bursts import steps_of
from specjax.goodput.chunks import ChunkCosts, PrefillBatch
from specjax.goodput.costs import Cost
from specjax.goodput.policy import PLAIN, StepShape

_T = TypeVar("_T")
Measuring = Generator[None, None, _T]
"""A measurement that yields between programs."""

_TOKENS = 2048
"""Tokens that a row holds at most when it is measured how much they slow a program."""

_REPEATS, _MOST_REPEATS, _SECONDS = 3, 20, 0.1
"""Runs of a program, so many and for so long, whose median is how long it takes."""


def whole(measuring: Measuring[_T]) -> _T:
    """What a measurement finds, without a pause."""
    while True:
        try:
            next(measuring)
        except StopIteration as end:
            return end.value


def chunks_alone(device: Device, plan: Plan) -> Measuring[dict[int, float]]:
    """Seconds of chunks in an empty row."""
    found = {}
    for size in plan.chunks:
        device.begin(0, 0)
        found[size] = yield from _timed(device, partial(device.extend, 0, [0], size))
    return found


def batch(device: Device, plan: Plan) -> Measuring[float]:
    """Seconds of a pass over prompts of several rows that hold next to nothing."""
    if plan.batch is None:
        return math.inf
    own = {row: [0] for row in range(plan.batch.rows)}
    for row in own:
        device.begin(row, 0)
    return (yield from _timed(device, partial(device.extend_together, own, plan.batch)))


def chunks(device: Device, plan: Plan) -> Measuring[dict[int, tuple[float, float]]]:
    """Seconds of chunks in an empty row, and what each token adds that the row holds."""
    alone = yield from chunks_alone(device, plan)
    half = min(plan.longest, _TOKENS) // 2  # the timed runs need room too
    size = max((n for n in alone if n <= half), default=0)
    if not size:
        return {size: (seconds, 0.0) for size, seconds in alone.items()}
    device.begin(0, 0)
    held, found = 1, {}
    while held + size <= half:
        device.extend(0, [0] * size, size)
        device.wait()
        held += size
        yield
    for size, seconds in alone.items():
        later = yield from _timed(device, partial(device.extend, 0, [0], size))
        found[size] = seconds, max(later - seconds, 0.0) / held
    return found


def steps(device: Device, plan: Plan) -> Measuring[dict[StepShape, float]]:
    """Seconds of steps whose rows hold next to nothing."""
    found = {}
    for shape in plan.steps:
        device.begin_all(shape.rows)
        found[shape] = yield from _step_seconds(device, shape, device.slots // device.window)
    return found


def mixed(
    device: Device, plan: Plan, empty: Mapping[StepShape, float]
) -> Measuring[dict[StepShape, float]]:
    """Seconds that tokens of prompts add to steps, which take as long as `empty` says without."""
    if plan.mixed is None:
        return {}
    found, room = {}, (device.slots - plan.mixed.tokens) // device.window
    for shape in plan.mixed_steps:
        device.begin_all(shape.rows)
        taken = yield from _step_seconds(device, shape, room, plan.mixed)
        found[shape] = max(taken - empty[shape], 0.0)
    return found


def part(device: Device, plan: Plan) -> Measuring[Measured]:
    """What the steps and the catching up of a plan take."""
    empty = yield from steps(device, plan)
    beside = yield from mixed(device, plan, empty)
    slopes = (yield from _slopes(device, plan, empty)) if plan.reuses else {}
    costs = {
        shape: Cost(seconds, slopes.get(shape.setting, 0.0)) for shape, seconds in empty.items()
    }
    reads = {}
    for rows, size in plan.catch_ups:
        if rows == 1:
            device.begin_all(1)
            reads[size] = yield from _timed(device, partial(device.catch_up, [0], size))
    return Measured({}, costs, reads, mixed_seconds=beside)


def assumed(plan: Plan, known: Measured) -> Measured:
    """What may be hoped of the programs of a plan before they have run: what a plain one takes.

    None takes less. What is hoped for too much runs soon, and is corrected by its own steps.
    """
    costs, beside = known.step_costs, known.mixed_seconds
    plain = {shape.rows: cost for shape, cost in costs.items() if shape.setting == PLAIN}

    def like(rows: int) -> Cost:
        return plain[min(each for each in plain if each >= rows)]

    reads = {size: like(1).seconds for rows, size in plan.catch_ups if rows == 1}
    added = dict.fromkeys(plan.mixed_steps, min(beside.values())) if beside else {}
    hoped = {shape: like(shape.rows) for shape in plan.steps}
    return Measured({}, hoped, reads, mixed_seconds=added)


def least(one: ChunkCosts, other: ChunkCosts) -> dict[int, tuple[float, float]]:
    """The least that chunks took: no steps correct them."""
    return {size: min(own, other.get(size, own)) for size, own in one.items()}


def _step_seconds(
    device: Device, shape: StepShape, most: int, mixed: PrefillBatch | None = None
) -> Measuring[float]:
    """Seconds of a step within a burst; rows have room for `most` steps."""
    alone = yield from _timed(device, _burst_of(device, shape, 1, mixed), 1, repeats=1)
    steps = steps_of(alone, most // (2 + _REPEATS))
    taken = yield from _timed(device, _burst_of(device, shape, steps, mixed), (most - 2) // steps)
    return taken / steps


def _burst_of(
    device: Device, shape: StepShape, steps: int, mixed: PrefillBatch | None
) -> Callable[[], object]:
    """Steps with trees as deep as there are columns for, which read no token of the `mixed`."""
    depth = shape.width // shape.rows - 1
    given = range(shape.rows), (), [depth] * shape.rows, [False] * shape.rows
    return partial(device.advance, shape, *given, steps, mixed=mixed)


def _slopes(
    device: Device, plan: Plan, empty: Mapping[StepShape, float]
) -> Measuring[dict[str, float]]:
    """Seconds that each token which rows hold adds to a step, by its setting."""
    half = min(plan.longest, _TOKENS) // 2
    size = max((size for size in plan.chunks if size < half), default=0)
    if not size:
        return {}
    device.begin(0, 0)
    for _ in range(half // size):
        device.extend(0, [0] * size, size)
        device.wait()
        yield
    held, found = half // size * size, {}
    for setting in dict.fromkeys(shape.setting for shape in plan.steps):
        shape = max(each for each in plan.steps if each.setting == setting)
        for row in reversed(range(shape.rows)):
            device.copy(0, row, held, 0)
        device.assign_all(shape.rows)
        most = (device.slots - held) // device.window
        later = yield from _step_seconds(device, shape, most)
        found[setting] = max(later - empty[shape], 0.0) / (held * shape.rows)
    return found


def _timed(
    device: Device,
    run: Callable[[], object],
    most: int = _MOST_REPEATS,
    repeats: int = _REPEATS,
) -> Measuring[float]:
    """The median of how long a program takes, in seconds, but for its first run.

    It runs `repeats` times at least and no more than `most`, for which rows must have room.
    """
    run()
    device.wait()
    yield
    found: list[float] = []
    most = min(most, _MOST_REPEATS)
    while len(found) < repeats or (len(found) + 1 < most and sum(found) < _SECONDS):
        start = time.perf_counter()
        run()
        device.wait()
        found.append(time.perf_counter() - start)
        yield
    return float(np.median(found))
