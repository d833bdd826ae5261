"""Where a step's time goes: the operations of the compiled loop, by the part they belong to."""

import itertools
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax

from specjax.decoding.generate import generate_jit
from specjax.decoding.request import Request

TARGET, DRAFTS, DRAFTING = "target's passes", "drafts' passes", "drafting beside them"
DECIDING, COMMITTING, OTHER = "deciding", "committing", "other"
BETWEEN = "between operations"
PARTS: tuple[str, ...] = (TARGET, DRAFTS, DRAFTING, DECIDING, COMMITTING, OTHER, BETWEEN)
_MADE = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (.*)$")
_SCOPE = re.compile(r'op_name="([^"]*)"')
_USED = re.compile(r"%([\w.\-]+)")
_CONTAINERS = ("while", "conditional", "call")


def profile(request: Request) -> dict[str, float]:
    """Seconds of a step that each of `PARTS` takes, from a trace of the request's own loop.

    Together they are the wall time of a traced step. Tracing slows it down, to twice its time and
    more where operations are small, and those the most: a guide to what there is, and no measure
    of what it costs (`benchmarks/step_overhead.py` is one).
    """
    compiled = generate_jit.lower(**request._asdict()).compile()

    def work() -> int:
        made = compiled(target=request.target, drafter=request.drafter, rows=request.rows)
        return int(jax.block_until_ready(made).steps.max())

    work()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            steps = work()
        taken = spent(_events(Path(folder)), scopes_of(compiled.as_text() or ""))
    return {part: taken[part] / steps for part in PARTS}


def scopes_of(program: str) -> dict[str, str]:
    """The scope of every operation of a compiled program's text.

    One that names none, as a dot of one column, has that of what uses it.
    """
    found: dict[str, str] = {}
    of_users: dict[str, str] = {}
    for line in reversed(program.splitlines()):  # users come after what they use
        made = _MADE.match(line)
        if made is None:
            continue
        name, made_of = made.groups()
        own = _SCOPE.search(made_of)
        scope = own.group(1) if own else of_users.get(name)
        if scope is not None:
            found[name] = scope
            of_users |= dict.fromkeys(_USED.findall(made_of), scope)
    return found


def part_of(scope: str) -> str | None:
    """The part that an operation's scope names; None outside the steps."""
    names = scope.split("/")
    if "step" not in names:
        return None
    if "score" in names:
        return TARGET
    if "pass" in names:
        return DRAFTS
    if "draft" in names:
        return DRAFTING
    if "verify" in names:
        return DECIDING
    return COMMITTING if "commit" in names else OTHER


def spent(events: Iterable[tuple[str, float, float]], scopes: dict[str, str]) -> dict[str, float]:
    """Seconds by part of operations, each with its begin and end, on whatever thread.

    An instant belongs to a pass if one runs then, else to the other part that runs (the first of
    `PARTS` if there are several), else, from the first operation to the last, to `BETWEEN`.
    """
    changes = []
    for name, begin, end in events:
        scope = scopes.get(name)
        part = None if scope is None else part_of(scope)
        if part is not None and name.partition(".")[0] not in _CONTAINERS:
            place = PARTS.index(part)
            changes += [(begin, place, 1), (end, place, -1)]
    changes.sort()
    found, running = dict.fromkeys(PARTS, 0.0), [0] * len(PARTS)
    for (at, place, change), (after, _, _) in itertools.pairwise(changes):
        running[place] += change
        now = next((part for part, count in zip(PARTS, running, strict=True) if count), BETWEEN)
        found[now] += after - at
    return found


def _events(folder: Path) -> Iterator[tuple[str, float, float]]:
    """Every traced event's name, and when it began and ended, in seconds."""
    (file,) = folder.glob("**/*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                yield event.name, event.start_ns * 1e-9, event.end_ns * 1e-9
