"""gpt-oss (OpenAI, arXiv 2508.10925): a mixture with attention sinks and windows in turns."""

import dataclasses

from specjax.models.config import Experts, ModelConfig
from specjax.models.families import rotary
from specjax.models.families.family import (
    FULL,
    SLIDING,
    Json,
    Positions,
    first_of,
    windows_of,
    written_windows,
)
from specjax.models.families.llama import ATTENTION, LLAMA, MLP

_GAIN, _LIMIT = 1.702, 7.0


def _features(config: Json, positions: Positions) -> Json:
    layers = config["num_hidden_layers"]
    kinds = [FULL if index % 2 else SLIDING for index in range(layers)]
    chosen = first_of(config.get("num_experts_per_tok"), config.get("experts_per_token"), 4)
    swiglu = (config.get("swiglu_alpha", _GAIN), config.get("swiglu_limit", _LIMIT))
    return {
        **rotary.read(config, positions, 150_000.0),
        "biases": ATTENTION * bool(config.get("attention_bias", True)),
        "windows": windows_of(
            config.get("sliding_window", 128), config.get("layer_types") or kinds, layers
        ),
        "sinks": True,
        "experts": Experts(
            num_experts=first_of(config.get("num_local_experts"), 128),
            experts_per_token=chosen,
            intermediate_size=config["intermediate_size"],
            biased=True,
            swiglu=swiglu,
        ),
    }


def _written(config: ModelConfig) -> Json:
    experts = config.experts
    assert experts is not None
    gain, limit = experts.swiglu or (_GAIN, _LIMIT)
    return {
        **rotary.write(config),
        "layer_types": [FULL] * config.num_layers,
        **written_windows(config),
        "attention_bias": "query" in config.biases,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "swiglu_alpha": gain,
        "swiglu_limit": limit,
    }


GPT_OSS = dataclasses.replace(
    LLAMA,
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": lambda config: 8,
        "head_dim": lambda config: 64,
        "rms_norm_eps": lambda config: 1e-5,
        "max_position_embeddings": lambda config: 131_072,
    },
    fixed={"hidden_act": ("silu", "swish"), "mlp_bias": (False,)},
    layer={
        **{leaf: name for leaf, name in LLAMA.layer.items() if leaf not in MLP},
        "sinks": "self_attn.sinks",
    },
    experts={
        "router": "mlp.router.weight",
        "expert_gate expert_up": "mlp.experts.gate_up_proj",
        "expert_down": "mlp.experts.down_proj",
    },
    expert_packing="turned alternating",
    features=_features,
    written=_written,
)
