"""What is in a compiled program, from its text."""

import collections
import re
from typing import NamedTuple

from specjax.measure.profile import part_of, scopes_of

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
COUNTED = (
    *("while", "conditional", "custom-call", "fusion", "copy"),
    *(f"{name}{part}" for name in COLLECTIVES for part in ("", "-start")),
)
_NO_KERNEL = frozenset((
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"),
    *("call", "after-all", "partition-id", "replica-id", "opt-barrier", "add-dependency"),
    *(f"{name}-done" for name in ("copy", "async", *COLLECTIVES)),
))  # fmt: skip
"""Operations that start nothing on a device by themselves."""

OUTSIDE = "outside the steps"
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = .*?\s([a-z][\w\-]*)\(", re.MULTILINE)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"\b(body|condition|to_apply|calls)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations=\{([^}]*)\}|true_computation=%?([\w.\-]+), "
                       r"false_computation=%?([\w.\-]+))")  # fmt: skip
_TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")


def operations_of(text: str) -> collections.Counter[str]:
    """How often each operation is in an optimized program.

    Those that end in "-start" go on beside others, up to their "-done".
    """
    found = collections.Counter(_OPERATION.findall(text))
    return collections.Counter({name: found[name] for name in COUNTED if found[name]})


def counted_loops_of(text: str) -> int:
    """How many loops are in an optimized program whose length is known as it is compiled."""
    return sum(" while(" in line and "known_trip_count" in line for line in text.splitlines())


class _Instruction(NamedTuple):
    name: str
    operation: str
    line: str


def kernels_of(text: str) -> collections.Counter[str]:
    """How many kernels one run of an optimized program starts on a device, by the part of a step
    that they belong to (`specjax.measure.profile.PARTS`), or `OUTSIDE`.

    A loop's body counts as often as it runs where that is known as it is compiled, and once
    otherwise. Of a branch the longest side counts. On a GPU each is a launch.
    """
    scopes = scopes_of(text)
    bodies: dict[str, list[_Instruction]] = {}
    entry, own = "", None
    for line in text.splitlines():
        if line.startswith("}"):
            own = None
        elif begun := _COMPUTATION.match(line):
            own = bodies.setdefault(begun[2], [])
            entry = begun[2] if begun[1] else entry
        elif own is not None and (said := _OPERATION.match(line)):
            own.append(_Instruction(line.split(" = ")[0].split()[-1].strip("%"), said[1], line))
    known: dict[str, collections.Counter[str]] = {}

    def of(name: str) -> collections.Counter[str]:
        if name not in known:
            known[name] = collections.Counter()
            for each in bodies.get(name, ()):
                known[name] += started(each)
        return known[name]

    def started(each: _Instruction) -> collections.Counter[str]:
        called = dict(_CALLED.findall(each.line))
        if each.operation == "while":
            trips = _TRIPS.search(each.line)
            once = of(called["body"]) + of(called["condition"])
            times = int(trips[1]) if trips else 1
            return collections.Counter({kind: times * count for kind, count in once.items()})
        if each.operation == "conditional":
            sides = ",".join(filter(None, _BRANCHES.findall(each.line)[0])).split(",")
            return max((of(side.strip(" %")) for side in sides), key=collections.Counter.total)
        if each.operation == "call":
            return of(called["to_apply"])
        if each.operation in _NO_KERNEL:
            return collections.Counter()
        return collections.Counter([part_of(scopes.get(each.name, "")) or OUTSIDE])

    return of(entry)
