"""What enters a model's matrices on some texts, a layer after the other."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from specjax.models.config import LayerKind
from specjax.models.layer_weights import LayerWeights
from specjax.models.transformer import Model, embed, layer_of_pass

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TOKENS = 512
"""Of a row, if the context holds so many."""
_MOST_ROWS = 24
_TOGETHER = 4
"""Rows of a pass: what is computed for them is in memory together."""

Gram = Float[np.ndarray, "I I"]
OF_MATRIX = {
    "query": "query", "key": "query", "value": "query", "query_down": "query", "output": "output",
    "gate": "up", "up": "up", "down": "down",
    "expert_gate": "up", "expert_up": "up",
}  # fmt: skip
"""Of which inputs a matrix's are, as `apply_layer` names them; those of experts are of all tokens.
"""


def rows_of(
    texts: Sequence[str], tokenizer: "PreTrainedTokenizerFast", max_positions: int
) -> np.ndarray:
    """Rows of tokens, of texts one behind the other; of many rows 24, from all over the texts.

    Every row begins with the token that every text begins with, if there is one: what a model makes
    of a text's first token is unlike all else, and it attends to it from everywhere.

    Raises:
      ValueError: the texts have no tokens.
    """
    found = [tokenizer(text).input_ids for text in texts]
    begin = [tokenizer.bos_token_id]
    start = begin if all(ids[:1] == begin for ids in found) else []
    tokens = np.asarray([each for ids in found for each in ids[len(start) :]], np.int32)
    if not len(tokens):
        raise ValueError("the texts for calibration have no tokens.")
    size = min(_TOKENS, max_positions, len(start) + len(tokens)) - len(start)
    rows = tokens[: len(tokens) // size * size].reshape(-1, size)
    rows = np.concatenate([np.tile(np.asarray(start, np.int32), (len(rows), 1)), rows], axis=1)
    count = min(len(rows), _MOST_ROWS)
    count -= count % _TOGETHER if count > _TOGETHER else 0
    return rows[np.linspace(0, len(rows) - 1, count).astype(int)]


class Calibration:
    """Texts on their way through a model whose layers come one after the other.

    Args:
      outer: what lies outside the layers.
      tokens: of the texts, rows of equal length.
    """

    def __init__(self, outer: Model, tokens: Int32[np.ndarray, "B T"]) -> None:
        self._outer = outer
        self.tokens = tokens.size
        together = min(_TOGETHER, len(tokens))
        rows = jnp.asarray(tokens).reshape(-1, together, tokens.shape[1])
        self._positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), rows.shape[1:])
        self._columns = [embed(outer, each, self._positions) for each in rows]

    @property
    def columns(self) -> Float[Array, "E C"]:
        """What leaves the layers that they went through."""
        return jnp.concatenate(self._columns, axis=1)

    def grams(self, weights: LayerWeights, layer: int) -> dict[str, Gram]:
        """The sum over the texts' tokens of products of inputs, by the names of `apply_layer`.

        Args:
          weights: of the layer that comes next.
          layer: its number.
        """
        found: dict[str, Gram] = {}
        for columns in self._columns:
            _, own = self._pass(weights, layer, columns, True)
            found = {name: found.get(name, 0) + np.asarray(each) for name, each in own.items()}
        return found

    def advance(self, weights: LayerWeights, layer: int) -> None:
        """Takes the texts through a layer."""
        self._columns = [self._pass(weights, layer, each, False)[0] for each in self._columns]

    def _pass(
        self, weights: LayerWeights, layer: int, columns: Array, wanted: bool
    ) -> tuple[Array, dict[str, Array]]:
        kind = self._outer.config.kind_of(layer)
        return _layer(self._outer, weights, columns, self._positions, kind, wanted)


@partial(jax.jit, static_argnames=("kind", "wanted"))
def _layer(
    outer: Model,
    weights: LayerWeights,
    columns: Float[Array, "E C"],
    positions: Int32[Array, "B T"],
    kind: LayerKind,
    wanted: bool,
) -> tuple[Float[Array, "E C"], dict[str, Float[Array, "I I"]]]:
    """What leaves a layer; where they are wanted, the grams of what enters its matrices instead."""
    inputs: dict[str, Array] = {}
    made, _ = layer_of_pass(outer, weights, kind, columns, positions, None, None, inputs)
    if wanted:  # what leaves is not, so that its product is not computed
        return columns, {name: each @ each.T for name, each in inputs.items()}
    return made, {}
