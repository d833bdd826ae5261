"""Requests that begin alike to one replica, which then holds what they have in common."""

import collections
from collections.abc import Iterator, Mapping

_BLOCK = 64
"""Characters that are remembered together."""
_BLOCKS = 1 << 16
"""That are remembered, those of use longest ago first to go."""
_ENOUGH = 1024
"""Characters, about 256 tokens, that are worth going to where they are known."""


class PrefixIndex:
    """Which replicas got which beginnings of prompts.

    Blocks of a prompt are known by the hash of all that comes before them and their own, as in
    vLLM's prefix cache and in llm-d's scorer of prefixes. What a replica really holds is not asked.

    Args:
      blocks: how many are remembered.
    """

    def __init__(self, blocks: int = _BLOCKS) -> None:
        self._most = blocks
        self._holders: collections.OrderedDict[int, set[str]] = collections.OrderedDict()

    def add(self, prompt: str, replica: str) -> None:
        """Notes that a replica got a prompt."""
        for known, _ in _hashes(prompt):
            self._holders.setdefault(known, set()).add(replica)
            self._holders.move_to_end(known)
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def matched(self, prompt: str) -> dict[str, int]:
        """How many characters of a prompt's beginning each replica got before."""
        found: dict[str, int] = {}
        for known, end in _hashes(prompt):
            holders = self._holders.get(known)
            if not holders:
                break
            found.update(dict.fromkeys(holders, end))
        return found


def _hashes(prompt: str) -> Iterator[tuple[int, int]]:
    """For each block the hash of all up to its end, and where that is."""
    before = 0
    for start in range(0, len(prompt), _BLOCK):
        block = prompt[start : start + _BLOCK]
        before = hash((before, block))
        yield before, start + len(block)


def ranked(
    prompt: str, index: PrefixIndex, running: Mapping[str, int], most_ahead: int
) -> list[str]:
    """The replicas, best first, for a prompt.

    First comes the one that got most of the prompt's beginning before, if that is half of it or
    1,024 characters, and if it has fewer than `most_ahead` requests more than the one that has
    fewest. Then those with fewer requests.

    Args:
      prompt: its beginning.
      index: of those before.
      running: how many requests each replica has.
      most_ahead: requests.
    """
    order = sorted(running, key=lambda replica: running[replica])
    if not order:
        return order
    enough, most = min(_ENOUGH, len(prompt) / 2), running[order[0]] + most_ahead
    matched = index.matched(prompt)
    known = [each for each in order if matched.get(each, 0) >= enough and running[each] < most]
    if known:
        best = max(known, key=lambda replica: matched[replica])
        order.remove(best)
        order.insert(0, best)
    return order


def replicas_for(
    running: float, waiting: float, replicas: int, rows: int, target_waiting: float
) -> float:
    """How many replicas requests need.

    As many as have rows for those that run and those that wait, but for `target_waiting` requests
    that may wait at each replica.

    Args:
      running: requests in rows, of all replicas together.
      waiting: requests without one.
      replicas: that there are.
      rows: of each.
      target_waiting: requests.
    """
    return (running + max(0.0, waiting - target_waiting * replicas)) / rows
