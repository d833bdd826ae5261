"""Runs of the shipped `generate` over prompts: tokens per step, and tokens a second."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from specjax.base.sampling import Sampling
from specjax.decoding.generate import Generation, generate
from specjax.decoding.request import prepare
from specjax.draft import Drafter, ExpansionDrafter
from specjax.measure import timing
from specjax.models.transformer import Model
from specjax.trees.construction import DRAWN
from specjax.verify.rules import AUTO, MULTI_STEP, NAIVE
from train.collect import Collected, joined

Shape = tuple[tuple[int, ...], ...]
"""The widths of every member's tree."""

Row = dict[str, Any]


class Task(NamedTuple):
    """Prompts, new tokens a prompt, rows a pass, the seed, and continuations of a sampled prompt.

    `draws` counts where tokens per step are measured.
    """

    prompts: list[list[int]]
    new_tokens: int
    rows: int
    seed: int
    draws: int = 1


def continuations(target: Model, task: Task, temperature: float) -> Collected:
    """The target's own continuations of the prompts."""
    made = _generate(target, None, task, temperature, NAIVE.name)
    width = max(len(prompt) for prompt in task.prompts) + task.new_tokens
    same = np.full(len(task.prompts), temperature, np.float32)
    return joined(task.prompts, made.tokens, made.lengths, same, width)


def measured(
    target: Model,
    drafts: Sequence[Model],
    shape: Shape,
    task: Task,
    temperature: float,
    rule: str = MULTI_STEP.name,
    children: str = DRAWN,
) -> Row:
    """Tokens per step and mean nodes a step of a pool with a shape, over all prompts.

    `spread` is the standard error of tokens per step, from the differences between prompts;
    None for a single one.
    """
    drafter = ExpansionDrafter.of(drafts, shape, children)
    tokens, steps, nodes = counted(target, drafter, task, temperature, rule)
    rate = tokens.sum() / steps.sum()
    left = tokens - rate * steps  # of a ratio estimate
    count = len(left)
    error = np.sqrt(count / max(count - 1, 1) * np.square(left).sum()) / steps.sum()
    return {
        "tokens_per_step": float(rate),
        "spread": float(error) if count > 1 else None,
        "mean_nodes": float(nodes.sum() / steps.sum()),
        "prompts": count,
        "draws": task.draws if temperature else 1,
    }


class Counts(NamedTuple):
    """Emitted tokens, steps and nodes of each prompt, all its draws together."""

    tokens: Int[np.ndarray, " N"]
    steps: Int[np.ndarray, " N"]
    nodes: Int[np.ndarray, " N"]


def counted(
    target: Model, drafter: Drafter | None, task: Task, temperature: float, rule: str
) -> Counts:
    """What every prompt took; a greedy one is drawn once."""
    draws = task.draws if temperature else 1
    repeated = task._replace(prompts=task.prompts * draws)
    made = _generate(target, drafter, repeated, temperature, rule)
    fields = (made.lengths, made.steps, made.nodes)
    return Counts(*(np.reshape(field, (draws, -1)).sum(axis=0) for field in fields))


def _generate(
    target: Model, drafter: Drafter | None, task: Task, temperature: float, rule: str
) -> Generation:
    """All prompts, `rows` at a time; what fills a batch up is not counted.

    Every batch has the longest prompt in it, so that all of them run the same program.
    """
    longest = max(task.prompts, key=len)
    parts, size = [], task.rows - 1
    for start in range(0, len(task.prompts), size):
        prompts = task.prompts[start : start + size]
        made = generate(
            jax.random.fold_in(jax.random.key(task.seed), start),
            target,
            drafter,
            [*prompts, *[longest] * (task.rows - len(prompts))],
            max_new_tokens=task.new_tokens,
            sampling=Sampling(temperature=temperature),
            verify=rule,
        )
        own = slice(len(prompts))
        parts.append((made.tokens[own], made.lengths[own], made.steps[own], made.nodes[own]))
    return Generation(*(np.concatenate(field) for field in zip(*parts, strict=True)))


def speeds(
    target: Model,
    drafters: Mapping[str, ExpansionDrafter | None],
    task: Task,
    temperature: float,
) -> dict[str, float]:
    """Tokens a second of each drafter, one prompt at a time; the better of two rounds a prompt.

    All drafters have a prompt before the next one, so that a slow minute of the machine is shared.
    """
    tokens, seconds = dict.fromkeys(drafters, 0.0), dict.fromkeys(drafters, 0.0)
    sampling = Sampling(temperature=temperature)
    for number, prompt in enumerate(task.prompts):
        key = jax.random.fold_in(jax.random.key(task.seed), number)
        runs: dict[str, list[tuple[Generation, float]]] = {name: [] for name in drafters}
        requests = {
            name: prepare(
                *(key, target, drafter, [prompt]),
                max_new_tokens=task.new_tokens,
                sampling=sampling,
                verify=AUTO if drafter is None else MULTI_STEP.name,
            )
            for name, drafter in drafters.items()
        }
        for name in drafters:
            timing.warm_up(requests[name])
        for _ in range(2):
            for name in drafters:
                runs[name].append(timing.timed(requests[name]))
        for name, two in runs.items():
            best, took = min(two, key=lambda run: run[1])
            tokens[name] += float(best.lengths.sum())
            seconds[name] += took
    return {name: tokens[name] / seconds[name] for name in drafters}
