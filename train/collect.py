"""The target's own continuations of corpus prompts."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from specjax.base.sampling import Sampling
from specjax.decoding.generate import generate_jit, on_host
from specjax.decoding.request import prepare
from specjax.engine.request import Logprob
from specjax.models.transformer import Model
from train.chunks import Arrays, is_made, load_chunks, make_chunks
from train.config import Collect, Evaluation
from train.data import Prompts, Stream
from train.loop import Log
from train.parallel import Spread
from train.served import Continuation, EngineRows, requests_of

Texts: TypeAlias = list[list[int]]
Temperatures: TypeAlias = Float[np.ndarray, " N"]
NewTokens: TypeAlias = Int[np.ndarray, "N S"]
Lengths: TypeAlias = Int[np.ndarray, " N"]
Asked: TypeAlias = Callable[[int], tuple[Texts, Temperatures]]
Continued: TypeAlias = Callable[[int], tuple[NewTokens, Lengths, list[list[Logprob]]]]


class Keep(NamedTuple):
    """What is done with the log probabilities of a chunk's rows, `top_k` likeliest tokens each,
    before the chunk is written; only an engine's rows have them.
    """

    top_k: int
    keep: Callable[[int, "Collected", list[list[Logprob]]], None]


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
    engine: EngineRows | None = None,
    likeliest: Keep | None = None,
) -> None:
    """Fills `folder` with continuations of prompts from `stream`, by plain decoding.

    Prompt and temperature of a row and its random numbers depend on `settings` alone. With an
    `engine` of the target its rows make them, else `generate_jit` does, batch by batch.

    Raises:
      ValueError: prompt and continuation exceed the target's context.
    """
    prompts = Prompts(stream, settings.prompt_tokens, settings.seed)
    numbers = np.arange(settings.batch)
    of_row = np.array(settings.temperatures, np.float32)
    width = settings.prompt_tokens + settings.new_tokens

    def asked(chunk: int) -> tuple[Texts, Temperatures]:
        rows = chunk * settings.batch + numbers
        return [prompts.at(int(row)) for row in rows], of_row[rows % len(of_row)]

    if engine is None:
        continued = _in_batches(target, settings, asked)
    else:
        count = num_chunks(settings)
        missing = [chunk for chunk in range(count) if not is_made(folder, chunk)]
        top_k = None if likeliest is None else likeliest.top_k
        continued = _in_rows(engine, settings, asked, missing, top_k)

    def make(chunk: int) -> Arrays:
        (texts, temperature), (new, length, logprobs) = asked(chunk), continued(chunk)
        rows = joined(texts, new, length, temperature, width)
        if likeliest is not None:
            likeliest.keep(chunk, rows, logprobs)
        found = rows._asdict()
        return {name: found[name] for name in found if name != "steps"}

    make_chunks(stage, folder, num_chunks(settings), make, log)


def _in_batches(target: Model, settings: Collect | Evaluation, asked: Asked) -> Continued:
    """Continuations of a chunk's prompts, of a batch each."""
    key, spread = jax.random.key(settings.seed), Spread()
    placed = spread.everywhere(target)

    def continued(chunk: int) -> tuple[NewTokens, Lengths, list[list[Logprob]]]:
        texts, temperature = asked(chunk)
        sampling, own = Sampling(temperature=temperature), jax.random.fold_in(key, chunk)
        request = prepare(
            own, target, None, texts, max_new_tokens=settings.new_tokens, sampling=sampling
        )
        request = request._replace(target=placed, rows=spread.rows(request.rows))
        made = on_host(generate_jit(**request._asdict()), settings.new_tokens)
        return made.tokens, made.lengths, []

    return continued


def _in_rows(
    engine: EngineRows,
    settings: Collect | Evaluation,
    asked: Asked,
    missing: list[int],
    top_k: int | None,
) -> Continued:
    """Continuations of the `missing` chunks in turn; the next is asked for before one has ended."""
    ahead: dict[int, Future[list[Continuation]]] = {}

    def ask(chunk: int) -> None:
        first = chunk * settings.batch
        if chunk not in ahead:
            ahead[chunk] = engine.ask(
                requests_of(*asked(chunk), settings.new_tokens, first, settings.seed, top_k)
            )

    def continued(chunk: int) -> tuple[NewTokens, Lengths, list[list[Logprob]]]:
        at = missing.index(chunk)
        for each in missing[at : at + 2]:
            ask(each)
        made = ahead.pop(chunk).result()
        new = np.zeros((len(made), settings.new_tokens), np.int32)
        for row, text in enumerate(made):
            new[row, : len(text.ids)] = text.ids
        length = np.array([len(text.ids) for text in made], np.int32)
        return new, length, [text.logprobs for text in made]

    return continued


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


def has_all(folder: Path, settings: Collect | Evaluation) -> bool:
    """Whether `collect` has left all in `folder`."""
    return all(is_made(folder, chunk) for chunk in range(num_chunks(settings)))


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
