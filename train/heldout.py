"""Held-out estimates of what a draft, or a pool, is worth: chains along the target's own text."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32

from specjax.model import Model
from train.collect import Collected
from train.loop import Metrics
from train.step import sequence_logits

_TOP = 5
_ROWS = 32


class View(NamedTuple):
    """What a model says at each step of a continuation, all earlier tokens being the target's.

    `top` holds its most likely tokens, `log_law` its log probability of the row's next token at
    the row's temperature (at 1 for greedy rows).
    """

    top: Int[np.ndarray, "N S k"]
    log_law: Float[np.ndarray, "N S"]


class HeldOut(NamedTuple):
    """Held-out rows, and the target's log probability of their tokens (`View.log_law`)."""

    rows: Collected
    log_p: Float[np.ndarray, "N S"]


def hold_out(target: Model, rows: Collected) -> HeldOut:
    """`rows` with the target's own view of them."""
    return HeldOut(rows, view(target, rows).log_law)


def following(rows: Collected) -> Int[np.ndarray, "N S"]:
    """The target's token of every step."""
    return rows.tokens[:, rows.prompt_tokens :]


def view(model: Model, rows: Collected) -> View:
    """What `model` says at each step of `rows`, in float32."""
    starts = range(0, len(rows.tokens), _ROWS)
    parts = [
        _view(model, rows.tokens[at : at + _ROWS], rows.temperature[at : at + _ROWS],
              rows.prompt_tokens)
        for at in starts
    ]  # fmt: skip
    top, log_law = (np.concatenate([np.asarray(p) for p in ps]) for ps in zip(*parts, strict=True))
    return View(top, log_law)


@partial(jax.jit, static_argnames="prompt_tokens")
def _view(
    model: Model,
    tokens: Int32[Array, "B T"] | Int32[np.ndarray, "B T"],
    temperature: Float[Array, " B"] | Float[np.ndarray, " B"],
    prompt_tokens: int,
) -> tuple[Int32[Array, "B S k"], Float[Array, "B S"]]:
    rows, length = tokens.shape
    logits = sequence_logits(model, jnp.asarray(tokens), jnp.dtype("float32"))
    logits = logits.T.reshape(rows, length, -1)[:, prompt_tokens - 1 : -1]
    scale = jnp.where(jnp.asarray(temperature) > 0, temperature, 1)[:, None, None]
    law = jax.nn.log_softmax(logits / scale, axis=-1)
    chosen = jnp.asarray(tokens)[:, prompt_tokens:, None]
    return lax.top_k(logits, _TOP)[1], jnp.take_along_axis(law, chosen, axis=-1)[..., 0]


def matched_run(match: Bool[np.ndarray, "N S"], depth: int) -> Int[np.ndarray, "N S"]:
    """How many steps in a row match from each step on, at most `depth`."""
    run, lengths = np.zeros(len(match), np.int64), np.zeros(match.shape, np.int64)
    for step in reversed(range(match.shape[1])):
        run = np.where(match[:, step], run + 1, 0)
        lengths[:, step] = np.minimum(run, depth)
    return lengths


def walk(accepted: Int[np.ndarray, "N S"], depth: int) -> float:
    """Tokens per step of greedy decoding that accepts `accepted[n, s]` tokens from step s on.

    Exact for chains of `depth` and for unions of them: a step at s emits the accepted tokens and
    one more. Steps whose chain would reach past the row's end are left out.
    """
    tokens = steps = 0
    for row in accepted:
        at = 0
        while at + depth <= len(row):
            at, steps = at + int(row[at]) + 1, steps + 1
        tokens += at
    return tokens / max(steps, 1)


def sampled_chain(
    log_p: Float[np.ndarray, "N S"], log_q: Float[np.ndarray, "N S"], depth: int
) -> tuple[float, float]:
    """Acceptance of one token, and tokens per step of a chain of `depth`, on sampled rows.

    A chain's first d tokens are accepted with probability Σ Π min(p, q) over all paths, which is
    the mean of Π min(1, q/p) along paths drawn from p: such are the rows. Steps start anywhere
    with equal weight.
    """
    ratio = np.exp(np.minimum(log_q - log_p, 0.0))
    windows = np.lib.stride_tricks.sliding_window_view(ratio, depth, axis=1)
    return float(ratio.mean()), 1 + float(np.cumprod(windows, axis=-1).sum(axis=-1).mean())


def estimates(heldout: HeldOut, own: View, earlier: list[View], depth: int) -> Metrics:
    """Figures of one draft, and of the pool that it makes with the `earlier` ones.

    `agreement` is the share of greedy steps where its most likely token is the target's.
    """
    greedy = heldout.rows.temperature == 0
    text = following(heldout.rows)[greedy]
    found: Metrics = _greedy("", text, [own.top[greedy]], depth)
    accept, chain = sampled_chain(heldout.log_p[~greedy], own.log_law[~greedy], depth)
    found |= {"sampled_acceptance": accept, "sampled_tokens_per_step": chain}
    if earlier:
        tops = [each.top[greedy] for each in (*earlier, own)]
        found |= _greedy("pool_", text, tops, depth)
    return found


def _greedy(
    prefix: str, text: Int[np.ndarray, "N S"], tops: list[np.ndarray], depth: int
) -> Metrics:
    """Greedy figures of one draft or of a pool, each member drafting its own chain."""
    match = [top[..., 0] == text for top in tops]
    union = np.maximum.reduce([matched_run(m, depth) for m in match])
    hit = np.any([top == text[..., None] for top in tops], axis=0)
    cover = np.logical_or.accumulate(hit, axis=-1).mean(axis=(0, 1))
    return {
        f"{prefix}agreement": float(np.any(match, axis=0).mean()),
        f"{prefix}tokens_per_step": walk(union, depth),
        **{f"{prefix}top{k + 1}": float(cover[k]) for k in range(1, _TOP)},
    }
