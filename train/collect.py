"""The target's own continuations of corpus prompts."""

from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from specjax.decode import generate
from specjax.model import Model
from specjax.sampling import Sampling
from train.chunks import Arrays, load_chunks, make_chunks
from train.config import Collect, Evaluation
from train.data import Epochs, Stream
from train.loop import Log


class Collected(NamedTuple):
    """Rows of a prompt and the target's continuation, drawn at the row's `temperature`.

    The first `prompt_tokens` of a row are the prompt's. Rows run past end tokens.
    """

    tokens: Int[np.ndarray, "N T"]
    temperature: Float[np.ndarray, " N"]
    prompt_tokens: int


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
    """Fills `folder` with continuations of prompts cut from `stream`, by plain decoding.

    Prompt and temperature of a row and its random numbers depend on `settings` alone.
    """
    prompts = Epochs(stream, settings.prompt_tokens, settings.seed)
    key = jax.random.key(settings.seed)
    numbers = np.arange(settings.batch)
    of_row = np.array(settings.temperatures, np.float32)

    def make(chunk: int) -> Arrays:
        rows = chunk * settings.batch + numbers
        texts = np.stack([prompts.at(int(row))[: settings.prompt_tokens] for row in rows])
        temperature = of_row[rows % len(of_row)]
        result = generate(
            jax.random.fold_in(key, chunk),
            target,
            None,
            texts.tolist(),
            max_new_tokens=settings.new_tokens,
            sampling=Sampling(temperature=temperature),
            stop_at_eos=False,
        )
        tokens = np.concatenate([texts, result.tokens], axis=1).astype(np.int32)
        return {"tokens": tokens, "temperature": temperature}

    make_chunks(stage, folder, num_chunks(settings), make, log)


def load_collected(stage: str, folder: Path, settings: Collect | Evaluation) -> Collected:
    """What `collect` left in `folder`.

    Raises:
      ValueError: it has not finished.
    """
    found = load_chunks(stage, folder, num_chunks(settings))
    return Collected(found["tokens"], found["temperature"], settings.prompt_tokens)
