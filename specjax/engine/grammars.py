"""The programs whose steps hold rows to grammars.

They are the programs of steps once more, which ask the host for masks; so that requests without a
grammar pay nothing for those that have one, and a server that is never asked for one compiles none.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable

from specjax.base import grammars
from specjax.engine.device import Device, Plan
from specjax.engine.sequence import Sequence as RequestSequence
from specjax.goodput.policy import PLAIN, Decision, StepShape

_logger = logging.getLogger(__name__)


class GrammarPrograms:
    """Compiles, from when they are first wanted on, in a thread of its own.

    Args:
      device: of the engine.
      plan: of its programs, of which there may be more later.
      wake: lets the engine's thread take a turn; called from any thread.
    """

    def __init__(self, device: Device, plan: Plan, wake: Callable[[], None]) -> None:
        self._device, self._plan, self._wake = device, plan, wake
        self._first, *_ = _widest_first(plan.steps)
        self._to_compile: queue.SimpleQueue[StepShape | None] = queue.SimpleQueue()
        self.add(plan.steps)
        self._there: set[StepShape] = set()
        self._thread: threading.Thread | None = None
        self._stops = False
        self.failure: str | None = None

    @property
    def is_ready(self) -> bool:
        """Whether rows with grammars can take steps: those of all rows, at least."""
        return self._first in self._there

    def want(self) -> None:
        """Begins to compile, if nobody has wanted it before."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._compile, name="specjax-grammars", daemon=True
            )
            self._thread.start()

    def add(self, shapes: Iterable[StepShape]) -> None:
        """Steps of these shapes are there without grammars; some may have been before."""
        for shape in _widest_first(shapes):
            self._to_compile.put(shape)

    def stop(self) -> None:
        """Compiles nothing more; waits for what is being compiled, which cannot be ended."""
        self._stops = True
        self._to_compile.put(None)
        if self._thread is not None:
            self._thread.join()

    def _compile(self) -> None:
        while (shape := self._to_compile.get()) is not None:
            if self._stops:
                return
            own = self._plan._replace(steps=(), catch_ups=(), mixed_steps=(), masked_steps=[shape])
            try:
                for _ in self._device.compile(own, 1):
                    pass
            except Exception as error:
                _logger.exception("a step with grammars could not be compiled")
                if not self.is_ready:
                    reason = str(error).partition("\n")[0][:300]
                    self.failure = f"steps with grammars could not be compiled: {reason}"
            else:
                self._there.add(shape)
            self._wake()
            if self.failure is not None:
                return

    def instead(self, decision: Decision) -> Decision:
        """What a step of rows with grammars is made with while its own program is not there yet:
        plain decoding, where an engine has a choice, as that of more rows costs least.
        """
        shape = decision.shape
        if shape in self._there:
            return decision
        able = [each for each in self._there
                if each.rows >= shape.rows and each.setting == self._first.setting]  # fmt: skip
        best = min(able, key=lambda each: (each.rows, -each.width))
        depths = decision.depths if best.setting == shape.setting else (0,) * len(decision.depths)
        return decision._replace(shape=best, depths=depths, reason="grammar", forecast=None)


def _widest_first(steps: Iterable[StepShape]) -> list[StepShape]:
    """Steps in the order in which they are compiled: that in which any row can run comes first."""
    return sorted(steps, key=lambda each: (each.setting != PLAIN, -each.rows, -each.width))


def follow(sequence: RequestSequence) -> int:
    """Begins to follow a sequence's text through its grammar; gives its number, 0 for none."""
    grammar = sequence.request.grammar
    if grammar is None:
        return 0
    sequence.matcher = grammar.matcher()
    sequence.grammar_number = grammars.add(sequence.matcher)
    return sequence.grammar_number


def forget(sequence: RequestSequence) -> None:
    """Follows a sequence no more."""
    if sequence.grammar_number:
        grammars.remove(sequence.grammar_number)
        sequence.grammar_number = 0
