"""What was measured on this machine, kept in the user's cache folder."""

import dataclasses
import datetime
import hashlib
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_kernels.cache import cache_folder
from specjax.base.machine import cpu_digest, cpu_model
from specjax.base.store import Store
from specjax.methods.method import Setting
from specjax.methods.setting import from_json, to_json
from specjax.models.quantized import quantized_as
from specjax.models.transformer import Model
from specjax.parallel.mesh import mesh_of
from specjax.trees.widths import is_number

RUNS = Store("measured.json")
"""Runs of `specjax bench`."""
FINDINGS = Store("gains.json")
"""What drafting gains."""
_MOST_RUNS = 8
"""Runs that are kept of a kind of rows and a temperature, the newest."""


class Measured(NamedTuple):
    """A setting's tokens per second, and how many times plain decoding's every round had.

    A round is a batch of prompts; `ratios` are in the order of the run's rounds.
    """

    setting: Setting
    tokens_per_second: float
    ratios: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run of `specjax bench` measured side by side at a temperature, and when."""

    date: str
    temperature: float
    prompts: int
    measured: tuple[Measured, ...]

    def of(self, setting: Setting) -> Measured | None:
        """What was measured of a setting, if it ran."""
        return next((each for each in self.measured if each.setting == setting), None)


def use_compilation_cache() -> None:
    """Keeps compiled programs in the cache folder, unless the user has named another place.

    Each kind of processor has a folder of its own: jax would load what another compiled, which
    lacks its instructions or has others (checked with jax 0.10.2).

    Without a folder that can be made, programs are kept for as long as the process runs.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        folder = cache_folder()
        if folder is None:
            return
        programs = folder / "programs" / cpu_digest()
        if not _made(programs):
            return
        jax.config.update("jax_compilation_cache_dir", str(programs))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _made(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return True


def setting(target: Model, drafts: Sequence[Model], batch: int, sampled: bool) -> str:
    """The name under which measurements of a pair are kept: machine, versions, models, rows.

    On a mesh also its axes: what is fastest on one device need not be on several.
    """
    models = hashlib.sha256()
    for model in (target, *drafts):
        models.update(repr(model.config).encode())
        models.update(np.asarray(model.final_norm).tobytes())
        for part in jax.tree.leaves(model.embedding):
            models.update(np.asarray(part[:8], np.float32).tobytes())
        for layer in model.layers:  # drafts may be a model without some of its layers
            first = jax.tree.leaves(layer.output)[0][:1]
            models.update(np.asarray(first, np.float32).tobytes())
    parts = (
        jax.devices()[0].device_kind,
        f"{cpu_model()} {cpu_digest()}",
        f"{os.cpu_count()} cores",
        f"jax {jax.__version__}",
        models.hexdigest()[:16],
        str(target.embedding.dtype),
        f"batch {batch}",
        "sampled" if sampled else "greedy",
    )
    if (name := quantized_as(target)) is not None:
        parts += (name,)
    if target.expert_cache is not None:
        parts += (f"{target.expert_cache.num_slots} experts in memory",)
    elif target.is_offloaded:
        parts += (f"{len(target.layers)} layers in memory",)
    if (mesh := mesh_of(target)) is not None:
        parts += tuple(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
    return ", ".join(parts)


def recall(name: str) -> list[Run]:
    """The runs that were kept under `name`, the oldest first; may be empty.

    A file that cannot be read counts as empty, and so does what another version wrote: it is only
    a cache.
    """
    return _understood(RUNS.read()).get(name, [])


def remember(name: str, run: Run) -> Path:
    """Adds a run to those under `name`; gives the file.

    Of each temperature the newest 8 are kept. Other processes that remember wait.

    Raises:
      OSError: there is no cache folder, or it cannot be written.
    """

    def changed(values: dict[str, Any]) -> dict[str, Any]:
        held = _understood(values)
        runs = [*held.get(name, []), run]
        alike = [each for each in runs if each.temperature == run.temperature]
        gone = {id(each) for each in alike[:-_MOST_RUNS]}
        held[name] = [each for each in runs if id(each) not in gone]
        return {key: [_written(each) for each in kept] for key, kept in held.items()}

    return RUNS.change(changed)


def recall_findings(name: str) -> Any:
    """What `remember_findings` was given under `name`, or None."""
    return FINDINGS.read().get(name)


def remember_findings(name: str, values: dict[str, Any]) -> None:
    """Keeps what was measured of a model or a pair, instead of what was there.

    Raises:
      OSError: there is no cache folder, or it cannot be written.
    """
    FINDINGS.change(lambda held: held | {name: values})


def _written(run: Run) -> dict[str, Any]:
    return {
        "date": run.date,
        "temperature": run.temperature,
        "prompts": run.prompts,
        "measured": [
            {
                "setting": to_json(each.setting),
                "tokens_per_second": each.tokens_per_second,
                "spread": spread(each.ratios),
                "ratios": [float(f"{ratio:.5g}") for ratio in each.ratios],
            }
            for each in run.measured
        ],
    }


def spread(ratios: Sequence[float]) -> float | None:
    """The standard deviation of the logarithms of ratios, near which they differ relatively."""
    return statistics.stdev(map(math.log, ratios)) if len(ratios) > 1 else None


def _understood(values: dict[str, Any]) -> dict[str, list[Run]]:
    """All runs that can be understood, by name."""
    listed = {name: runs for name, runs in values.items() if isinstance(runs, list)}
    known = {name: [*filter(None, map(_run, runs))] for name, runs in listed.items()}
    return {name: runs for name, runs in known.items() if runs}


def _run(values: Any) -> Run | None:
    """A run as it was written, less the settings that this version does not know; or None."""
    match values:
        case {
            "date": str(date),
            "temperature": temperature,
            "prompts": int(prompts),
            "measured": [*listed],
        } if _is_date(date) and is_number(temperature) and temperature >= 0:
            measured = filter(None, map(_measured, listed))
            return Run(date, float(temperature), prompts, tuple(measured))
    return None


def _is_date(text: str) -> bool:
    try:
        datetime.datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def _measured(values: Any) -> Measured | None:
    match values:
        case {"setting": held, "tokens_per_second": rate, "ratios": [*ratios]} if all(
            is_number(each) and each > 0 for each in (rate, *ratios)
        ):
            try:
                own = from_json(held, "a measurement")
                return Measured(own, float(rate), tuple(map(float, ratios)))
            except ValueError:
                return None
    return None
