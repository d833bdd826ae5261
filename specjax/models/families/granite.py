"""Granite 3 and 4 (IBM) and MiniCPM (OpenBMB): LLaMA with multipliers."""

import dataclasses

from specjax.models.config import ModelConfig
from specjax.models.families import rotary
from specjax.models.families.family import Json, Positions, first_of
from specjax.models.families.llama import ATTENTION, LLAMA, MLP


def multipliers(config: Json, positions: Positions) -> Json:
    """The fields of a Granite model but for its experts."""
    biases = ATTENTION * bool(config.get("attention_bias")) + MLP * bool(config.get("mlp_bias"))
    return {
        **rotary.read(config, positions),
        "biases": biases,
        "embedding_scale": _multiplier(config, "embedding_multiplier"),
        "residual_scale": _multiplier(config, "residual_multiplier"),
        "query_scale": _multiplier(config, "attention_multiplier"),
        "logit_scale": 1 / _multiplier(config, "logits_scaling"),
    }


def _multiplier(config: Json, key: str) -> float:
    """A multiplier, 1 where there is none."""
    return float(first_of(config.get(key), 1.0))


def written_multipliers(config: ModelConfig) -> Json:
    """The keys that `multipliers` reads."""
    scale = config.query_scale
    return {
        **rotary.write(config),
        "attention_bias": "query" in config.biases,
        "mlp_bias": "gate" in config.biases,
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "attention_multiplier": config.head_dim**-0.5 if scale is None else scale,
        "logits_scaling": round(1 / config.logit_scale, 9),
    }


GRANITE = dataclasses.replace(
    LLAMA,
    model_type="granite",
    architecture="GraniteForCausalLM",
    features=multipliers,
    written=written_multipliers,
)


def _of_minicpm(config: Json, positions: Positions) -> Json:
    base = first_of(config.get("dim_model_base"), 1)
    depth = float(first_of(config.get("scale_depth"), 1.0))
    return {
        **rotary.read(config, positions),
        "biases": ATTENTION * bool(config.get("attention_bias")),
        "embedding_scale": float(first_of(config.get("scale_emb"), 1.0)),
        "residual_scale": depth / config["num_hidden_layers"] ** 0.5,
        "logit_scale": base / config["hidden_size"],
    }


MINICPM = dataclasses.replace(
    LLAMA,
    model_type="minicpm",
    architecture="MiniCPMForCausalLM",
    defaults={**LLAMA.defaults, "tie_word_embeddings": lambda config: True},
    fixed={
        **LLAMA.fixed,
        "mlp_bias": (False,),
        "num_experts": (0, None),
        "sparse_config": (None,),
    },
    features=_of_minicpm,
    written=lambda config: {
        **rotary.write(config),
        "attention_bias": "query" in config.biases,
        "scale_emb": config.embedding_scale,
        "scale_depth": round(config.residual_scale * config.num_layers**0.5, 9),
        "dim_model_base": round(config.logit_scale * config.hidden_size),
    },
)
