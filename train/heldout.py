"""Held-out estimates of what a draft, or a pool, is worth: chains along the target's own text."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32

from specjax.base.sampling import largest
from specjax.models.transformer import Model
from train.collect import Collected
from train.heads import logits_after
from train.labels import Labelled
from train.loop import Metrics
from train.step import log_probs_of

TOP = 5
_ROWS, _FEW_ROWS = 32, 16


class View(NamedTuple):
    """What a model says at each step of a continuation, all earlier tokens being the target's.

    `top` holds its most likely tokens, `log_probs` its log probability of the row's next token at
    the row's temperature (at 1 for greedy rows). A head says so of the target's hidden states;
    `deeper` is what it says after so many more levels of its own (see `train.heads`).
    """

    top: Int[np.ndarray, "N S k"]
    log_probs: Float[np.ndarray, "N S"]
    deeper: "Sequence[View]" = ()

    def where(self, rows: Bool[np.ndarray, " N"]) -> "View":
        """What it says along some rows."""
        deeper = [each.where(rows) for each in self.deeper]
        return View(self.top[rows], self.log_probs[rows], deeper)

    def at(self, level: int) -> "View":
        """What it says that many levels below what the target has read."""
        return self.deeper[level - 1] if level and self.deeper else self


class HeldOut(NamedTuple):
    """Held-out rows, and the target's log probability of their tokens (`View.log_probs`)."""

    rows: Collected
    log_p: Float[np.ndarray, "N S"]


def hold_out(target: Model, rows: Collected) -> HeldOut:
    """`rows` with the target's own view of them."""
    return HeldOut(rows, view(target, rows).log_probs)


def view(model: Model, rows: Collected, target: Model | None = None, depth: int = 1) -> View:
    """What `model` says at each step of `rows`, in float32.

    Args:
      model: a draft or a target.
      rows: texts of the target's.
      target: whose hidden states the model reads, if it does.
      depth: levels of what such a model says.

    Returns:
      What it says.
    """
    size = _ROWS if model.config.features is None else max(1, _ROWS // depth)
    columns = rows.columns.astype(np.int32)
    parts = [
        _view(
            model, target, depth, rows.tokens[at : at + size], rows.temperature[at : at + size],
            columns[at : at + size],
        )
        for at in range(0, len(rows.tokens), size)
    ]  # fmt: skip
    first, *deeper = (
        View(
            np.concatenate([np.asarray(top) for top, _ in level]),
            np.concatenate([np.asarray(log_probs) for _, log_probs in level]),
        )
        for level in zip(*parts, strict=True)
    )
    return first._replace(deeper=deeper)


@partial(jax.jit, static_argnames="depth")
def _view(
    model: Model,
    target: Model | None,
    depth: int,
    tokens: Int32[Array, "B T"] | Int32[np.ndarray, "B T"],
    temperature: Float[Array, " B"] | Float[np.ndarray, " B"],
    columns: Int32[Array, "B S"] | Int32[np.ndarray, "B S"],
) -> tuple[tuple[Int32[Array, "B S k"], Float[Array, "B S"]], ...]:
    chosen = jnp.take_along_axis(jnp.asarray(tokens), jnp.asarray(columns), axis=1)

    def said(logits: Float[Array, "V C"]) -> tuple[Int32[Array, "B S k"], Float[Array, "B S"]]:
        by_row = logits.T.reshape(*tokens.shape, -1)
        own = jnp.take_along_axis(by_row, jnp.asarray(columns)[..., None] - 1, axis=1)
        return largest(own, TOP)[1], log_probs_of(own, chosen, jnp.asarray(temperature))

    return tuple(map(said, logits_after(model, jnp.asarray(tokens), target, depth)))


def probs_at(
    model: Model, labelled: Labelled, target: Model | None = None
) -> Float[np.ndarray, "N T k"]:
    """`model`'s log probabilities of the labelled tokens, in float32.

    `target` is whose hidden states it reads, if it does.
    """
    pieces = range(0, len(labelled.tokens), _FEW_ROWS)
    found = [
        _probs_at(
            model, target, labelled.tokens[at : at + _FEW_ROWS], labelled.ids[at : at + _FEW_ROWS]
        )
        for at in pieces
    ]
    return np.concatenate([np.asarray(part) for part in found])


@jax.jit
def _probs_at(
    model: Model,
    target: Model | None,
    tokens: Int32[np.ndarray, "B T"] | Int32[Array, "B T"],
    ids: Array | np.ndarray,
) -> Float[Array, "B T k"]:
    (logits,) = logits_after(model, jnp.asarray(tokens), target, 1)
    logits = logits.T.reshape(*tokens.shape, -1)
    chosen = jnp.take_along_axis(logits, jnp.asarray(ids, jnp.int32), axis=-1)
    return chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def matched_run(match: Sequence[Bool[np.ndarray, "N S"]]) -> Int[np.ndarray, "N S"]:
    """How many steps in a row match from each step on; `match[l]` says so of the l-th of them."""
    whole, lengths = np.ones_like(match[0]), np.zeros(match[0].shape, np.int64)
    for level, own in enumerate(match):
        whole &= np.pad(own, ((0, 0), (0, level)))[:, level:]
        lengths += whole
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
    log_q: Sequence[Float[np.ndarray, "N S"]],
    length: Int[np.ndarray, " N"],
) -> tuple[float, float]:
    """Acceptance of one token, and tokens per step of a chain, on sampled rows.

    A chain's first d tokens are accepted with probability Σ Π min(p, q) over all paths, which is
    the mean of Π min(1, q/p) along paths drawn from p: such are the rows. Steps start anywhere
    within the rows' `length` with equal weight. `log_q[l]` is of a chain's l-th token.
    """
    ratio = [np.exp(np.minimum(own - log_p, 0.0)) for own in log_q]
    starts = max(log_p.shape[1] - len(ratio) + 1, 0)
    windows = np.stack([own[:, at : at + starts] for at, own in enumerate(ratio)], axis=-1)
    whole = np.arange(starts) + len(ratio) <= length[:, None]
    alive = np.arange(log_p.shape[1]) < length[:, None]
    if not whole.any():
        return 0.0, 1.0
    return (
        float(ratio[0][alive].mean()),
        1 + float(np.cumprod(windows[whole], axis=-1).sum(axis=-1).mean()),
    )


def estimates(heldout: HeldOut, own: View, earlier: list[View], depth: int) -> Metrics:
    """Figures of one draft, and of the pool that it makes with the `earlier` ones.

    `agreement` is the share of greedy steps where its most likely token is the target's.
    """
    rows, greedy = heldout.rows, heldout.rows.temperature == 0
    text, sampled = rows.where(greedy), own.where(~greedy)
    found: Metrics = _greedy("", text, [own.where(greedy)], depth)
    accept, chain = sampled_chain(
        heldout.log_p[~greedy], [sampled.at(level).log_probs for level in range(depth)],
        rows.length[~greedy],
    )  # fmt: skip
    found |= {"sampled_acceptance": accept, "sampled_tokens_per_step": chain}
    if earlier:
        views = [each.where(greedy) for each in (*earlier, own)]
        found |= _greedy("pool_", text, views, depth)
    return found


def _greedy(prefix: str, rows: Collected, views: list[View], depth: int) -> Metrics:
    """Greedy figures of one draft or of a pool, each member drafting its own chain."""
    text, alive = rows.following, rows.alive

    def chain(own: View) -> Int[np.ndarray, "N S"]:
        levels = (own.at(level).top[..., 0] for level in range(depth))
        return matched_run([(top == text) & alive for top in levels])

    union = np.maximum.reduce([chain(own) for own in views])
    covered = cover(text, alive, [own.top for own in views])
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
