"""What a decoder is, apart from its weights."""

import dataclasses
import math
from collections.abc import Sequence

from specjax.models.rope import Stretch

Shape = tuple[int, ...]
_MOST = 2**31 - 1
_MOST_LAYERS = 10_000
_LARGEST_BLOCK = 256

MATRICES = ("query", "key", "value", "output", "gate", "up", "down")
"""The matrices of a layer, any of which may have a bias."""

NORMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
"""The norms of a layer: before and after attention, before and after the feed-forward part."""

PRE_NORMS = ("attention_norm", "mlp_norm")

NORM_KINDS = ("rms", "offset_rms", "layer")
"""By root mean square, so with weights that are offsets from 1, or of mean and variance, biased."""

FEATURE_NORMS = (None, "each", "whole")
"""Of hidden states of a target: none, of each of them, or of all of them together."""

BESIDE, INPUT, CONTEXT = FEATURE_WAYS = ("beside", "input", "context")
"""How hidden states of a target enter a draft (see `Features`): as EAGLE-3, layers of multi-token
prediction and DFlash have it."""

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


def check_size(field: str, key: str, value: object) -> None:
    """Checks a number of `ModelConfig`, which its file calls `key`.

    Raises:
      ValueError: it is not an integer above 0, or one that no model has.
    """
    most = _MOST_LAYERS if field == "num_layers" else _MOST
    if type(value) is not int or not 0 < value <= most:
        raise ValueError(f"{key} is {value!r}; it must be an integer from 1 to {most}.")


@dataclasses.dataclass(frozen=True)
class Features:
    """What a draft reads of its target beside tokens: hidden states.

    `layers` are those states by the number of the target's layers before them, and `size` is how
    many numbers each has. With `shares_embedding` and `shares_unembedding` the draft has the
    target's. There are three `way`s:

    * "beside" (EAGLE-3, arXiv 2503.01840): they are projected together to the draft's own size,
      after a norm of `norms`: None, one of "each" or one of the "whole". The layer reads the
      token's embedding and the projection, each normed, beside each other; the projection is what
      the layer's outputs are added to, normed if `normed_residual`. Where the target has read
      nothing, what left the draft's layer stands for the projection, through the last norm if
      `normed_output`.
    * "input" (multi-token prediction, arXiv 2412.19437): they and the token's embedding, each
      normed, are projected together to what enters the layer, which is like any other. The first
      position's embedding is 0. The rest is as above.
    * "context" (DFlash, arXiv 2602.06036): they are projected together and normed; keys and values
      of that are all that layers see of the text. A pass runs a block of `block_size` tokens, the
      last one and `mask_token` again and again, which see each other; each predicts the token of
      its own place.
    """

    layers: tuple[int, ...]
    size: int
    norms: str | None = None
    normed_residual: bool = False
    normed_output: bool = False
    shares_embedding: bool = True
    shares_unembedding: bool = False
    way: str = BESIDE
    block_size: int | None = None
    mask_token: int | None = None

    def __post_init__(self) -> None:
        check_size("size", "the target's hidden size", self.size)
        if self.norms not in FEATURE_NORMS:
            raise ValueError(f"there is no norm of features {self.norms!r}.")
        if self.way not in FEATURE_WAYS:
            raise ValueError(f"hidden states do not enter a draft {self.way!r}.")
        if self.way == CONTEXT:
            self._check_block()

    def _check_block(self) -> None:
        """Checks that there is a block.

        Raises:
          ValueError: it has no two tokens, or the mask is no token.
        """
        size, mask = self.block_size, self.mask_token
        if type(size) is not int or not 2 <= size <= _LARGEST_BLOCK:
            raise ValueError(f"block_size is {size!r}; it must lie from 2 to {_LARGEST_BLOCK}.")
        if type(mask) is not int or mask < 0:
            raise ValueError(f"mask_token_id is {mask!r}; it must be a token.")

    @property
    def width(self) -> int:
        """Numbers of all hidden states of a token."""
        return len(self.layers) * self.size


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a decoder. Hashable: it is part of what is compiled.

    `rope_theta` is the base of the rotary frequencies and `rope_stretch` what they are stretched
    by, `norm_eps` the epsilon inside norms, `max_positions` the longest context in tokens,
    `eos_ids` the tokens that end a text. `family` is the table of `families`.

    Layers: `norm` is the kind of their norms and `norms` says which of `NORMS` they have;
    `activation` is that of the feed-forward part, whose gate only `gated` models have; `biases`
    names the matrices that have one. In `parallel` models both parts of a layer read its input.

    Attention: `head_norms` norms queries and keys before they are rotated, those of each "head" or
    the "whole" width; the first `rotary_dim` features of a head are rotated (None: all).
    `windows` holds for each layer how many tokens up to its own a token sees, None for all of
    them, and is empty where no layer has a window; layers that have one rotate by `window_theta`
    and do not stretch, where it is given. Scores are scaled by `query_scale` (None: the root of
    `head_dim`, inverted) and capped to ±`attention_cap`.

    Ends: embeddings are multiplied by `embedding_scale`; where `position_offset` is given, a table
    of positions is added, position 0 at that row of it; logits are multiplied by `logit_scale` and
    capped to ±`logit_cap`, and of tokens past the first `num_known` they are the lowest there is
    (None: there are none).

    Drafts may know only `draft_vocab_size` of their target's `vocab_size` tokens; they never
    propose others. Their tables have a row for each, and one for all the others together. Those
    that read hidden states of the target have `features` and embeddings of all tokens.
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
    head_norms: str | None = None
    windows: tuple[int | None, ...] = ()
    family: str = "llama"
    norm: str = "rms"
    norms: tuple[str, ...] = PRE_NORMS
    activation: str = "silu"
    gated: bool = True
    parallel: bool = False
    rotary_dim: int | None = None
    window_theta: float | None = None
    query_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    position_offset: int | None = None
    num_known: int | None = None
    draft_vocab_size: int | None = None
    features: Features | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                     "num_kv_heads", "head_dim", "max_positions"):  # fmt: skip
            check_size(name, name, getattr(self, name))
        if self.draft_vocab_size is not None:
            check_size("draft_vocab_size", "draft_vocab_size", self.draft_vocab_size)
            if self.draft_vocab_size >= self.vocab_size:
                raise ValueError(
                    f"draft_vocab_size is {self.draft_vocab_size} and vocab_size "
                    f"{self.vocab_size}; a draft that knows all tokens has no draft_vocab_size."
                )
        for name in ("rope_theta", "window_theta", "norm_eps", "query_scale", "attention_cap",
                     "logit_cap", "logit_scale", "embedding_scale"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value!r}; it must be a finite number above 0.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) is not a multiple of "
                f"num_kv_heads ({self.num_kv_heads})."
            )
        if self.rotated % 2 or not 0 <= self.rotated <= self.head_dim:
            raise ValueError(
                f"head_dim is {self.head_dim} and rotary_dim {self.rotary_dim}; rotary embedding "
                "turns an even number of a head's features."
            )
        read = self.features
        several = read is not None and read.way != CONTEXT and self.num_layers != 1
        if read is not None and (several or self.tie_embeddings):
            raise ValueError(
                "a draft that reads hidden states has one layer and an unembedding of its own; "
                f"this one has {self.num_layers} layers, tied: {self.tie_embeddings}."
            )
        mask = None if read is None else read.mask_token
        if mask is not None and mask >= self.vocab_size:
            raise ValueError(f"mask_token_id is {mask}; vocab_size is {self.vocab_size}.")
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"there are {len(self.windows)} windows for {self.num_layers} layers.")
        for window in self.windows:
            if window is not None and (type(window) is not int or window < 1):
                raise ValueError(f"a layer's window is {window!r}; it must be an integer above 0.")
        for what, names, known in (
            ("matrix", self.biases, MATRICES),
            ("norm", self.norms, NORMS),
            ("kind of norm", (self.norm,), NORM_KINDS),
            ("activation", (self.activation,), ACTIVATIONS),
            ("norm of heads", (self.head_norms,), (None, "head", "whole")),
        ):
            for name in names:
                if name not in known:
                    raise ValueError(
                        f"there is no {what} {name!r}; there are {', '.join(map(str, known))}."
                    )

    @property
    def block_levels(self) -> int | None:
        """Tokens that a draft predicts in one pass, so that its trees have no more levels; None
        where each level takes a pass.
        """
        size = None if self.features is None else self.features.block_size
        return None if size is None else size - 1

    @property
    def rotated(self) -> int:
        """How many features of a head are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def num_parameters(self) -> int:
        """Number of stored weights."""
        layer, outer = (
            sum(math.prod(shape) for shape in shapes.values())
            for shapes in (self.layer_shapes, self.outer_shapes)
        )
        return self.num_layers * layer + outer

    @property
    def layer_shapes(self) -> dict[str, Shape]:
        """The shape of every leaf that a layer has, by its name in `LayerWeights`."""
        d, f = self.hidden_size, self.intermediate_size
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        read = 2 * d if self.features is not None and self.features.way == BESIDE else d
        shapes: dict[str, Shape] = {
            "query": (heads, read), "key": (kv_heads, read), "value": (kv_heads, read),
            "output": (d, heads), "gate": (f, d), "up": (f, d), "down": (d, f),
        }  # fmt: skip
        if not self.gated:
            del shapes["gate"]
        shapes |= {f"{name}_bias": shapes[name][:1] for name in self.biases}
        shapes |= self._norm_shapes(self.norms)
        if self.head_norms is not None:
            whole = self.head_norms == "whole"
            shapes["query_norm"] = (heads if whole else self.head_dim,)
            shapes["key_norm"] = (kv_heads if whole else self.head_dim,)
        return shapes

    @property
    def outer_shapes(self) -> dict[str, Shape]:
        """The shape of every leaf outside the layers, by its name in `Model`."""
        own, read, d = self.draft_vocab_size, self.features, self.hidden_size
        table = self.vocab_size if own is None else own + 1, d
        shapes: dict[str, Shape] = {"embedding": table, **self._norm_shapes(("final_norm",))}
        if read is not None:
            shapes |= {"feature_projection": (d, read.width), "feature_norm": (d,)}
            if read.way == INPUT:
                shapes |= {
                    "feature_projection": (d, read.size + d),
                    "feature_norm": (read.size,),
                    "feature_token_norm": (d,),
                }
            if read.norms == "whole":
                shapes["feature_input_norm"] = (read.width,)
            if read.norms == "each":
                shapes["feature_norms"] = len(read.layers), read.size
            shapes["embedding"] = self.vocab_size, d
            if read.shares_embedding:
                del shapes["embedding"]
        if not self.tie_embeddings:
            shapes["unembedding"] = table
        if read is not None:
            shapes["unembedding"] = self.vocab_size if own is None else own, d
            if read.shares_unembedding:
                del shapes["unembedding"]
        if self.position_offset is not None:
            rows = self.max_positions + self.position_offset
            shapes["position_embedding"] = (rows, self.hidden_size)
        return shapes

    def _norm_shapes(self, names: Sequence[str]) -> dict[str, Shape]:
        ends = ("", "_bias") if self.norm == "layer" else ("",)
        return {name + end: (self.hidden_size,) for name in names for end in ends}
