"""Rows of a prompt and its continuation, as `train.collect` leaves them."""

import jax
import numpy as np

from specjax.base.sampling import Sampling
from specjax.decoding.generate import generate
from train.collect import Collected

PROMPT, STEPS = 6, 12


def rows_of(model, count: int, temperature: np.ndarray, seed: int = 0) -> Collected:
    """Continuations by `model` of random prompts."""
    prompts = np.random.default_rng(seed).integers(1, 64, (count, PROMPT)).astype(np.int32)
    result = generate(
        jax.random.key(seed), model, None, prompts.tolist(), max_new_tokens=STEPS,
        sampling=Sampling(temperature=temperature), stop_at_eos=False,
    )  # fmt: skip
    tokens = np.concatenate([prompts, result.tokens], axis=1).astype(np.int32)
    return whole(tokens, temperature)


def whole(tokens: np.ndarray, temperature: np.ndarray) -> Collected:
    """Rows of PROMPT tokens of which no continuation ends early."""
    count, length = tokens.shape
    prompt = np.full(count, PROMPT, np.int32)
    return Collected(tokens, prompt, length - prompt, temperature, length - PROMPT)
