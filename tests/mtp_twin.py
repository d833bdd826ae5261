"""The MTP layer of MiMo as tensors of its target, and what it computes, slowly, from the
definition.

Written down from the published description of the format, not from `specjax`: float64, token by
token, without a cache.
"""

import dataclasses

import numpy as np

PREFIX = "model.mtp_layers.0."


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the layer shares with its target's config."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    features: int = 48
    epsilon: float = 1e-5
    theta: float = 10_000.0


def mtp_of(
    vocabulary: int, size: int, seed: int = 0, shape: Shape = Shape()
) -> dict[str, np.ndarray]:
    """Random tensors by their names in the folder of a target of that vocabulary and size.

    The vocabulary changes nothing: embedding and unembedding are the target's.
    """
    drawn = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return (drawn.standard_normal(shape) * 1.5 / np.sqrt(shape[-1])).astype(np.float32)

    def norm(count: int) -> np.ndarray:
        return (1 + 0.2 * drawn.standard_normal(count)).astype(np.float32)

    def bias(count: int) -> np.ndarray:
        return (0.5 * drawn.standard_normal(count)).astype(np.float32)

    queries, pairs = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found = {
        "token_layernorm.weight": norm(size),
        "hidden_layernorm.weight": norm(size),
        "input_layernorm.weight": norm(size),
        "post_attention_layernorm.weight": norm(size),
        "final_layernorm.weight": norm(size),
        "input_proj.weight": matrix(size, 2 * size),
        "self_attn.q_proj.weight": matrix(queries, size),
        "self_attn.q_proj.bias": bias(queries),
        "self_attn.k_proj.weight": matrix(pairs, size),
        "self_attn.k_proj.bias": bias(pairs),
        "self_attn.v_proj.weight": matrix(pairs, size),
        "self_attn.v_proj.bias": bias(pairs),
        "self_attn.o_proj.weight": matrix(size, queries),
        "mlp.gate_proj.weight": matrix(shape.features, size),
        "mlp.up_proj.weight": matrix(shape.features, size),
        "mlp.down_proj.weight": matrix(size, shape.features),
    }
    return {PREFIX + name: each for name, each in found.items()}


class Twin:
    """An MTP layer that computes whole sequences anew.

    Args:
      tensors: the layer's, by their names; others are not looked at.
      embedding: the target's, a row for each token.
      norm: the weight of the target's final norm.
      unembedding: the target's, a row for each token.
      shape: of the layer.
    """

    def __init__(
        self,
        tensors: dict[str, np.ndarray],
        embedding: np.ndarray,
        norm: np.ndarray,
        unembedding: np.ndarray,
        shape: Shape = Shape(),
    ) -> None:
        self._tensors = {
            name: np.asarray(each, np.float64)
            for name, each in tensors.items()
            if name.startswith(PREFIX)
        }
        self._embedding = np.asarray(embedding, np.float64)
        self._norm = np.asarray(norm, np.float64)
        self._unembedding = np.asarray(unembedding, np.float64)
        self._shape = shape

    def _layer(self, name: str) -> np.ndarray:
        return self._tensors[f"{PREFIX}{name}.weight"]

    def _normed(self, x: np.ndarray, name: str) -> np.ndarray:
        return normed(x, self._layer(name), self._shape.epsilon)

    def read(self, text: list[int], hidden: np.ndarray) -> list[tuple[int, np.ndarray, int]]:
        """The slots of a text: each a token, what stands beside it and a position.

        They are of all tokens but the first, each beside the state after the one before.

        Args:
          text: of at least one token.
          hidden: of each token but the last, the state after the target's last layer, before its
            final norm. Rows beyond are not looked at.
        """
        slots = []
        for n, token in enumerate(text[1:]):
            f = normed(np.asarray(hidden[n], np.float64), self._norm, self._shape.epsilon)
            slots.append((token, f, n))
        return slots

    def run(
        self, slots: list[tuple[int, np.ndarray, int]], sees: list[list[int]]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """What stands beside the token below each slot, and the log probabilities of that token.

        Args:
          slots: each a token, what stands beside it and a position.
          sees: the slots that each one attends to, itself included.
        """
        shape = self._shape
        residuals, queries, keys, values = [], [], [], []
        for token, f, position in slots:
            e = self._embedding[token] if position else np.zeros_like(self._embedding[token])
            both = [self._normed(f, "hidden_layernorm"), self._normed(e, "token_layernorm")]
            x = self._layer("input_proj") @ np.concatenate(both)
            residuals.append(x)
            y = self._normed(x, "input_layernorm")
            for found, name, count in (
                (queries, "q", shape.heads),
                (keys, "k", shape.kv_heads),
                (values, "v", shape.kv_heads),
            ):
                made = self._layer(f"self_attn.{name}_proj") @ y
                made = made + self._tensors[f"{PREFIX}self_attn.{name}_proj.bias"]
                made = made.reshape(count, shape.head_dim)
                found.append(made if name == "v" else rotated(made, position, shape.theta))
        handed, likely = [], []
        for at, residual in enumerate(residuals):
            mixed = []
            for head in range(shape.heads):
                kv = head // (shape.heads // shape.kv_heads)
                weights = attention(queries[at][head], [keys[n][kv] for n in sees[at]])
                mixed.append(sum(w * values[n][kv] for w, n in zip(weights, sees[at], strict=True)))
            x = residual + self._layer("self_attn.o_proj") @ np.concatenate(mixed)
            y = self._normed(x, "post_attention_layernorm")
            gate, up = self._layer("mlp.gate_proj") @ y, self._layer("mlp.up_proj") @ y
            out = x + self._layer("mlp.down_proj") @ (gate / (1 + np.exp(-gate)) * up)
            handed.append(self._normed(out, "final_layernorm"))
            logits = self._unembedding @ handed[-1]
            log_q = logits - logits.max()
            likely.append(log_q - np.log(np.exp(log_q).sum()))
        return handed, likely

    def after(self, text: list[int], hidden: np.ndarray, path: list[int]) -> np.ndarray:
        """Log probabilities of the token that follows a text and a path of drafted tokens.

        Args:
          text: of at least two tokens, without which there is no slot.
          hidden: as for `read`.
          path: drafted tokens below it, none for the first level.
        """
        assert len(text) > 1
        slots = self.read(text, hidden)
        for token in [*path, None]:
            handed, likely = self.run(slots, [list(range(n + 1)) for n in range(len(slots))])
            if token is not None:
                slots.append((token, handed[-1], len(slots)))
        return likely[-1]

    def chain(self, text: list[int], hidden: np.ndarray, length: int) -> list[int]:
        """The likeliest token of each level, below the likeliest ones of the levels above."""
        found: list[int] = []
        for _ in range(length):
            found.append(int(np.argmax(self.after(text, hidden, found))))
        return found


def attention(query: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
    """What a head of a slot weighs each of those keys."""
    scores = np.array([query @ key for key in keys]) / len(query) ** 0.5
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def normed(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    """RMS norm."""
    return weight * x / np.sqrt((x**2).mean() + epsilon)


def rotated(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Rotary embedding of heads, whose two halves are turned together."""
    half = x.shape[1] // 2
    angle = position * theta ** (-np.arange(half) / half)
    one, two = x[:, :half], x[:, half:]
    return np.concatenate(
        [one * np.cos(angle) - two * np.sin(angle), two * np.cos(angle) + one * np.sin(angle)],
        axis=1,
    )
