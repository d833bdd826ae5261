"""The loop every stage runs: resume, step, measure, save."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState
from jaxtyping import Array
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from specjax.base.interrupts import if_interrupted
from specjax.base.progress import Shown
from specjax.models.config import ModelConfig
from specjax.models.transformer import Model
from train.config import Schedule
from train.parallel import Spread
from train.report import flops_per_token, matmul_rate
from train.step import Loss, create_state, train_step

Metrics = dict[str, float | int | str]


class Log:
    """Metrics as JSON lines in `file`, and as sentences on the console.

    A number that is not finite is null in the file.
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.file = file
        self.console = Console(stderr=True)

    def write(self, stage: str, **metrics: float | int | str) -> None:
        """One line of metrics of a stage."""
        line = {"stage": stage, "time": round(time.time(), 1), **metrics}
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v
                  for k, v in line.items()}  # fmt: skip
        with self.file.open("a") as out:
            out.write(json.dumps(finite, allow_nan=False) + "\n")
        shown = " ".join(
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in metrics.items()
        )
        self.console.print(f"[bold]{stage}[/bold] {shown}", highlight=False)


def fit(
    stage: str,
    folder: Path,
    model: Model,
    schedule: Schedule,
    batch: Callable[[int], Any],
    loss: Loss,
    measure: Callable[[Model], Metrics],
    log: Log,
    passes: int = 1,
) -> Model:
    """`model` after `schedule.steps` steps on `batch(step)`, resumed from the last checkpoint.

    Equal arguments give equal weights, interrupted or not: batches depend on the step alone.
    `measure` gives the metrics printed every `evaluate_every` steps and at the end. With several
    devices every one takes its share of a batch's rows. `passes` is how many of the model a loss
    has.

    Raises:
      ValueError: a loss, a weight or a moment is not finite. What was saved before stays.
    """
    if not schedule.steps:
        return model
    spread, options = Spread(), ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    with ocp.CheckpointManager(folder.absolute(), options=options) as manager:
        state, start = _resume(manager, create_state(model, schedule))
        state = spread.everywhere(state)
        with progress_bar(log.console) as progress:
            if_interrupted(lambda: f"the same command goes on from {_place(stage, folder)}")
            task = progress.add_task(
                stage, total=schedule.steps, completed=start, began=start, note=""
            )
            pace = _Pace(stage, folder, model.config, schedule, passes)
            for step in range(start, schedule.steps):
                rows = batch(step)
                if step == start and (sentence := spread.uneven(rows)):
                    log.write(stage, note=sentence)
                state, value = train_step(state, spread.rows(rows), loss)
                _check_finite(stage, folder, step + 1, manager, float(value), "the loss")
                pace.add(value, rows)
                last = step + 1 == schedule.steps
                progress.update(task, advance=1, note=f"loss {float(value):.3f}")
                if (step + 1) % schedule.evaluate_every == 0 or last:
                    figures = pace.figures(step + 1)
                    log.write(stage, **figures, **measure(_model(spread.together(state))))
                    pace.restart()
                if (step + 1) % schedule.save_every == 0 or last:
                    size = float(_size((state.params, state.opt_state)))
                    _check_finite(stage, folder, step + 1, manager, size, "what would be saved")
                    manager.save(step + 1, args=ocp.args.StandardSave(_arrays(state)))
        manager.wait_until_finished()
    return _model(spread.together(state))


@jax.jit
def _size(kept: Any) -> Array:
    """The largest magnitude of all numbers; not finite if one of them is not."""
    leaves = [leaf for leaf in jax.tree.leaves(kept) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.stack([jnp.abs(leaf).max() for leaf in leaves]).max()


def _check_finite(
    stage: str, folder: Path, step: int, manager: ocp.CheckpointManager, value: float, what: str
) -> None:
    if math.isfinite(value):
        return
    kept = manager.latest_step()
    raise ValueError(
        f"{what} of the stage {stage!r} is {value} at step {step}, so training ended; "
        + (f"{folder} keeps step {kept}. " if kept else f"nothing was saved in {folder} yet. ")
        + "Lower its learning rates and run again."
    )


class _Pace:
    """Losses and speed since the last line of the log."""

    def __init__(
        self, stage: str, folder: Path, config: ModelConfig, schedule: Schedule, passes: int
    ) -> None:
        self._where, self._config, self._schedule = folder.name, config, schedule
        self._stage, self._passes = stage, passes
        self.restart()

    def restart(self) -> None:
        self._losses: list[Any] = []
        self._flops, self._tokens, self._began = 0.0, 0, time.perf_counter()

    def add(self, loss: Any, rows: Any) -> None:
        self._losses.append(loss)
        for length, tokens in token_counts(rows):
            self._tokens += tokens
            self._flops += self._passes * tokens * flops_per_token(self._config, length)

    def figures(self, step: int) -> Metrics:
        """What a line of the log says of the steps since the last: loss, speed, time left."""
        mean = float(np.mean([float(value) for value in self._losses]))
        seconds = time.perf_counter() - self._began
        left = (self._schedule.steps - step) * seconds / len(self._losses)
        return {
            "where": self._where,
            "step": step,
            "loss": mean,
            "tokens_per_second": self._tokens / seconds,
            "matmul_share": self._flops / seconds / matmul_rate(self._schedule.dtype),
            "seconds": seconds,
            "seconds_left": left,
        }


def finished(stage: str, folder: Path, model: Model, schedule: Schedule) -> Model:
    """The weights that a whole `fit` of a model shaped like `model` left in `folder`.

    Raises:
      ValueError: it has not finished.
    """
    done = steps_done(folder)
    if not schedule.steps:
        return model
    if done != schedule.steps:
        raise ValueError(
            f"{folder} holds {done} of {schedule.steps} steps; run the stage {stage!r} first."
        )
    with ocp.CheckpointManager(folder.absolute()) as manager:
        state, _ = _resume(manager, create_state(model, schedule))
    return _model(state)


def _model(state: TrainState) -> Model:
    params: Any = state.params
    return params["model"]


def _arrays(state: TrainState) -> dict[str, Any]:
    leaves = jax.tree.leaves((state.step, state.params, state.opt_state))
    return {f"leaf{i:04d}": leaf for i, leaf in enumerate(leaves)}


def _resume(manager: ocp.CheckpointManager, state: TrainState) -> tuple[TrainState, int]:
    latest = manager.latest_step()
    if latest is None:
        return state, 0
    wanted = _arrays(state)
    found = manager.restore(latest, args=ocp.args.StandardRestore(wanted))
    tree = jax.tree.structure((state.step, state.params, state.opt_state))
    # not bound to a device, like a fresh state, so that both run the same compiled step
    leaves = [jnp.asarray(np.asarray(found[name])) for name in sorted(wanted)]
    step, params, opt_state = jax.tree.unflatten(tree, leaves)
    return state.replace(step=step, params=params, opt_state=opt_state), latest


def token_counts(batch: Any) -> list[tuple[int, int]]:
    """Sequence length and number of tokens of a batch's parts: its int32 leaves are tokens."""
    leaves = [leaf for leaf in jax.tree.leaves(batch) if leaf.dtype == np.int32]
    return [(leaf.shape[1], int(leaf.size)) for leaf in leaves]


def steps_done(folder: Path) -> int:
    """The step of the last whole checkpoint that `fit` left in `folder`; 0 where there is none."""
    found = folder.iterdir() if folder.is_dir() else ()
    return max((int(each.name) for each in found if each.name.isdigit()), default=0)


def _place(stage: str, folder: Path) -> str:
    return f"step {steps_done(folder):,} of the stage {stage!r}"


def progress_bar(console: Console) -> Shown:
    """A bar with a count, a `note` and the time left; lines where there is no terminal."""
    return Shown(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=console,
    )
