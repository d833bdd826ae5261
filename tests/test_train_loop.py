"""The loop of training: what is saved and said where numbers stop being finite."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.base.interrupts import ending_at_interrupts
from tests.conftest import tiny_model
from train import run
from train.config import Schedule
from train.loop import Log, fit, steps_done
from train.pretrain import corpus_loss

CONFIG = str(Path(__file__).parent.parent / "configs" / "boost" / "tiny.py")
SAVED = 3
GOOD = corpus_loss("float32")


def strictly(line: str) -> dict:
    """A line of a log, which holds no NaN and no infinity."""

    def refuse(name: str):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(line, parse_constant=refuse)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, capsys):
    """Such a rate spoils the weights in a step or two."""
    asked = [CONFIG, "--folder", str(tmp_path), "--stages", "tokenizer,pretrain"]
    assert run.main([*asked, "pretrain.matrix_rate=1e30"]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.match(r"train.run: (the loss|what would be saved) of the stage 'pretrain' is ", said)
    assert said.endswith("Lower its learning rates and run again.")
    for line in (tmp_path / "log.jsonl").read_text().splitlines():
        strictly(line)


def trained(folder: Path, loss=GOOD, stop_at: int | None = None):
    """A tiny model after six steps, saved after three, or broken off."""
    schedule = Schedule(steps=6, batch=2, save_every=SAVED, warmup_steps=1, decay_steps=1)
    rows = np.random.default_rng(0).integers(0, 64, (6, 2, 9)).astype(np.int32)

    def batch(step: int) -> np.ndarray:
        if step == stop_at:
            raise KeyboardInterrupt
        return rows[step]

    log = Log(folder / "log.jsonl")
    return fit("toy", folder / "toy", tiny_model(), schedule, batch, loss, lambda _: {}, log)


def not_finite(model, rows):
    return GOOD(model, rows) * jnp.inf


def finite_with_a_gradient_that_is_not(model, rows):
    away = model.final_norm - jax.lax.stop_gradient(model.final_norm)
    return GOOD(model, rows) + jnp.sqrt(jnp.square(away)).sum()


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [not_finite, finite_with_a_gradient_that_is_not])
def test_the_last_finite_checkpoint_stays(tmp_path, wrong, capsys):
    with pytest.raises(KeyboardInterrupt), ending_at_interrupts("train.run"):
        trained(tmp_path, stop_at=SAVED + 1)
    step = f"step {SAVED} of the stage 'toy'"
    told = f"train.run: interrupted; the same command goes on from {step}.\n"
    assert told in capsys.readouterr().err
    with pytest.raises(ValueError, match=rf"is nan|is inf.*/toy keeps step {SAVED}\."):
        trained(tmp_path, wrong)
    assert steps_done(tmp_path / "toy") == SAVED
    resumed, whole = trained(tmp_path), trained(tmp_path / "whole")
    for one, other in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.isfinite(one).all()


def test_nothing_that_is_not_finite_is_saved(tmp_path):
    with pytest.raises(ValueError, match=r"is nan.*nothing was saved in"):
        trained(tmp_path, finite_with_a_gradient_that_is_not)
    assert steps_done(tmp_path / "toy") == 0


def test_a_number_that_is_not_finite_is_null_in_the_log(tmp_path):
    log = Log(tmp_path / "log.jsonl")
    log.write("warm", loss=float("nan"), other=float("-inf"), step=3)
    line = strictly((tmp_path / "log.jsonl").read_text())
    assert (line["loss"], line["other"], line["step"]) == (None, None, 3)
