"""Held-out estimates of what a draft, or a pool, is worth: chains along the target's own text."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32

from specjax.base.sampling import largest
from specjax.models.transformer import Model
from train.collect import Collected
from train.loop import Metrics
from train.step import log_probs_of, sequence_logits

TOP = 5
_ROWS = 32


class View(NamedTuple):
    """What a model says at each step of a continuation, all earlier tokens being the target's.

    `top` holds its most likely tokens, `log_probs` its log probability of the row's next token at
    the row's temperature (at 1 for greedy rows).
    """

    top: Int[np.ndarray, "N S k"]
    log_probs: Float[np.ndarray, "N S"]


class HeldOut(NamedTuple):
    """Held-out rows, and the target's log probability of their tokens (`View.log_probs`)."""

    rows: Collected
    log_p: Float[np.ndarray, "N S"]


def hold_out(target: Model, rows: Collected) -> HeldOut:
    """`rows` with the target's own view of them."""
    return HeldOut(rows, view(target, rows).log_probs)


def view(model: Model, rows: Collected) -> View:
    """What `model` says at each step of `rows`, in float32."""
    starts = range(0, len(rows.tokens), _ROWS)
    columns = rows.columns.astype(np.int32)
    parts = [
        _view(model, rows.tokens[at : at + _ROWS], rows.temperature[at : at + _ROWS],
              columns[at : at + _ROWS])
        for at in starts
    ]  # fmt: skip
    top, log_probs = (
        np.concatenate([np.asarray(p) for p in ps]) for ps in zip(*parts, strict=True)
    )
    return View(top, log_probs)


@jax.jit
def _view(
    model: Model,
    tokens: Int32[Array, "B T"] | Int32[np.ndarray, "B T"],
    temperature: Float[Array, " B"] | Float[np.ndarray, " B"],
    columns: Int32[Array, "B S"] | Int32[np.ndarray, "B S"],
) -> tuple[Int32[Array, "B S k"], Float[Array, "B S"]]:
    rows, length = tokens.shape
    logits = sequence_logits(model, jnp.asarray(tokens), jnp.dtype("float32"))
    logits = logits.T.reshape(rows, length, -1)
    logits = jnp.take_along_axis(logits, jnp.asarray(columns)[..., None] - 1, axis=1)
    chosen = jnp.take_along_axis(jnp.asarray(tokens), jnp.asarray(columns), axis=1)
    probs = log_probs_of(logits, chosen, jnp.asarray(temperature))
    return largest(logits, TOP)[1], probs


def matched_run(match: Bool[np.ndarray, "N S"], depth: int) -> Int[np.ndarray, "N S"]:
    """How many steps in a row match from each step on, at most `depth`."""
    run, lengths = np.zeros(len(match), np.int64), np.zeros(match.shape, np.int64)
    for step in reversed(range(match.shape[1])):
        run = np.where(match[:, step], run + 1, 0)
        lengths[:, step] = np.minimum(run, depth)
    return lengths


def walk(accepted: Int[np.ndarray, "N S"], length: Int[np.ndarray, " N"], depth: int) -> float:
    """Tokens per step of greedy decoding that accepts `accepted[n, s]` tokens from step s on.

    Exact for chains of `depth` and for unions of them: a step at s emits the accepted tokens and
    one more. Steps whose chain would reach past the row's `length` are left out.
    """
    tokens = steps = 0
    for row, end in zip(accepted, length, strict=True):
        at = 0
        while at + depth <= end:
            at, steps = at + int(row[at]) + 1, steps + 1
        tokens += at
    return tokens / max(steps, 1)


def sampled_chain(
    log_p: Float[np.ndarray, "N S"],
    log_q: Float[np.ndarray, "N S"],
    length: Int[np.ndarray, " N"],
    depth: int,
) -> tuple[float, float]:
    """Acceptance of one token, and tokens per step of a chain of `depth`, on sampled rows.

    A chain's first d tokens are accepted with probability Σ Π min(p, q) over all paths, which is
    the mean of Π min(1, q/p) along paths drawn from p: such are the rows. Steps start anywhere
    within the rows' `length` with equal weight.
    """
    ratio = np.exp(np.minimum(log_q - log_p, 0.0))
    windows = np.lib.stride_tricks.sliding_window_view(ratio, depth, axis=1)
    whole = np.arange(windows.shape[1]) + depth <= length[:, None]
    alive = np.arange(ratio.shape[1]) < length[:, None]
    if not whole.any():
        return 0.0, 1.0
    return (
        float(ratio[alive].mean()),
        1 + float(np.cumprod(windows[whole], axis=-1).sum(axis=-1).mean()),
    )


def estimates(heldout: HeldOut, own: View, earlier: list[View], depth: int) -> Metrics:
    """Figures of one draft, and of the pool that it makes with the `earlier` ones.

    `agreement` is the share of greedy steps where its most likely token is the target's.
    """
    rows, greedy = heldout.rows, heldout.rows.temperature == 0
    text = rows.where(greedy)
    found: Metrics = _greedy("", text, [own.top[greedy]], depth)
    accept, chain = sampled_chain(
        heldout.log_p[~greedy], own.log_probs[~greedy], rows.length[~greedy], depth
    )
    found |= {"sampled_acceptance": accept, "sampled_tokens_per_step": chain}
    if earlier:
        tops = [each.top[greedy] for each in (*earlier, own)]
        found |= _greedy("pool_", text, tops, depth)
    return found


def _greedy(prefix: str, rows: Collected, tops: list[np.ndarray], depth: int) -> Metrics:
    """Greedy figures of one draft or of a pool, each member drafting its own chain."""
    text, alive = rows.following, rows.alive
    match = [(top[..., 0] == text) & alive for top in tops]
    union = np.maximum.reduce([matched_run(m, depth) for m in match])
    covered = cover(text, alive, tops)
    return {
        f"{prefix}agreement": covered[0],
        f"{prefix}tokens_per_step": walk(union, rows.length, depth),
        **{f"{prefix}top{k + 1}": covered[k] for k in range(1, TOP)},
    }


def cover(
    text: Int[np.ndarray, "N S"], alive: Bool[np.ndarray, "N S"], tops: list[np.ndarray]
) -> list[float]:
    """P(the target's token is among the k most likely ones of any draft), k = 1 to `TOP`.

    SpecInfer (arXiv 2305.09781), table 1, for one draft or for a pool.
    """
    hit = np.any([top == text[..., None] for top in tops], axis=0)
    return np.logical_or.accumulate(hit, axis=-1)[alive].mean(axis=0).tolist()


def rank(top: Int[np.ndarray, "N S k"], text: Int[np.ndarray, "N S"]) -> Int[np.ndarray, "N S"]:
    """The place of the target's token among a draft's most likely ones; `k` where it is none."""
    hit = top == text[..., None]
    return np.where(hit.any(axis=-1), hit.argmax(axis=-1), top.shape[-1])
