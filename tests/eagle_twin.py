"""EAGLE-3 heads as files of each dialect, and what one computes, slowly, from the definition.

Written down from the published description of the format, not from `specjax`: float64, token by
token, without a cache.
"""

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

HEADS, KV_HEADS, HEAD_DIM, FEATURES = 4, 2, 16, 48
EPSILON, THETA = 1e-5, 10_000.0


@dataclasses.dataclass(frozen=True)
class Dialect:
    """What a head's files say, and how.

    `own` is how many of the target's tokens it knows (None: all), `layers` the hidden states that
    it reads as transformers counts them; `named` how the file names them.
    """

    layers: tuple[int, ...]
    named: str | None = None
    prefix: str = "midlayer."
    own: int | None = 40
    own_embedding: bool = False
    norms: str | None = None
    normed_residual: bool = False
    normed_output: bool = False


DIALECTS = {
    "EAGLE": Dialect((2, 3, 4)),
    "SpecForge": Dialect((1, 3, 5), "outputs"),
    "speculators": Dialect(
        (0, 2, 6), "states", "layers.0.", own_embedding=True, norms="whole", normed_residual=True
    ),
    "3.1": Dialect((2, 3, 4), "outputs", norms="each", normed_output=True),
    "all tokens": Dialect((2, 3, 4), own=None),
}
"""Of a target of 7 layers, whose defaults are 2, 3 and 4."""


def head_of(dialect: Dialect, vocabulary: int, size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors by the names of the dialect, for a target of that vocabulary and size."""
    drawn = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return (drawn.standard_normal(shape) * 1.5 / np.sqrt(shape[-1])).astype(np.float32)

    def norm(count: int) -> np.ndarray:
        return (1 + 0.2 * drawn.standard_normal(count)).astype(np.float32)

    known = dialect.own or vocabulary
    at, width = dialect.prefix, len(dialect.layers) * size
    found = {
        "fc.weight": matrix(size, width),
        f"{at}input_layernorm.weight": norm(size),
        f"{at}hidden_norm.weight": norm(size),
        f"{at}post_attention_layernorm.weight": norm(size),
        f"{at}self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, 2 * size),
        f"{at}self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * size),
        f"{at}self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * size),
        f"{at}self_attn.o_proj.weight": matrix(size, HEADS * HEAD_DIM),
        f"{at}mlp.gate_proj.weight": matrix(FEATURES, size),
        f"{at}mlp.up_proj.weight": matrix(FEATURES, size),
        f"{at}mlp.down_proj.weight": matrix(size, FEATURES),
        "norm.weight": norm(size),
        "lm_head.weight": 3 * matrix(known, size),
    }
    if dialect.own is not None:
        ids = np.sort(drawn.permutation(vocabulary)[: dialect.own])
        found["d2t"] = ids - np.arange(dialect.own)
        found["t2d"] = np.isin(np.arange(vocabulary), ids)
    if dialect.own_embedding:
        found["embed_tokens.weight"] = matrix(vocabulary, size)
    if dialect.norms == "whole":
        found["input_norm.weight"] = norm(width)
    if dialect.norms == "each":
        for number in range(len(dialect.layers)):
            found[f"fc_norm.{number}.weight"] = norm(size)
    return found


def write(
    folder: Path, dialect: Dialect, tensors: dict[str, np.ndarray], vocabulary: int, size: int
) -> Path:
    """A head's folder."""
    shape = {
        "hidden_size": size,
        "intermediate_size": FEATURES,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "rms_norm_eps": EPSILON,
        "max_position_embeddings": 16,
        "vocab_size": vocabulary,
        "hidden_act": "silu",
        "model_type": "llama",
        "tie_word_embeddings": False,
    }
    config: dict[str, object] = {"draft_vocab_size": dialect.own or vocabulary}
    ids = list(dialect.layers)
    if dialect.named == "states":
        config |= {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": shape,
            "eagle_aux_hidden_state_layer_ids": ids,
            "norm_before_residual": dialect.normed_residual,
            "norm_before_fc": dialect.norms == "whole",
        }
    else:
        config |= shape | {"architectures": ["LlamaForCausalLM"]}
    if dialect.named == "outputs":
        config["architectures"] = ["LlamaForCausalLMEagle3"]
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [each - 1 for each in ids]}
        config |= {"fc_norm": dialect.norms == "each", "norm_output": dialect.normed_output}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


class Twin:
    """A head that computes whole sequences anew.

    Args:
      dialect: of its tensors.
      tensors: by their names.
      embedding: the target's.
    """

    def __init__(
        self, dialect: Dialect, tensors: dict[str, np.ndarray], embedding: np.ndarray
    ) -> None:
        self._dialect = dialect
        self._tensors = {name: np.asarray(each, np.float64) for name, each in tensors.items()}
        self._embedding = self._tensors.get(
            "embed_tokens.weight", np.asarray(embedding, np.float64)
        )

    def _layer(self, name: str) -> np.ndarray:
        return self._tensors[f"{self._dialect.prefix}{name}.weight"]

    def projected(self, hidden: np.ndarray) -> np.ndarray:
        """g of the concatenated hidden states of a token."""
        if self._dialect.norms == "whole":
            hidden = normed(hidden, self._tensors["input_norm.weight"])
        if self._dialect.norms == "each":
            parts = np.split(hidden, len(self._dialect.layers))
            hidden = np.concatenate(
                [normed(x, self._tensors[f"fc_norm.{n}.weight"]) for n, x in enumerate(parts)]
            )
        return self._tensors["fc.weight"] @ hidden

    def run(
        self, slots: list[tuple[int, np.ndarray, int]], sees: list[list[int]]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """What stands for g below each slot, and its log probabilities over the target's tokens.

        Args:
          slots: each a token, the g beside it and a position.
          sees: the slots that each one attends to, itself included.
        """
        residuals, queries, keys, values = [], [], [], []
        for token, g, position in slots:
            own = normed(g, self._layer("hidden_norm"))
            x = np.concatenate(
                [normed(self._embedding[token], self._layer("input_layernorm")), own]
            )
            residuals.append(own if self._dialect.normed_residual else g)
            for found, name, count in (
                (queries, "q", HEADS), (keys, "k", KV_HEADS), (values, "v", KV_HEADS),
            ):  # fmt: skip
                made = (self._layer(f"self_attn.{name}_proj") @ x).reshape(count, HEAD_DIM)
                found.append(made if name == "v" else rotated(made, position))
        handed, likely = [], []
        for at, residual in enumerate(residuals):
            mixed = []
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                scores = np.array([queries[at][head] @ keys[n][kv] for n in sees[at]])
                weights = np.exp(scores / HEAD_DIM**0.5 - (scores / HEAD_DIM**0.5).max())
                weights /= weights.sum()
                mixed.append(sum(w * values[n][kv] for w, n in zip(weights, sees[at], strict=True)))
            x = residual + self._layer("self_attn.o_proj") @ np.concatenate(mixed)
            y = normed(x, self._layer("post_attention_layernorm"))
            gate, up = self._layer("mlp.gate_proj") @ y, self._layer("mlp.up_proj") @ y
            out = x + self._layer("mlp.down_proj") @ (gate / (1 + np.exp(-gate)) * up)
            last = normed(out, self._tensors["norm.weight"])
            handed.append(last if self._dialect.normed_output else out)
            likely.append(self._of_target(self._tensors["lm_head.weight"] @ last))
        return handed, likely

    def _of_target(self, logits: np.ndarray) -> np.ndarray:
        log_q = logits - logits.max()
        log_q -= np.log(np.exp(log_q).sum())
        if "d2t" not in self._tensors:
            return log_q
        found = np.full(len(self._embedding), -np.inf)
        found[np.arange(len(log_q)) + self._tensors["d2t"].astype(int)] = log_q
        return found

    def read(self, tokens: list[int], hidden: np.ndarray) -> list[tuple[int, np.ndarray, int]]:
        """The slots of a text: embeddings of all tokens but the first, each beside the g of the
        one before.
        """
        return [(token, self.projected(hidden[n]), n) for n, token in enumerate(tokens[1:])]

    def eagle2(
        self, tokens: list[int], hidden: np.ndarray, total: int, depth: int, width: int
    ) -> set[tuple[int, ...]]:
        """EAGLE-2's tree (arXiv 2406.16858) below a text: the paths of its `total` - 1 nodes."""
        text = self.read(tokens, hidden)
        below = [list(range(n + 1)) for n in range(len(text))]
        handed, likely = self.run(text, below)
        best = np.argsort(-likely[-1], kind="stable")[:width]
        level = [((int(t),), float(likely[-1][t]), [], handed[-1]) for t in best]
        every = list(level)
        slots, sees = list(text), list(below)
        for number in range(depth):
            own = []
            for path, score, above, g in level:
                slots.append((path[-1], g, len(text) + number))
                sees.append([*range(len(text)), *above, len(slots) - 1])
                own.append((path, score, [*above, len(slots) - 1]))
            handed, likely = self.run(slots, sees)
            children = []
            for path, score, above in own:
                at = above[-1]
                for t in np.argsort(-likely[at], kind="stable")[:width]:
                    child = score + float(likely[at][t])
                    children.append(((*path, int(t)), child, above, handed[at]))
            every += children
            level = sorted(children, key=lambda each: -each[1])[:width]
        return {path for path, *_ in sorted(every, key=lambda each: -each[1])[: total - 1]}


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """RMS norm."""
    return weight * x / np.sqrt((x**2).mean() + EPSILON)


def rotated(x: np.ndarray, position: int) -> np.ndarray:
    """Rotary embedding of heads, whose two halves are turned together."""
    half = HEAD_DIM // 2
    angle = position * THETA ** (-np.arange(half) / half)
    one, two = x[:, :half], x[:, half:]
    return np.concatenate(
        [one * np.cos(angle) - two * np.sin(angle), two * np.cos(angle) + one * np.sin(angle)],
        axis=1,
    )


def bfloat16(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same, of 16 bits, as files have them; maps as they are."""
    return {
        name: each.astype(ml_dtypes.bfloat16) if each.dtype == np.float32 else each
        for name, each in tensors.items()
    }
