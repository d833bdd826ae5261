"""What a decoder is, apart from its weights."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a LLaMA-shaped decoder. Hashable: it is part of what is compiled.

    `rope_theta` is the base of the rotary frequencies, `norm_eps` the epsilon inside RMSNorm,
    `max_positions` the longest context in tokens, `eos_ids` the tokens that end a text.
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

    @property
    def num_parameters(self) -> int:
        """Number of stored weights."""
        d, f, h = self.hidden_size, self.intermediate_size, self.head_dim
        layer = 2 * d * h * (self.num_heads + self.num_kv_heads) + 3 * d * f + 2 * d
        embeddings = self.vocab_size * d * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * layer + d
