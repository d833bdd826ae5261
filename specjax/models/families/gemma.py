"""Gemma 2 and 3."""

import dataclasses
import math

from specjax.models.config import NORMS, ModelConfig
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
from specjax.models.families.llama import ATTENTION, HEAD_NORMS, LLAMA, WINDOWED

_SIZES = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
"""What a file need not say, because transformers means the same without it."""


def _defaults(**more: object) -> Json:
    return {key: lambda config, value=value: value for key, value in {**_SIZES, **more}.items()}


def _features(config: Json, period: int) -> Json:
    """What Gemma's versions share; each `period`-th layer has no window."""
    layers = config["num_hidden_layers"]
    scalar = float(first_of(config.get("query_pre_attn_scalar"), 256))
    if not 0 < scalar < math.inf:
        raise ValueError(f"query_pre_attn_scalar is {scalar}; it must be a finite number above 0.")
    kinds = config.get("layer_types")
    if not kinds:
        kinds = [SLIDING if (index + 1) % period else FULL for index in range(layers)]
    return {
        "biases": ATTENTION * bool(config.get("attention_bias")),
        "norm": "offset_rms",
        "norms": NORMS,
        "embedding_scale": config["hidden_size"] ** 0.5,
        "query_scale": scalar**-0.5,
        "windows": windows_of(config.get("sliding_window", 4096), kinds, layers),
    }


def _cap(config: Json, name: str, default: float | None) -> float | None:
    cap = config.get(name, default)
    return None if cap is None else float(cap)


def _written(config: ModelConfig) -> Json:
    kinds = [SLIDING if window else FULL for window in config.windows or [None] * config.num_layers]
    scale = config.query_scale or config.head_dim**-0.5
    return {
        **rotary.write(config),
        **written_windows(config),
        "layer_types": kinds,
        "attention_bias": "query" in config.biases,
        "query_pre_attn_scalar": round(scale**-2, 6),
        "attn_logit_softcapping": config.attention_cap,
        "final_logit_softcapping": config.logit_cap,
    }


GEMMA2 = dataclasses.replace(
    LLAMA,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    fields={**LLAMA.fields, "activation": "hidden_activation"},
    defaults={
        **LLAMA.defaults,
        **_defaults(
            vocab_size=256000,
            tie_word_embeddings=True,
            max_position_embeddings=8192,
            hidden_activation="gelu_pytorch_tanh",
        ),
    },
    fixed={**WINDOWED, "use_bidirectional_attention": (None, False), "mlp_bias": (False,)},
    layer={
        **LLAMA.layer,
        "attention_post_norm": "post_attention_layernorm.weight",
        "mlp_norm": "pre_feedforward_layernorm.weight",
        "mlp_post_norm": "post_feedforward_layernorm.weight",
    },
    features=lambda config, positions: {
        **rotary.read(config, positions),
        **_features(config, 2),
        "attention_cap": _cap(config, "attn_logit_softcapping", 50.0),
        "logit_cap": _cap(config, "final_logit_softcapping", 30.0),
    },
    written=_written,
)


def _of_gemma3(config: Json, positions: Positions) -> Json:
    """Its scores are not capped: transformers 5.23 reads `attn_logit_softcapping` and hands it to
    no attention of Gemma 3's.
    """
    return {
        **rotary.read_by_layer(config, positions),
        **_features(config, first_of(config.get("sliding_window_pattern"), 6)),
        "logit_cap": _cap(config, "final_logit_softcapping", None),
        "head_norms": "head",
    }


GEMMA3 = dataclasses.replace(
    GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    defaults={
        **GEMMA2.defaults,
        **_defaults(vocab_size=262208, max_position_embeddings=131072),
    },
    layer={**GEMMA2.layer, **HEAD_NORMS},
    features=_of_gemma3,
)
