"""What measurements give: a row each, with units in the names of its fields."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.measure.workload import Temperature
from specjax.methods.method import Setting
from specjax.methods.setting import to_json


@dataclasses.dataclass(frozen=True)
class PhaseSeconds:
    """How the wall seconds of a row were spent.

    Attributes:
      draft_seconds: drafting, and the drafter's part of commits.
      target_seconds: the target's passes.
      other_seconds: verification and commits.
      prefill_seconds: reading the prompts.
      phases_over_loop: the phases, compiled apart, over the loop's wall time; None without a loop.
      step_over_bandwidth_floor: a step over reading the weights once; for plain decoding alone.
    """

    draft_seconds: float
    target_seconds: float
    other_seconds: float
    prefill_seconds: float
    phases_over_loop: float | None
    step_over_bandwidth_floor: float | None = None


@dataclasses.dataclass(frozen=True)
class BenchRow:
    """A setting's generations over a set of prompts.

    Attributes:
      setting: the method with its tree.
      nodes: node slots of the whole tree, the root left out.
      temperature: of all rows, or "mixed".
      batch: rows of a batch.
      dtype: of the target's weights.
      prompts: how many texts were generated.
      new_tokens: emitted tokens of all texts.
      target_steps: target passes of all texts, prefills left out.
      tokens_per_step: emitted tokens over target passes.
      mean_nodes: nodes of a tree, on the average.
      seconds: wall time of all batches.
      tokens_per_second: emitted tokens over wall time.
      plain_tokens_per_second: of the faster plain decoding beside it.
      speedup: over that.
      round_speedups: over plain decoding in the same dtype, of every batch.
      spread: standard deviation of their mean, as a share; None of a single batch.
      passes: target passes of the batches, each of all its rows.
      repeated_8grams: share of 8-grams that an output had before.
      profile: seconds of a traced step by part, if one was traced.
      phases: how the seconds were spent, if that was measured.
      quantization: how the target's matrices are quantized, if they are.
    """

    setting: Setting
    nodes: int
    temperature: Temperature
    batch: int
    dtype: str
    prompts: int
    new_tokens: int
    target_steps: int
    tokens_per_step: float
    mean_nodes: float
    seconds: float
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float
    round_speedups: list[float]
    spread: float | None
    passes: int
    repeated_8grams: float
    profile: Mapping[str, float] | None = None
    phases: PhaseSeconds | None = None
    quantization: str | None = None

    def report(self) -> dict[str, Any]:
        """The row as plain values, without what was not measured."""
        own = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("setting", "profile", "phases")
        }
        found = {
            "method": self.setting.method,
            "label": self.setting.label,
            "setting": to_json(self.setting),
        } | own
        if self.profile:
            found["profile"] = dict(self.profile)
        if self.phases is not None:
            found |= dataclasses.asdict(self.phases)
            if self.phases.step_over_bandwidth_floor is None:
                del found["step_over_bandwidth_floor"]
        return found


@dataclasses.dataclass(frozen=True)
class PassRow:
    """A pass of the target over a tree, below so many cached tokens of one row."""

    nodes: int
    slots: int
    seconds: float
    over_the_first: float
    over_floor: float

    def report(self) -> dict[str, Any]:
        """The row as plain values."""
        return {"what": "pass"} | dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class PlainStepRow:
    """A step of plain decoding inside the compiled loop."""

    slots: int
    seconds: float
    over_floor: float

    def report(self) -> dict[str, Any]:
        """The row as plain values."""
        return {"what": "plain step"} | dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class GenerationRow:
    """Whole generations: a method's, or transformers' with its `versions`."""

    what: str
    temperature: Temperature
    dtype: str
    tokens_per_second: float
    speedup: float
    tokens_per_step: float | None = None
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def report(self) -> dict[str, Any]:
        """The row as plain values, without what was not measured."""
        found = {
            "what": self.what,
            "temperature": self.temperature,
            "dtype": self.dtype,
            "tokens_per_step": self.tokens_per_step,
            "tokens_per_second": self.tokens_per_second,
            "speedup": self.speedup,
        }
        return {name: value for name, value in found.items() if value is not None} | dict(
            self.versions
        )


@dataclasses.dataclass(frozen=True)
class FailedRow:
    """What could not be measured, and why."""

    what: str
    error: str

    def report(self) -> dict[str, Any]:
        """The row as plain values."""
        return dataclasses.asdict(self)


RooflineRow = PassRow | PlainStepRow | GenerationRow | FailedRow
