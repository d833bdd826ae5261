"""DFlash drafts as files of each dialect, and what one computes, slowly, from the definition.

Written down from the published description of the format (arXiv 2602.06036), not from `specjax`:
float64, slot by slot, without a cache.
"""

import dataclasses
import heapq
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HEADS, KV_HEADS, HEAD_DIM, FEATURES = 4, 2, 16, 48
EPSILON = 1e-5
TARGET_LAYERS = 7


@dataclasses.dataclass(frozen=True)
class Dialect:
    """What a draft's files say, and how.

    `targets` are the target's layers whose outputs it reads, `depth` its own count of layers,
    `block` the tokens of a block, the known one included. `nested_block` says `block_size` inside
    `dflash_config`, `nested_theta` says `rope_theta` inside `rope_parameters`.
    """

    targets: tuple[int, ...] = (1, 3, 5)
    depth: int = 2
    block: int = 6
    mask: int = 37
    theta: float = 1_000.0
    model: str = "qwen3"
    biases: bool = False
    nested_block: bool = False
    nested_theta: bool = False
    scale: float = 1.0
    multiplier: float = 1.0
    cap: float | None = None

    @property
    def states(self) -> tuple[int, ...]:
        """The hidden states that it reads, of which number 0 is the output of the embedding."""
        return tuple(each + 1 for each in self.targets)


DIALECTS = {
    "plain": Dialect(),
    "biases": Dialect(biases=True, depth=3),
    "nested": Dialect(
        (0, 2, 3, 5), block=5, mask=11, theta=300.0, nested_block=True, nested_theta=True
    ),
    "llama": Dialect((2, 4), model="llama", depth=3, block=8, nested_theta=True),
    "scaled": Dialect(scale=2.5, multiplier=0.4, cap=3.0),
    "unordered": Dialect((4, 0, 2), biases=True, nested_block=True),
    "short": Dialect((3,), block=2),
}
"""Of a target of 7 layers and of more than 37 tokens."""


def draft_of(dialect: Dialect, vocabulary: int, size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors by the names of the format, for a target of that vocabulary and size."""
    assert dialect.mask < vocabulary
    drawn = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return (drawn.standard_normal(shape) * 1.5 / np.sqrt(shape[-1])).astype(np.float32)

    def norm(count: int) -> np.ndarray:
        return (1 + 0.2 * drawn.standard_normal(count)).astype(np.float32)

    found = {
        "fc.weight": matrix(size, len(dialect.targets) * size),
        "hidden_norm.weight": norm(size),
        "norm.weight": norm(size),
    }
    for layer in range(dialect.depth):
        at = f"layers.{layer}."
        found |= {
            f"{at}input_layernorm.weight": norm(size),
            f"{at}post_attention_layernorm.weight": norm(size),
            f"{at}self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, size),
            f"{at}self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, size),
            f"{at}self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, size),
            f"{at}self_attn.o_proj.weight": matrix(size, HEADS * HEAD_DIM),
            f"{at}self_attn.q_norm.weight": norm(HEAD_DIM),
            f"{at}self_attn.k_norm.weight": norm(HEAD_DIM),
            f"{at}mlp.gate_proj.weight": matrix(FEATURES, size),
            f"{at}mlp.up_proj.weight": matrix(FEATURES, size),
            f"{at}mlp.down_proj.weight": matrix(size, FEATURES),
        }
        if dialect.biases:
            for name in "qkvo":
                count = len(found[f"{at}self_attn.{name}_proj.weight"])
                bias = 0.5 * drawn.standard_normal(count)
                found[f"{at}self_attn.{name}_proj.bias"] = bias.astype(np.float32)
    return found


def write(
    folder: Path, dialect: Dialect, tensors: dict[str, np.ndarray], vocabulary: int, size: int
) -> Path:
    """A draft's folder."""
    config: dict[str, object] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": dialect.model,
        "hidden_size": size,
        "intermediate_size": FEATURES,
        "num_hidden_layers": dialect.depth,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
        "attention_bias": dialect.biases,
        "layer_types": ["full_attention"] * dialect.depth,
        "num_target_layers": TARGET_LAYERS,
        "tie_word_embeddings": False,
    }
    own: dict[str, object] = {
        "mask_token_id": dialect.mask,
        "target_layer_ids": list(dialect.targets),
    }
    if dialect.scale != 1:
        own["input_embedding_scale"] = dialect.scale
    if dialect.multiplier != 1:
        own["output_multiplier"] = dialect.multiplier
    if dialect.cap is not None:
        own["final_logit_softcapping"] = dialect.cap
    (own if dialect.nested_block else config)["block_size"] = dialect.block
    if dialect.nested_theta:
        config["rope_parameters"] = {"rope_theta": dialect.theta, "rope_type": "default"}
    else:
        config["rope_theta"] = dialect.theta
    config["dflash_config"] = own
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


class Twin:
    """A draft that computes whole blocks anew.

    Args:
      dialect: of its tensors.
      tensors: by their names.
      embedding: the target's, a row for each token.
      unembedding: the target's, a row for each token.
    """

    def __init__(
        self,
        dialect: Dialect,
        tensors: dict[str, np.ndarray],
        embedding: np.ndarray,
        unembedding: np.ndarray,
    ) -> None:
        self._dialect = dialect
        self._tensors = {name: np.asarray(each, np.float64) for name, each in tensors.items()}
        self._embedding = np.asarray(embedding, np.float64)
        self._unembedding = np.asarray(unembedding, np.float64)

    def context(self, hidden: np.ndarray) -> np.ndarray:
        """c of the concatenated hidden states of a token."""
        read = self._tensors["fc.weight"] @ np.asarray(hidden, np.float64)
        return normed(read, self._tensors["hidden_norm.weight"])

    def block(self, text: list[int], hidden: np.ndarray) -> np.ndarray:
        """Log probabilities of the tokens that follow a text: a row for each slot but the first.

        Args:
          text: its last token is known, but not yet read by the target.
          hidden: of each token but the last, its concatenated hidden states, as
            `Dialect.states` lists them. Rows beyond are not looked at.
        """
        known = len(text) - 1
        contexts = [self.context(hidden[n]) for n in range(known)]
        tokens = [text[-1]] + [self._dialect.mask] * (self._dialect.block - 1)
        block = [self._dialect.scale * self._embedding[token] for token in tokens]
        for layer in range(self._dialect.depth):
            block = self._run(layer, contexts, block)
        return np.stack([self._likely(x) for x in block[1:]])

    def _run(
        self, layer: int, contexts: list[np.ndarray], block: list[np.ndarray]
    ) -> list[np.ndarray]:
        """What a layer makes of a block. Every slot attends to all of the text and the block."""
        at = f"layers.{layer}."
        ready = [normed(x, self._tensors[f"{at}input_layernorm.weight"]) for x in block]
        keys, values = [], []
        for position, x in enumerate(contexts + ready):
            keys.append(self._heads(at, "k", KV_HEADS, x, position))
            values.append(self._heads(at, "v", KV_HEADS, x, position))
        found = []
        for slot, x in enumerate(block):
            queries = self._heads(at, "q", HEADS, ready[slot], len(contexts) + slot)
            mixed = []
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                weights = attention(queries[head], [each[kv] for each in keys])
                mixed.append(sum(w * v[kv] for w, v in zip(weights, values, strict=True)))
            x = x + self._projected(f"{at}self_attn.o_proj", np.concatenate(mixed))
            z = normed(x, self._tensors[f"{at}post_attention_layernorm.weight"])
            gate = self._projected(f"{at}mlp.gate_proj", z)
            up = self._projected(f"{at}mlp.up_proj", z)
            found.append(x + self._projected(f"{at}mlp.down_proj", gate / (1 + np.exp(-gate)) * up))
        return found

    def _heads(self, at: str, name: str, count: int, x: np.ndarray, position: int) -> np.ndarray:
        """Queries, keys or values. Values are neither normed nor rotated."""
        made = self._projected(f"{at}self_attn.{name}_proj", x).reshape(count, HEAD_DIM)
        if name == "v":
            return made
        weight = self._tensors[f"{at}self_attn.{name}_norm.weight"]
        return np.stack(
            [rotated(normed(head, weight), position, self._dialect.theta) for head in made]
        )

    def _projected(self, name: str, x: np.ndarray) -> np.ndarray:
        made = self._tensors[f"{name}.weight"] @ x
        if f"{name}.bias" in self._tensors:
            made = made + self._tensors[f"{name}.bias"]
        return made

    def _likely(self, x: np.ndarray) -> np.ndarray:
        logits = self._unembedding @ normed(x, self._tensors["norm.weight"])
        logits = logits * self._dialect.multiplier
        if self._dialect.cap is not None:
            logits = self._dialect.cap * np.tanh(logits / self._dialect.cap)
        log_q = logits - logits.max()
        return log_q - np.log(np.exp(log_q).sum())

    def marginal_tree(
        self, text: list[int], hidden: np.ndarray, total: int, width: int
    ) -> set[tuple[int, ...]]:
        """The best-first tree below a text: the paths of its `total` - 1 nodes.

        The text's last token is its root, which `total` counts. The score of a node is the product
        of the probabilities of the tokens of its path, each in the slot of its depth. Each node
        offers its `width` likeliest children.
        """
        likely = self.block(text, hidden)
        offered = [np.argsort(-each, kind="stable")[:width] for each in likely]
        open_ = [(-float(likely[0][t]), order, (int(t),)) for order, t in enumerate(offered[0])]
        heapq.heapify(open_)
        order = len(open_)
        paths: set[tuple[int, ...]] = set()
        while open_ and len(paths) < total - 1:
            cost, _, path = heapq.heappop(open_)
            paths.add(path)
            if len(path) == len(likely):
                continue
            for t in offered[len(path)]:
                child = cost - float(likely[len(path)][t])
                heapq.heappush(open_, (child, order, (*path, int(t))))
                order += 1
        return paths


def attention(query: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
    """What a head of a slot weighs each of those keys."""
    scores = np.array([query @ key for key in keys]) / HEAD_DIM**0.5
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """RMS norm."""
    return weight * x / np.sqrt((x**2).mean() + EPSILON)


def rotated(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Rotary embedding of a head, whose two halves are turned together."""
    half = HEAD_DIM // 2
    angle = position * theta ** (-np.arange(half) / half)
    one, two = x[:half], x[half:]
    return np.concatenate(
        [one * np.cos(angle) - two * np.sin(angle), two * np.cos(angle) + one * np.sin(angle)]
    )
