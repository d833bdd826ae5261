"""What a decoder is, apart from its weights."""

import dataclasses

from specjax.rope import Stretch

MATRICES = ("query", "key", "value", "output", "gate", "up", "down")
"""The matrices of a layer, any of which may have a bias."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a LLaMA-shaped decoder. Hashable: it is part of what is compiled.

    `rope_theta` is the base of the rotary frequencies and `rope_stretch` what they are stretched
    by, `norm_eps` the epsilon inside RMSNorm, `max_positions` the longest context in tokens,
    `eos_ids` the tokens that end a text. `biases` names the matrices of a layer that have one;
    with `head_norms` the queries and keys of each head are normed before they are rotated.
    `windows` holds for each layer how many tokens up to its own a token sees, None for all of
    them, and is empty where no layer has a window. `family` is the table of `families`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    max_positions: int = 2048
    eos_ids: tuple[int, ...] = ()
    rope_stretch: Stretch | None = None
    biases: tuple[str, ...] = ()
    head_norms: bool = False
    windows: tuple[int | None, ...] = ()
    family: str = "llama"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                     "num_kv_heads", "head_dim", "max_positions"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) is not a multiple of "
                f"num_kv_heads ({self.num_kv_heads})."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embedding needs an even one.")
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"there are {len(self.windows)} windows for {self.num_layers} layers.")
        for window in self.windows:
            if window is not None and (type(window) is not int or window < 1):
                raise ValueError(
                    f"a layer's window is {window!r}; it must be a whole number above 0."
                )
        for name in self.biases:
            if name not in MATRICES:
                raise ValueError(f"there is no matrix {name!r}; there are {', '.join(MATRICES)}.")

    @property
    def num_parameters(self) -> int:
        """Number of stored weights."""
        d, f, h = self.hidden_size, self.intermediate_size, self.head_dim
        layer = 2 * d * h * (self.num_heads + self.num_kv_heads) + 3 * d * f + 2 * d
        layer += sum(self.rows_of(name) for name in self.biases) + 2 * h * self.head_norms
        embeddings = self.vocab_size * d * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * layer + d

    def rows_of(self, matrix: str) -> int:
        """How many features a matrix of a layer makes."""
        heads = {"query": self.num_heads, "key": self.num_kv_heads, "value": self.num_kv_heads}
        if matrix in heads:
            return heads[matrix] * self.head_dim
        return self.hidden_size if matrix in ("output", "down") else self.intermediate_size
