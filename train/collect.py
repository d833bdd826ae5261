"""The target's own continuations of corpus prompts."""

from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.decode import run
from specjax.model import Model
from specjax.request import prepare
from specjax.sampling import Sampling
from train.chunks import Arrays, load_chunks, make_chunks
from train.config import Collect, Evaluation
from train.data import Prompts, Stream
from train.loop import Log
from train.parallel import Spread


class Collected(NamedTuple):
    """Rows of a prompt and the target's continuation, drawn at the row's `temperature`.

    Row n holds `prompt[n]` tokens, then `length[n]` of the target's, an end token included, then
    nothing (zeros). `steps` is the longest a continuation can be.
    """

    tokens: Int[np.ndarray, "N T"]
    prompt: Int[np.ndarray, " N"]
    length: Int[np.ndarray, " N"]
    temperature: Float[np.ndarray, " N"]
    steps: int

    @property
    def columns(self) -> Int[np.ndarray, "N S"]:
        """Where the target's token of every step stands in its row."""
        return self.prompt[:, None] + np.arange(self.steps)

    @property
    def following(self) -> Int[np.ndarray, "N S"]:
        """The target's token of every step."""
        return np.take_along_axis(self.tokens, self.columns, axis=1)

    @property
    def alive(self) -> Bool[np.ndarray, "N S"]:
        """Which steps the target took."""
        return np.arange(self.steps) < self.length[:, None]

    def where(self, chosen: Bool[np.ndarray, " N"]) -> "Collected":
        """The chosen rows."""
        return Collected(
            self.tokens[chosen],
            self.prompt[chosen],
            self.length[chosen],
            self.temperature[chosen],
            self.steps,
        )


def num_chunks(settings: Collect | Evaluation) -> int:
    """Batches of a collection."""
    return -(-settings.prompts // settings.batch)


def collect(
    stage: str,
    folder: Path,
    target: Model,
    stream: Stream,
    settings: Collect | Evaluation,
    log: Log,
) -> None:
    """Fills `folder` with continuations of prompts from `stream`, by plain decoding.

    Prompt and temperature of a row and its random numbers depend on `settings` alone.

    Raises:
      ValueError: prompt and continuation exceed the target's context.
    """
    prompts = Prompts(stream, settings.prompt_tokens, settings.seed)
    key = jax.random.key(settings.seed)
    numbers = np.arange(settings.batch)
    of_row = np.array(settings.temperatures, np.float32)
    width = settings.prompt_tokens + settings.new_tokens

    def make(chunk: int) -> Arrays:
        rows = chunk * settings.batch + numbers
        texts = [prompts.at(int(row)) for row in rows]
        temperature = of_row[rows % len(of_row)]
        new, length = _continued(
            target, texts, settings.new_tokens, temperature, jax.random.fold_in(key, chunk)
        )
        tokens = np.zeros((len(rows), width), np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
            tokens[row, len(text) : len(text) + settings.new_tokens] = new[row]
        prompt = np.array([len(text) for text in texts], np.int32)
        return {
            "tokens": tokens,
            "prompt": prompt,
            "length": length,
            "temperature": temperature,
        }

    make_chunks(stage, folder, num_chunks(settings), make, log)


def _continued(
    target: Model, texts: list[list[int]], new_tokens: int, temperature: np.ndarray, key: Array
) -> tuple[np.ndarray, np.ndarray]:
    """The target's tokens after the texts, and how many; every device continues its rows."""
    spread, sampling = Spread(), Sampling(temperature=temperature)
    request = prepare(key, target, None, texts, new_tokens, sampling, "auto", True)
    rows = {"prompt", "length", "key", "sampling"}
    arguments = {
        name: spread.rows(value) if name in rows else value
        for name, value in request._asdict().items()
    }
    tokens, length, *_ = run(spread.everywhere(target), None, **arguments)
    return np.asarray(tokens)[:, :new_tokens], np.asarray(length, np.int32)


def load_collected(stage: str, folder: Path, settings: Collect | Evaluation) -> Collected:
    """What `collect` left in `folder`.

    Raises:
      ValueError: it has not finished.
    """
    found = load_chunks(stage, folder, num_chunks(settings))
    return Collected(**found, steps=settings.new_tokens)


def ended(rows: Collected) -> float:
    """The share of continuations that the target ended by itself."""
    return float((rows.length < rows.steps).mean())
