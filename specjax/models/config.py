"""What a decoder is, apart from its weights."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from specjax.models.rope import Stretch

Shape = tuple[int, ...]
_MOST = 2**31 - 1
_MOST_LAYERS = 10_000
_LARGEST_BLOCK = 256

MATRICES = ("query", "key", "value", "output", "gate", "up", "down")
"""The matrices of a layer, any of which may have a bias."""

EXPERT_MATRICES = ("expert_gate", "expert_up", "expert_down")
"""The matrices of a layer's experts, one of each behind the other."""

LATENT_MATRICES = ("query_down", "query_up")
"""The matrices by which queries are made of fewer numbers (see `Latent`)."""

LATENT_PRODUCTS = ("latent_key", "latent_value")
"""The matrices of heads that would make keys and values of latents."""

PACKABLE = (*MATRICES, *EXPERT_MATRICES, *LATENT_MATRICES)
"""The matrices of a layer that may be held in 8 or 4 bits."""

ROUTERS = ("router", "shared_gate")
"""The matrices by which a layer's experts are chosen and weighed."""

NORMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
"""The norms of a layer: before and after attention, before and after the feed-forward part."""

PRE_NORMS = ("attention_norm", "mlp_norm")

NORM_KINDS = ("rms", "offset_rms", "layer", "unbiased_layer", "offset_layer")
"""By root mean square, or of mean and variance, which are biased but for those called otherwise;
weights may be offsets from 1."""

FEATURE_NORMS = (None, "each", "whole")
"""Of hidden states of a target: none, of each of them, or of all of them together."""

BESIDE, INPUT, CONTEXT = FEATURE_WAYS = ("beside", "input", "context")
"""How hidden states of a target enter a draft (see `Features`): as EAGLE-3, layers of multi-token
prediction and DFlash have it."""

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "squared_relu")

SCORES = ("softmax", "sigmoid")
"""What a router's logits become, by which a token's experts are weighed."""

_MOST_EXPERTS = 4096


def check_size(field: str, key: str, value: object) -> None:
    """Checks a number of `ModelConfig`, which its file calls `key`.

    Raises:
      ValueError: it is not an integer above 0, or one that no model has.
    """
    most = _MOST_LAYERS if field == "num_layers" else _MOST
    if type(value) is not int or not 0 < value <= most:
        raise ValueError(f"{key} is {value!r}; it must be an integer from 1 to {most}.")


class LayerKind(NamedTuple):
    """How a layer's tokens attend: to how many up to their own (None: all), rotated or not."""

    window: int | None
    rotated: bool


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
class Experts:
    """The experts of a mixture's layers: a router chooses some of them for each token.

    A layer has `num_experts`, of `intermediate_size` features each, and a token takes
    `experts_per_token`: those whose logits are highest, or with a `correction_bias` whose scores
    plus that are. They are weighed by their `scores`, as they are or where `norm_topk` as shares of
    their sum, times `routed_scale`. Where there are `num_groups`, experts are taken from the best
    `topk_groups` alone, by the sum of the `group_best` highest in each (DeepSeek, arXiv 2405.04434
    and 2412.19437).

    Beside them every token may take a shared expert of `shared_size` features, with `shared_gate`
    times the sigmoid of a product with a row of weights (Qwen 2). `dense_layers` have no experts.
    With `biased` the router and the experts have biases. Where there is a `swiglu` of a gain `a`
    and a limit `l` (gpt-oss), `down` is of `(min(max(up, -l), l) + 1) * g * sigmoid(a * g)`, `g`
    being `min(gate, l)`.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    scores: str = "softmax"
    norm_topk: bool = True
    routed_scale: float = 1.0
    correction_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    group_best: int = 1
    shared_size: int = 0
    shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()
    biased: bool = False
    swiglu: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        check_size("intermediate_size", "experts' intermediate_size", self.intermediate_size)
        for name, most in (
            ("num_experts", _MOST_EXPERTS),
            ("experts_per_token", self.num_experts),
            ("num_groups", self.num_experts),
            ("topk_groups", self.num_groups),
        ):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name} is {value!r}; it must be an integer from 1 to {most}.")
        if self.num_experts % self.num_groups:
            raise ValueError(f"{self.num_groups} groups do not divide {self.num_experts} experts.")
        each = self.num_experts // self.num_groups
        if self.experts_per_token > self.topk_groups * each:
            raise ValueError(
                f"a token takes {self.experts_per_token} experts; {self.topk_groups} groups of "
                f"{each} have fewer."
            )
        if not 1 <= self.group_best <= each:
            raise ValueError(f"a group's {self.group_best} best are counted; it has {each}.")
        if self.scores not in SCORES:
            raise ValueError(f"there are no scores {self.scores!r}; there are {', '.join(SCORES)}.")
        if type(self.shared_size) is not int or not 0 <= self.shared_size <= _MOST:
            raise ValueError(f"the shared expert has {self.shared_size!r} features.")
        for number in (self.routed_scale, *(self.swiglu or ())):
            if not 0 < number < math.inf:
                raise ValueError(f"experts have {number!r}; it must be a finite number above 0.")


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (MLA; DeepSeek, arXiv 2405.04434): of each token `rank` numbers
    (`kv_lora_rank`) stand for the keys and values of all heads.

    Of a head's query `unrotated` features (`qk_nope_head_dim`) are not rotated, and it takes
    `value` numbers (`v_head_dim`). Queries are made of `query_rank` numbers (`q_lora_rank`), or
    where that is None as elsewhere.
    """

    rank: int
    unrotated: int
    value: int
    query_rank: int | None = None

    def __post_init__(self) -> None:
        for name in ("rank", "unrotated", "value"):
            check_size(name, f"the latents' {name}", getattr(self, name))
        if self.query_rank is not None:
            check_size("query_rank", "the queries' rank", self.query_rank)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a decoder. Hashable: it is part of what is compiled.

    `rope_theta` is the base of the rotary frequencies and `rope_stretch` what they are stretched
    by, `norm_eps` the epsilon inside norms, `max_positions` the longest context in tokens,
    `eos_ids` the tokens that end a text. `family` is the table of `families`.

    Layers: `norm` is the kind of their norms and `norms` says which of `NORMS` they have;
    `activation` is that of the feed-forward part, whose gate only `gated` models have; `biases`
    names the matrices that have one. In `parallel` models both parts of a layer read its input.
    What each part adds is multiplied by `residual_scale`. Mixtures have `experts`. Heads with
    `sinks` have a score of their own in each softmax, which takes its share and gives nothing.

    Attention: `head_norms` norms queries and keys before they are rotated, those of each "head" or
    the "whole" width; the first `rotary_dim` features of a head are rotated (None: all).
    `windows` holds for each layer how many tokens up to its own a token sees, None for all of
    them, and is empty where no layer has a window; layers that have one rotate by `window_theta`
    and do not stretch, where it is given; `no_rope_layers` do not rotate. Scores are scaled by
    `query_scale` (None: the root of `head_dim`, inverted) and capped to ±`attention_cap`. Where
    there is a `query_growth` of `(b, n)`, they are multiplied by 1 + b·ln(1 + ⌊p / n⌋) at position
    p of the query (Ministral 3, after Llama 4). With a `latent` there is one key/value head, of a
    latent and of what is rotated beside it (see `specjax.models.latent_attention`).

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
    no_rope_layers: tuple[int, ...] = ()
    family: str = "llama"
    norm: str = "rms"
    norms: tuple[str, ...] = PRE_NORMS
    activation: str = "silu"
    gated: bool = True
    parallel: bool = False
    rotary_dim: int | None = None
    window_theta: float | None = None
    query_scale: float | None = None
    query_growth: tuple[float, int] | None = None
    latent: Latent | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    position_offset: int | None = None
    num_known: int | None = None
    draft_vocab_size: int | None = None
    features: Features | None = None
    experts: Experts | None = None
    residual_scale: float = 1.0
    sinks: bool = False

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
                     "logit_cap", "logit_scale", "embedding_scale", "residual_scale"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value!r}; it must be a finite number above 0.")
        growth = self.query_growth
        if growth is not None and not (0 <= growth[0] < math.inf and growth[1] > 0):
            raise ValueError(f"queries grow by {growth}; it must be a number and a length above 0.")
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
        latent = self.latent
        if latent is not None and self.head_dim != latent.rank + self.rotated:
            raise ValueError(
                f"latents of {latent.rank} numbers and {self.rotated} that are rotated are a "
                f"key/value head of as many; head_dim is {self.head_dim}."
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
        dense = () if self.experts is None else self.experts.dense_layers
        for layer in (*self.no_rope_layers, *dense):
            if type(layer) is not int or not 0 <= layer < self.num_layers:
                raise ValueError(f"there is no layer {layer!r}; there are {self.num_layers}.")
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
        layers = map(self.layer_shapes, range(self.num_layers))
        return sum(map(_size_of, (*layers, self.outer_shapes)))

    @property
    def num_active_parameters(self) -> int:
        """Number of weights that a token reads: of experts those alone that it takes."""
        if self.experts is None:
            return self.num_parameters
        shapes = self._expert_shapes(self.experts)
        own = sum(math.prod(shapes[name]) for name in shapes if name.startswith("expert_"))
        unread = self.experts.num_experts - self.experts.experts_per_token
        sparse = self.num_layers - len(self.experts.dense_layers)
        return self.num_parameters - sparse * own * unread // self.experts.num_experts

    def kind_of(self, layer: int) -> LayerKind:
        """How the tokens of a layer attend."""
        window = self.windows[layer] if self.windows else None
        return LayerKind(window, layer not in self.no_rope_layers)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def layer_shapes(self, layer: int) -> dict[str, Shape]:
        """The shape of every leaf that a layer has, by its name in `LayerWeights`."""
        experts = self.experts if self.has_experts(layer) else None
        d, f = self.hidden_size, self.intermediate_size if experts is None else experts.shared_size
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        read = 2 * d if self.features is not None and self.features.way == BESIDE else d
        shapes: dict[str, Shape] = {
            "query": (heads, read), "key": (kv_heads, read), "value": (kv_heads, read),
            "output": (d, heads), "gate": (f, d), "up": (f, d), "down": (d, f),
        }  # fmt: skip
        if self.latent is not None:
            del shapes["query"], shapes["value"]
            shapes |= self._latent_shapes(self.latent)
        if not f:
            del shapes["gate"], shapes["up"], shapes["down"]
        elif not self.gated:
            del shapes["gate"]
        shapes |= {f"{name}_bias": shapes[name][:1] for name in self.biases if name in shapes}
        shapes |= self._norm_shapes(self.norms)
        if self.head_norms is not None:
            whole = self.head_norms == "whole"
            shapes["query_norm"] = (heads if whole else self.head_dim,)
            shapes["key_norm"] = (kv_heads if whole else self.head_dim,)
        if self.sinks:
            shapes["sinks"] = (self.num_heads,)
        return shapes if experts is None else shapes | self._expert_shapes(experts)

    def _latent_shapes(self, latent: Latent) -> dict[str, Shape]:
        """Those of the matrices of attention that have others."""
        heads, rank, d = self.num_heads, latent.rank, self.hidden_size
        shapes: dict[str, Shape] = {
            "output": (d, heads * latent.value),
            "latent_norm": (rank,),
            "latent_key": (heads, rank, latent.unrotated),
            "latent_value": (heads, latent.value, rank),
        }
        rows, own = heads * (self.rotated + latent.unrotated), latent.query_rank
        if own is None:
            return shapes | {"query": (rows, d)}
        return shapes | {"query_down": (own, d), "query_down_norm": (own,), "query_up": (rows, own)}

    def _expert_shapes(self, experts: Experts) -> dict[str, Shape]:
        count, size, d = experts.num_experts, experts.intermediate_size, self.hidden_size
        shapes: dict[str, Shape] = {
            "router": (count, d),
            "expert_gate": (count, size, d),
            "expert_up": (count, size, d),
            "expert_down": (count, d, size),
        }
        if not self.gated:
            del shapes["expert_gate"]
        if experts.biased:
            own = [name for name in ("router", *EXPERT_MATRICES) if name in shapes]
            shapes |= {f"{name}_bias": shapes[name][:-1] for name in own}
        if experts.correction_bias:
            shapes["correction_bias"] = (count,)
        if experts.shared_gate:
            shapes["shared_gate"] = (1, d)
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
        ends = ("", "_bias") if self.norm in ("layer", "offset_layer") else ("",)
        return {name + end: (self.hidden_size,) for name in names for end in ends}


def _size_of(shapes: dict[str, Shape]) -> int:
    return sum(map(math.prod, shapes.values()))
