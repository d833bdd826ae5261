"""What steps cost on machines: measured here, fitted to published numbers, or derived."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specjax.goodput.chunks import PrefillBatch
from specjax.goodput.costs import Cost
from specjax.goodput.policy import DraftSetting, StepShape

_CHUNKS = (8, 32, 128)
"""Tokens of a prompt that are read at a time."""
_LARGEST_CHUNK = 512
"""On an accelerator also so many."""
_CATCH_UPS = (16, 64, 256)
"""Tokens of a row's text that the draft reads at a time."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """How long a machine takes for what an engine does on it.

    Attributes:
      name: says which, and where its numbers are from.
      step: the cost of a step's program.
      chunks: by how many tokens of a prompt it reads, seconds in an empty row, and those that each
        token adds which the row holds.
      catch_up: seconds in which the draft reads tokens of a row, by how many.
      batch: a pass over prompts of several rows, if any, and `batch_seconds` how long it takes.
      mixed: what steps read of prompts, if anything, and `mixed_seconds` how much longer they take.
    """

    name: str
    step: Callable[[StepShape], Cost]
    chunks: Mapping[int, tuple[float, float]]
    catch_up: Mapping[int, float]
    batch: PrefillBatch | None = None
    batch_seconds: float = math.inf
    mixed: PrefillBatch | None = None
    mixed_seconds: float = math.inf

    def costs(self, shapes: Sequence[StepShape]) -> dict[StepShape, Cost]:
        """Those of all of these programs."""
        return {shape: self.step(shape) for shape in shapes}


@dataclasses.dataclass(frozen=True)
class Linear:
    """Coefficients of a step's seconds, which are linear in what it is made of.

    Attributes:
      fixed: of the target's pass.
      column: for each of its columns.
      row: for each row.
      cached: for each token that the rows hold.
      draft_fixed: of a step in which a draft model runs.
      draft_pass: for each of its passes, one after the other.
      draft_row: for each row in a pass.
      draft_cached: for each token that the rows hold.
      overhead: of all this, what the host adds.
      lookup: share of the target's pass that a search in the text takes.
      read: for each token that the draft reads of a text, beside one pass.
      shares_row: whether `draft_row` is for a step, not for each of its passes.
    """

    fixed: float
    column: float
    row: float = 0.0
    cached: float = 0.0
    draft_fixed: float = 0.0
    draft_pass: float = 0.0
    draft_row: float = 0.0
    draft_cached: float = 0.0
    overhead: float = 0.0
    lookup: float = 0.0
    read: float = 0.0
    shares_row: bool = False

    def machine(
        self, name: str, settings: Sequence[DraftSetting], *, accelerator: bool = True
    ) -> Machine:
        """The machine of these coefficients, for steps of these settings."""
        sizes = (*_CHUNKS, _LARGEST_CHUNK) if accelerator else _CHUNKS
        by_name = {setting.name: setting for setting in settings}
        more = 1 + self.overhead
        chunks = {n: (more * (self.fixed + n * self.column), more * self.cached) for n in sizes}
        first = self.draft_fixed + self.draft_pass
        catch_up = {n: more * (first + n * self.read) for n in _CATCH_UPS}
        return Machine(name, lambda shape: self.step(shape, by_name[shape.setting]), chunks,
                       catch_up)  # fmt: skip

    def step(self, shape: StepShape, setting: DraftSetting) -> Cost:
        """The cost of a step of a setting."""
        target = self.fixed + self.column * shape.width + self.row * shape.rows
        draft = cached = 0.0
        if setting.runs_draft:
            passes = passes_of(setting)
            draft = self.draft_fixed + self.draft_pass * passes
            draft += self.draft_row * shape.rows * (1 if self.shares_row else passes)
            cached = self.draft_cached
        elif setting.nodes:
            draft = self.lookup * target
        more = 1 + self.overhead
        return Cost(more * (target + draft), more * (self.cached + cached))


def passes_of(setting: DraftSetting) -> int:
    """Passes of the draft one after the other: one a token of a chain; a best-first tree grows
    from many of its nodes at once, so that it is taken to need one for each doubling of its nodes.
    """
    return setting.depth if setting.drawn else setting.nodes.bit_length()


def measured(report: Mapping[str, Any], name: str = "a server's report") -> Machine:
    """The machine on which a server runs, by what `GET /debug/speculation` gives.

    Raises:
      ValueError: of a step, if the server has no such program.
    """
    more = "seconds_per_cached_token"
    rows = {
        StepShape(each["setting"], each["rows"], each["width"]): Cost(each["seconds"], each[more])
        for each in report["costs"]
    }
    chunks = {each["tokens"]: (each["seconds"], each[more]) for each in report["chunks"]}
    catch_up = {each["tokens"]: each["seconds"] for each in report["catch_ups"]}

    def step(shape: StepShape) -> Cost:
        if shape not in rows:
            raise ValueError(f"{name} has no program {shape}; it has {len(rows)} others.")
        return rows[shape]

    return Machine(name, step, chunks, catch_up)


def processor(settings: Sequence[DraftSetting]) -> Machine:
    """A target of 100M parameters in bfloat16 on two cores of a processor.

    Coefficients near those that the engine measured with the bundled pair, inflated, on 2026-11-24:
    3.4 ms a step of one row, 13 ms one of 32 columns.
    """
    own = Linear(fixed=3.1e-3, column=3.2e-4, cached=6e-7, draft_fixed=1e-4, draft_pass=2.5e-4,
                 draft_row=6e-5, draft_cached=6e-7, lookup=0.02, read=3e-5)  # fmt: skip
    return own.machine("100M on two cores of a processor, fitted to what was measured", settings,
                       accelerator=False)  # fmt: skip


def llama_8b_on_h100(settings: Sequence[DraftSetting]) -> Machine:
    """Llama-3.1-8B with an EAGLE draft on one H100: TurboSpec's published fit (arXiv 2406.14066).

    In milliseconds: the target 4.859e-5 a cached token + 1.844e-2 a column − 4.331e-2 a row + 6.939
    (R² 0.964); the draft 2.897e-6 a cached token + 4.387e-5 a scheduled one (its columns here) +
    0.4522 a pass + 5.528e-3 a row + 0.4471; the host 5 % of that; n-gram lookup 4 % of the target.
    Assumptions of ours: that the fit holds for trees as it does for chains, and up to 64 rows (its
    coefficient of rows is negative, an artefact of the fit); and that the draft reads a text at the
    cost of its scheduled tokens.
    """
    own = Linear(
        fixed=6.939e-3, column=1.844e-5, row=-4.331e-5, cached=4.859e-8, draft_fixed=4.471e-4,
        draft_pass=4.522e-4, draft_row=5.528e-6, draft_cached=2.897e-9, overhead=0.05, lookup=0.04,
        read=4.387e-8, shares_row=True,
    )  # fmt: skip
    return own.machine("Llama-3.1-8B on H100, TurboSpec's published fit", settings)


def grown_8b_on_h100(settings: Sequence[DraftSetting]) -> Machine:
    """The bundled pair grown to 7.67B parameters on one H100, as an engine measured its programs.

    In bfloat16 with jax 0.11.2, 2026-11-26: a plain step takes 6.4 to 6.6 ms with 1 to 32 columns;
    one of a chain of 7 takes 7.36 ms with 8 columns and 8.32 with 256, and between them no more
    than 2 % off the line; chunks of a prompt 5.2, 5.1, 5.4 and 9.3 ms for 8, 32, 128 and 512
    tokens. Assumptions of ours: each pass of the draft takes the same; a cached token takes what
    its 131,072 bytes take at 80 % of 3.35 TB/s; the draft reads a text in a pass; prompts of four
    rows are read together in what a chunk of as many tokens takes, and 256 tokens of them add to a
    step what they add to a chunk of 128.
    """
    own = Linear(fixed=6.5e-3, column=3.9e-6, cached=4.9e-8, draft_pass=1.2e-4)
    made = own.machine("8B on one H100, as its engine measured it", settings)
    chunks = {8: (5.2e-3, 0.0), 32: (5.1e-3, 0.0), 128: (5.4e-3, 0.0), 512: (9.3e-3, 0.0)}
    return dataclasses.replace(
        made, chunks=chunks, batch=PrefillBatch(4, 128, 512), batch_seconds=9.3e-3,
        mixed=PrefillBatch(4, 256, 256), mixed_seconds=256 * (9.3e-3 - 5.4e-3) / (512 - 128),
    )  # fmt: skip


def llama_8b_on_v5e(settings: Sequence[DraftSetting], chips: int = 4) -> Machine:
    """Llama-3.1-8B with a draft of one layer on TPU v5e, by a roofline; nothing of it is measured.

    Assumptions: weights of 16 GB (bfloat16) and the KV cache (131,072 bytes a token: 32 layers, 8
    heads of 128, keys and values) are spread evenly over the chips and read once a pass at 819 GB/s
    each, which takes the time; each column costs 2 · 8e9 operations at 197e12 a second and chip,
    not hidden behind the reading (so it is a little pessimistic); communication takes 10 µs for
    each of two sums a layer; the draft has 0.75e9 parameters (a layer and the output), 1.5 GB, and
    4,096 bytes of cache a token; the host adds 2 %; a lookup is free.
    """
    bandwidth, compute, sums = 819e9 * chips, 197e12 * chips, 10e-6
    own = Linear(
        fixed=16e9 / bandwidth + 64 * sums, column=2 * 8e9 / compute, cached=131072 / bandwidth,
        draft_pass=1.5e9 / bandwidth + 2 * sums, draft_row=2 * 0.75e9 / compute,
        draft_cached=4096 / bandwidth, overhead=0.02, read=2 * 0.75e9 / compute,
    )  # fmt: skip
    return own.machine(f"Llama-3.1-8B on {chips} chips of TPU v5e, by a roofline", settings)
