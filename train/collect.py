"""The target's own continuations of corpus prompts."""

from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from specjax.base.sampling import Sampling
from specjax.decoding.generate import generate_jit, on_host
from specjax.decoding.request import prepare
from specjax.models.transformer import Model
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
    key, spread = jax.random.key(settings.seed), Spread()
    placed = spread.everywhere(target)
    numbers = np.arange(settings.batch)
    of_row = np.array(settings.temperatures, np.float32)
    width = settings.prompt_tokens + settings.new_tokens

    def make(chunk: int) -> Arrays:
        rows = chunk * settings.batch + numbers
        texts = [prompts.at(int(row)) for row in rows]
        temperature = of_row[rows % len(of_row)]
        sampling, own = Sampling(temperature=temperature), jax.random.fold_in(key, chunk)
        request = prepare(
            own, target, None, texts, max_new_tokens=settings.new_tokens, sampling=sampling
        )
        request = request._replace(target=placed, rows=spread.rows(request.rows))
        made = on_host(generate_jit(**request._asdict()), settings.new_tokens)
        found = joined(texts, made.tokens, made.lengths, temperature, width)._asdict()
        return {name: found[name] for name in found if name != "steps"}

    make_chunks(stage, folder, num_chunks(settings), make, log)


def joined(
    texts: list[list[int]],
    new: Int[np.ndarray, "N S"],
    length: Int[np.ndarray, " N"],
    temperature: Float[np.ndarray, " N"],
    width: int,
) -> Collected:
    """Rows of `width` tokens: each text, and behind it the target's continuation."""
    tokens = np.zeros((len(texts), width), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
        tokens[row, len(text) : len(text) + new.shape[1]] = new[row]
    prompt = np.array([len(text) for text in texts], np.int32)
    return Collected(tokens, prompt, length.astype(np.int32), temperature, new.shape[1])


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
