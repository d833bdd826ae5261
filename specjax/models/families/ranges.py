"""What numbers and flags of a `config.json` may be, whatever its family."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from specjax.models.families.family import Json


class Range(NamedTuple):
    """Numbers from `low` to `high`, without `low` itself where `above`; whole ones if `whole`."""

    low: float
    high: float
    above: bool = False
    whole: bool = False

    def __contains__(self, value: object) -> bool:
        kinds = (int,) if self.whole else (int, float)
        if type(value) not in kinds:  # a comparison with NaN is false
            return False
        return self.low <= value <= self.high and not (self.above and value == self.low)  # pyright: ignore[reportOperatorIssue]

    def __str__(self) -> str:
        if self.whole:
            return f"an integer from {self.low:g} to {self.high:g}"
        if self.above:
            return f"a finite number above {self.low:g}, at most {self.high:g}"
        return f"a finite number from {self.low:g} to {self.high:g}"


_FLAG = "true or false"
_BASE = Range(1, 1e12, above=True)
_SHARE = Range(0, 1, above=True)
_CAP = Range(0, 1e9, above=True)
_EPSILON = Range(0, 1, above=True)
_STRETCH = Range(1, 1e6)
_TURNS = Range(0, 1e6, above=True)
_MAGNITUDE = Range(0, 1e4, above=True)
_POSITIONS = Range(1, 2**31 - 1, whole=True)
_COUNT = Range(1, 4096, whole=True)
_FACTOR = Range(0, 1e6, above=True)
_FEW = Range(0, 4096, whole=True)
_LAYER = Range(0, 10_000, whole=True)
_PERIOD = Range(1, 10_000, whole=True)

_KEYS: Mapping[str, Range | str] = {
    "rope_theta": _BASE,
    "rope_local_base_freq": _BASE,
    "rotary_emb_base": _BASE,
    "rotary_pct": _SHARE,
    "partial_rotary_factor": _SHARE,
    "original_max_position_embeddings": _POSITIONS,
    "rms_norm_eps": _EPSILON,
    "layer_norm_eps": _EPSILON,
    "layer_norm_epsilon": _EPSILON,
    "norm_epsilon": _EPSILON,
    "norm_eps": _EPSILON,
    "embedding_multiplier": _FACTOR,
    "residual_multiplier": _FACTOR,
    "attention_multiplier": _FACTOR,
    "logits_scaling": _FACTOR,
    "logit_scale": _FACTOR,
    "swiglu_alpha": _FACTOR,
    "swiglu_limit": _FACTOR,
    "num_experts": _COUNT,
    "num_local_experts": _COUNT,
    "num_experts_per_tok": _COUNT,
    "n_routed_experts": _COUNT,
    "kv_lora_rank": _POSITIONS,
    "q_lora_rank": _POSITIONS,
    "qk_rope_head_dim": _POSITIONS,
    "qk_nope_head_dim": _POSITIONS,
    "v_head_dim": _POSITIONS,
    "n_shared_experts": _FEW,
    "n_group": _COUNT,
    "topk_group": _COUNT,
    "first_k_dense_replace": _LAYER,
    "routed_scaling_factor": _FACTOR,
    "moe_num_experts": _COUNT,
    "moe_k": _COUNT,
    "moe_num_shared_experts": _FEW,
    "moe_layer_start_index": _LAYER,
    "moe_layer_end_index": Range(-1, 10_000, whole=True),
    "moe_layer_interval": _PERIOD,
    "rotary_dim": _POSITIONS,
    "scale_emb": _FACTOR,
    "scale_depth": _FACTOR,
    "dim_model_base": _FACTOR,
    "experts_per_token": _COUNT,
    "moe_intermediate_size": _POSITIONS,
    "shared_expert_intermediate_size": _POSITIONS,
    "shared_intermediate_size": Range(0, 2**31 - 1, whole=True),
    "decoder_sparse_step": _PERIOD,
    "no_rope_layer_interval": _PERIOD,
    "attn_logit_softcapping": _CAP,
    "final_logit_softcapping": _CAP,
    "query_pre_attn_scalar": _CAP,
    "max_window_layers": _LAYER,
    "sliding_window_pattern": _PERIOD,
    "word_embed_proj_dim": _POSITIONS,
    "attention_bias": _FLAG,
    "mlp_bias": _FLAG,
    "enable_bias": _FLAG,
    "use_sliding_window": _FLAG,
    "use_parallel_residual": _FLAG,
    "norm_topk_prob": _FLAG,
    "use_qk_norm": _FLAG,
    "qkv_bias": _FLAG,
    "use_bias": _FLAG,
    "attention_out_bias": _FLAG,
}
_ROPE: Mapping[str, Range | str] = {
    "rope_theta": _BASE,
    "partial_rotary_factor": _SHARE,
    "factor": _STRETCH,
    "low_freq_factor": _TURNS,
    "high_freq_factor": _TURNS,
    "beta_slow": _TURNS,
    "beta_fast": _TURNS,
    "attention_factor": _MAGNITUDE,
    "mscale": Range(0, 1e4),
    "mscale_all_dim": Range(0, 1e4),
    "original_max_position_embeddings": _POSITIONS,
    "truncate": _FLAG,
    "llama_4_scaling_beta": Range(0, 1e4),
}
_LISTS = ("short_factor", "long_factor")
_MULTIPLIER = Range(0, 1e6, above=True)


def check_values(config: Json) -> None:
    """Checks the numbers and flags that a parsed `config.json` gives; null stands for absent.

    Raises:
      ValueError: one is of another kind, or out of its range.
    """
    _check(config, _KEYS, "")
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if isinstance(rope, dict):
            _check_rope(rope, f"{name}.")


def _check_rope(rope: Json, prefix: str) -> None:
    """Checks rotary parameters, and those of kinds of layers within them."""
    _check(rope, _ROPE, prefix)
    for name in _LISTS:
        if rope.get(name) is not None:
            _check_list(f"{prefix}{name}", rope[name])
    for name, own in rope.items():
        if isinstance(own, dict):
            _check_rope(own, f"{prefix}{name}.")


def _check(given: Json, allowed: Mapping[str, Range | str], prefix: str) -> None:
    for name, own in allowed.items():
        value = given.get(name)
        fits = isinstance(value, bool) if isinstance(own, str) else value in own
        if value is not None and not fits:
            raise ValueError(f"{prefix}{name} is {value!r}; it must be {own}.")


def _check_list(name: str, factors: Any) -> None:
    if not isinstance(factors, list):
        raise ValueError(f"{name} is {factors!r}; it must be a list of numbers.")
    for place, factor in enumerate(factors):
        if factor not in _MULTIPLIER:
            raise ValueError(f"{name}[{place}] is {factor!r}; it must be {_MULTIPLIER}.")
