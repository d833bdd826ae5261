"""GLM (Z.ai): a half of each head rotated; GLM-4.5 to 4.7 are mixtures."""

import dataclasses

from specjax.models.config import NORMS, ModelConfig
from specjax.models.families import rotary
from specjax.models.families.deepseek import (
    ROUTED,
    routed,
    written_routed,
)
from specjax.models.families.family import Json, Positions, first_of
from specjax.models.families.llama import ATTENTION, HEAD_NORMS, LLAMA, PHI3

_ROTATED = 0.5
_PROJECTIONS = ATTENTION[:3]
"""Attention's output has no bias."""


def _biases(config: Json, default: bool) -> tuple[str, ...]:
    return _PROJECTIONS * bool(first_of(config.get("attention_bias"), default))


def _written(config: ModelConfig) -> Json:
    return {
        **rotary.write(config),
        "attention_bias": "query" in config.biases,
        "partial_rotary_factor": config.rotated / config.head_dim,
    }


GLM = dataclasses.replace(
    LLAMA,
    model_type="glm",
    architecture="GlmForCausalLM",
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": lambda config: 2,
        "head_dim": lambda config: 128,
        "rms_norm_eps": lambda config: 1.5625e-07,
        "max_position_embeddings": lambda config: 131_072,
    },
    fixed={**LLAMA.fixed, "mlp_bias": (False,)},
    layer={
        **{leaf: name for leaf, name in LLAMA.layer.items() if leaf not in ("gate", "up")},
        "gate up": PHI3.layer["gate up"],
    },
    interleaved=("query", "key"),
    features=lambda config, positions: {
        **rotary.read(config, positions, turned=_ROTATED),
        "biases": _biases(config, True),
    },
    written=_written,
)

GLM4 = dataclasses.replace(
    GLM,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    layer={
        **GLM.layer,
        "attention_post_norm": "post_self_attn_layernorm.weight",
        "mlp_post_norm": "post_mlp_layernorm.weight",
    },
    features=lambda config, positions: {**GLM.features(config, positions), "norms": NORMS},
)


def _of_mixture(config: Json, positions: Positions) -> Json:
    return {
        **rotary.read(config, positions, turned=_ROTATED),
        "biases": _biases(config, False),
        "head_norms": "head" if config.get("use_qk_norm") else None,
        "experts": routed(config, 1),
    }


GLM4_MOE = dataclasses.replace(
    LLAMA,
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": lambda config: 8,
        "rms_norm_eps": lambda config: 1e-5,
        "max_position_embeddings": lambda config: 131_072,
    },
    fixed={**LLAMA.fixed, "mlp_bias": (False,)},
    layer={**LLAMA.layer, **HEAD_NORMS},
    experts=ROUTED,
    features=_of_mixture,
    written=lambda config: {
        **_written(config),
        **written_routed(config),
        "use_qk_norm": config.head_norms is not None,
    },
)
