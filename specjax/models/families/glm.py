"""GLM (Z.ai): a half of each head rotated; GLM-4.5 to 4.7 are mixtures, and Flash has latents."""

import dataclasses

from specjax.models.config import NORMS, ModelConfig
from specjax.models.families import rotary
from specjax.models.families.deepseek import (
    DEEPSEEK_V3,
    PLAIN_ROUTING,
    ROUTED,
    latents,
    routed,
    written_latents,
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
        "experts": routed(config, PLAIN_ROUTING),
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


_USUAL = {
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
}


_ROUTING = {**PLAIN_ROUTING, "first_k_dense_replace": 0, "routed_scaling_factor": 1.8}


def _of_flash(config: Json, positions: Positions) -> Json:
    """Its layers are named dense or sparse; where they are not, the first is dense."""
    layers = config["num_hidden_layers"]
    kinds = first_of(config.get("mlp_layer_types"), ["dense"] + ["sparse"] * (layers - 1))
    if not isinstance(kinds, list) or len(kinds) != layers or {*kinds} - {"dense", "sparse"}:
        raise ValueError(
            f"mlp_layer_types is {kinds!r}; it must have dense or sparse for each of {layers} "
            "layers."
        )
    dense = tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    return {
        **latents(config, positions, _USUAL),
        "experts": dataclasses.replace(routed(config, _ROUTING), dense_layers=dense),
    }


GLM4_FLASH = dataclasses.replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    defaults={
        **LLAMA.defaults,
        "rms_norm_eps": lambda config: 1e-5,
        "max_position_embeddings": lambda config: 202_752,
    },
    features=_of_flash,
    written=lambda config: {
        **written_latents(config),
        **written_routed(config),
        "mlp_layer_types": [
            "sparse" if config.has_experts(layer) else "dense" for layer in range(config.num_layers)
        ],
    },
)
