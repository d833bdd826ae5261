"""Where a step's time goes: the operations of the compiled loop, by the part they belong to."""

import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax

from specjax import decode
from specjax.draft import Drafter
from specjax.model import Model
from specjax.request import Request

TARGET, DRAFTS, DRAFTING = "target's passes", "drafts' passes", "drafting beside them"
DECIDING, COMMITTING, OTHER = "deciding", "committing", "other"
PARTS: tuple[str, ...] = (TARGET, DRAFTS, DRAFTING, DECIDING, COMMITTING, OTHER)
_MADE = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (.*)$")
_SCOPE = re.compile(r'op_name="([^"]*)"')
_USED = re.compile(r"%([\w.\-]+)")
_CONTAINERS = ("while", "conditional", "call")


def profile(target: Model, drafter: Drafter | None, request: Request) -> dict[str, float]:
    """Seconds of a step that each of `PARTS` takes, from a trace of the request's own loop.

    The time of an operation is that of its thread; where several threads work at once, parts
    add up to more than the wall. Tracing slows the loop down, and small operations the most.
    """
    compiled = decode.run.lower(target, drafter, **request._asdict()).compile()
    arguments = {
        name: value for name, value in request._asdict().items()
        if name not in ("rule", "outputs", "slots")
    }  # fmt: skip

    def work() -> int:
        made = jax.block_until_ready(compiled(target, drafter, **arguments))
        return int(made[2].max())

    work()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            steps = work()
        spent = _spent(_events(Path(folder)), scopes_of(compiled.as_text() or ""))
    return {part: spent[part] / steps for part in PARTS}


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
    if "look" in names:
        return TARGET
    if "pass" in names:
        return DRAFTS
    if "guess" in names:
        return DRAFTING
    if "judge" in names:
        return DECIDING
    return COMMITTING if "commit" in names else OTHER


def _spent(events: Iterable[tuple[str, float]], scopes: dict[str, str]) -> dict[str, float]:
    """Seconds by part."""
    spent = dict.fromkeys(PARTS, 0.0)
    for name, seconds in events:
        scope = scopes.get(name)
        part = None if scope is None else part_of(scope)
        if part is not None and name.partition(".")[0] not in _CONTAINERS:
            spent[part] += seconds
    return spent


def _events(folder: Path) -> Iterator[tuple[str, float]]:
    """Every traced event's name and seconds."""
    (file,) = folder.glob("**/*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                yield event.name, event.duration_ns * 1e-9
