"""Drafts that learn to read hidden states of their target (EAGLE-3, arXiv 2503.01840).

Such a draft, a head, learns at each of several levels below what the target has read
(training-time test, section 3.2; see `specjax.draft.levels`).

In training a head holds neither its target's embedding nor which tokens its rows are; see `beside`.
"""

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, UInt16

from specjax.base.pytree import replace
from specjax.checkpoints.feature_drafts import load_feature_draft
from specjax.checkpoints.files import Files
from specjax.draft.levels import logits_by_level
from specjax.models import pruning
from specjax.models.config import ModelConfig
from specjax.models.families.eagle import EAGLE3
from specjax.models.quantized import PackedWeight
from specjax.models.stacking import as_stored
from specjax.models.transformer import Model, trunk
from train.chunks import Arrays, MappedRows, make_chunks, map_rows
from train.config import Head
from train.labels import Labelled, Texts, passes
from train.loop import Log
from train.loss import FORWARD, HARD, divergence
from train.parallel import Spread
from train.step import Loss, sequence_logits

HIDDEN = jnp.dtype("bfloat16")
"""Of hidden states that are kept; half precision would not hold the largest."""
_BITS = np.uint16


class Taught(NamedTuple):
    """What heads learn from in a step: labelled rows with hidden states, and the target's
    embedding.
    """

    parts: tuple[Labelled, ...]
    embedding: Float[Array, "V E"] | PackedWeight


def in_training(whole: ModelConfig) -> ModelConfig:
    """The shape of a head in training: its tokens are the rows of its unembedding."""
    known = whole.draft_vocab_size or whole.vocab_size
    return dataclasses.replace(whole, vocab_size=known, draft_vocab_size=None)


def beside(model: Model, embedding: Float[Array, "V E"] | PackedWeight) -> Model:
    """A head with the embedding of its target.

    One in training then reads its target's tokens, and says its own.
    """
    config, size = model.config, embedding.shape[0]
    known = None if config.vocab_size == size else config.vocab_size
    known = config.draft_vocab_size or known
    own = dataclasses.replace(config, vocab_size=size, draft_vocab_size=known)
    return replace(model, embedding=embedding, config=own)


def begun(first: Model, target: Model, known: Int[np.ndarray, " D"] | None) -> Model:
    """A head in training, `first`, that begins as what of its target has its shapes.

    Its unembedding begins as the target's, of the `known` tokens, with the target's last norm; its
    projection as the last of the hidden states that it reads; its layer as the target's last one,
    which reads them beside a token's embedding. So it begins near what the target says after the
    token before, where a random one knows nothing. The rest of it stays.
    """
    size, config, own = target.config.hidden_size, first.config, target.config
    read = config.features
    if read is None or read.size != config.hidden_size or own.norm != config.norm:
        return first
    assert first.feature_projection is not None
    assert first.unembedding is not None
    projection = jnp.asarray(first.feature_projection).at[:, -size:].set(jnp.eye(size))
    table = target.embedding if target.unembedding is None else target.unembedding
    unembedding = _float(table) if known is None else _float(table)[known]
    changes: dict[str, Any] = {
        "feature_projection": projection,
        "unembedding": unembedding,
        "final_norm": _float(target.final_norm),
    }
    shapes, number = config.layer_shapes(0), own.num_layers - 1
    shapes |= {name: (*shapes[name][:-1], size) for name in ("query", "key", "value")}
    if not target.is_offloaded and shapes == own.layer_shapes(number):
        last, layer = target.layer(number).unfused(), first.layers[0]
        half = {
            name: jnp.asarray(getattr(layer, name)).at[:, size:].set(_float(getattr(last, name)))
            for name in ("query", "key", "value")
        }
        whole = {
            name: _float(getattr(last, name))
            for name in ("output", "gate", "up", "down", "mlp_norm")
        }
        changes["layers"] = (replace(layer, **half, **whole),)
        changes["feature_norm"] = _float(last.attention_norm)
    return replace(first, **changes)


def started(files: Files, target: Model) -> tuple[Model, Int[np.ndarray, " D"] | None]:
    """A head of files as one in training, in float32, and the tokens that it knows (None: all).

    Raises:
      CheckpointError: a file, tensor or key is missing or not supported.
      ValueError: it is of another target, no EAGLE-3 head, or has an embedding of its own.
    """
    whole = as_stored(load_feature_draft(files, target, dtype="float32"))
    read, known = whole.config.features, whole.config.draft_vocab_size
    if whole.config.family != EAGLE3.model_type:
        raise ValueError(f"{files.path} is no EAGLE-3 head, and no other is fine-tuned.")
    assert read is not None
    if not read.shares_embedding:
        raise ValueError(
            f"{files.path} has an embedding of its own; a head in training has its target's."
        )
    ids = None if known is None else pruning.ids_of(np.asarray(whole.row_of), known)
    own = replace(
        whole, embedding=jnp.zeros((1, whole.config.hidden_size)), row_of=None,
        config=in_training(whole.config),
    )  # fmt: skip
    return jax.tree.map(_float, own, is_leaf=lambda leaf: isinstance(leaf, PackedWeight)), ids


def _float(weight: Array | PackedWeight | None) -> Array:
    """A weight in float32."""
    assert weight is not None
    if isinstance(weight, PackedWeight):
        return weight.unpacked()
    return jnp.asarray(weight, jnp.float32)


def logits_after(
    model: Model, tokens: Int32[Array, "B T"], target: Model | None, depth: int
) -> list[Float[Array, "V C"]]:
    """Logits after every token of whole sequences, in float32, `C = B·T` columns.

    Those of a head at `depth` levels, beside its target.
    """
    dtype = jnp.dtype("float32")
    read = model.config.features
    if read is None:
        return [sequence_logits(model, tokens, dtype)]
    assert target is not None
    hidden = jnp.concatenate(_states(target, tokens, read.layers))
    by_token = hidden.T.reshape(*tokens.shape, -1)
    return list(logits_by_level(model, tokens, by_token, depth, dtype))


def head_loss(
    model: Model, batch: Taught, *, loss: str, dtype: str, levels: int, decay: float
) -> Float[Array, ""]:
    """Mean weighted divergence a position and level, in nats a token.

    A level weighs `decay` times as much as the one before, as EAGLE-3's do. Matrix products are in
    `dtype`.
    """
    whole = beside(model, batch.embedding)
    shares = [decay**level for level in range(levels)]
    total = jnp.zeros(())
    for part in batch.parts:
        hidden = jax.lax.bitcast_convert_type(jnp.asarray(part.hidden), HIDDEN)
        tokens, weight = jnp.asarray(part.tokens), jnp.asarray(part.weight)
        known = jnp.arange(tokens.shape[1])
        found = logits_by_level(whole, tokens, hidden, levels, jnp.dtype(dtype))
        for level, (share, logits) in enumerate(zip(shares, found, strict=True)):
            value = divergence(loss, logits, part.ids, part.log_p)
            counted = jnp.where(known > level, weight, 0)
            total += share * jnp.sum(value * counted.reshape(-1))
    return total / (sum(shares) * sum(part.weight.size for part in batch.parts))


@cache
def loss_of(loss: str, dtype: str, head: Head) -> Loss:
    """`head_loss` of such a divergence; the same object for equal arguments."""
    name = FORWARD if loss == HARD else loss
    return partial(head_loss, loss=name, dtype=dtype, levels=head.levels, decay=head.decay)


def one_hot(part: Labelled) -> Labelled:
    """Rows whose labels are their own next tokens: their forward divergence is cross-entropy."""
    following = np.roll(np.asarray(part.tokens), -1, axis=1)[..., None]
    weight = np.array(part.weight)
    weight[:, -1] = 0
    return part._replace(ids=following, log_p=np.zeros(following.shape, np.float32), weight=weight)


def teaching(
    batch: Callable[[int], tuple[Labelled, ...]], target: Model
) -> Callable[[int], Taught]:
    """Batches of labelled rows as those of heads."""
    embedding = Spread().everywhere(target.embedding)
    return lambda step: Taught(batch(step), embedding)


def keep_hidden(
    folder: Path,
    target: Model,
    texts: Callable[[int], Texts],
    count: int,
    layers: tuple[int, ...],
    tokens: int,
    log: Log,
) -> None:
    """Fills `folder` with the target's hidden states along rows, a chunk for each of theirs.

    Args:
      folder: where they go.
      target: whose they are.
      texts: the rows of a chunk.
      count: chunks.
      layers: the hidden states, by the number of layers before them.
      tokens: about so many are read in a pass.
      log: of the run.
    """
    spread = Spread()
    placed = spread.everywhere(target)

    def make(chunk: int) -> Arrays:
        rows = texts(chunk)
        width = len(layers) * target.config.hidden_size
        found = np.zeros((*rows.tokens.shape, width), _BITS)
        for chosen, size, longest in passes(rows.length, rows.tokens.shape[1], tokens):
            own = np.zeros((size, longest), np.int32)
            own[: len(chosen)] = rows.tokens[chosen, :longest]
            made = _hidden(placed, spread.rows(own), layers)
            found[chosen, :longest] = np.asarray(made)[: len(chosen)]
        return {"hidden": found, "tokens": rows.tokens}

    make_chunks("hidden", folder, count, make, log)


def load_hidden(folder: Path, count: int) -> MappedRows:
    """What `keep_hidden` left.

    Raises:
      ValueError: it has not finished.
    """
    return map_rows("label", folder, count, "hidden")


@partial(jax.jit, static_argnames="layers")
def _hidden(
    target: Model, tokens: Int32[np.ndarray, "B T"] | Int32[Array, "B T"], layers: tuple[int, ...]
) -> UInt16[Array, "B T F"]:
    states = jnp.concatenate(_states(target, jnp.asarray(tokens), layers))
    by_token = states.T.reshape(*tokens.shape, -1).astype(HIDDEN)
    return jax.lax.bitcast_convert_type(by_token, jnp.uint16)


def _states(
    target: Model, tokens: Int32[Array, "B T"], layers: tuple[int, ...]
) -> tuple[Float[Array, "E C"], ...]:
    """The target's hidden states after every token of whole sequences, `C = B·T` columns."""
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return trunk(target, tokens, at, None, None, hidden_layers=layers).hidden
