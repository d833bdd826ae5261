"""Dense families that are tables over what LLaMA and its relatives have."""

import dataclasses
from collections.abc import Sequence

from specjax.models.config import ModelConfig
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
from specjax.models.families.llama import (
    ATTENTION,
    HEAD_NORMS,
    LLAMA,
    MLP,
    OLMO2,
    WINDOWED,
    window_everywhere,
)

_UNGATED = ("up", "down")
_PATTERN = 4


def _biases(config: Json, default: bool = False, mlp: Sequence[str] = MLP) -> tuple[str, ...]:
    """The biases of attention and of the feed-forward part, where keys name them."""
    attention = first_of(config.get("attention_bias"), default)
    return ATTENTION * bool(attention) + tuple(mlp) * bool(config.get("mlp_bias"))


def _written_biases(config: ModelConfig) -> Json:
    return {"attention_bias": "query" in config.biases, "mlp_bias": "up" in config.biases}


def _kinds(config: Json, period: int) -> list[str]:
    """Of each layer, where the `period`-th ones see everything unless `layer_types` says so."""
    layers = config["num_hidden_layers"]
    kinds = [SLIDING if (index + 1) % period else FULL for index in range(layers)]
    return config.get("layer_types") or kinds


def _turned_in_windows(config: Json, period: int) -> Json:
    """Windows, and that layers without one do not rotate."""
    kinds, window = _kinds(config, period), config.get("sliding_window", 4096)
    windows = windows_of(window, kinds, config["num_hidden_layers"])
    full = tuple(index for index, kind in enumerate(kinds) if kind == FULL)
    return {"windows": windows, "no_rope_layers": full if window is not None else ()}


def _written_turned(config: ModelConfig) -> Json:
    """The keys that `_turned_in_windows` reads; a window may be as long as the context."""
    if not (config.no_rope_layers or config.windows):
        return {"sliding_window": None, "layer_types": [FULL] * config.num_layers}
    layers = range(config.num_layers)
    window = next((each for each in config.windows if each is not None), config.max_positions)
    kinds = [FULL if layer in config.no_rope_layers else SLIDING for layer in layers]
    return {"sliding_window": window, "layer_types": kinds}


def _of_smollm3(config: Json, positions: Positions) -> Json:
    layers = config["num_hidden_layers"]
    interval = first_of(config.get("no_rope_layer_interval"), _PATTERN)
    turned = config.get("no_rope_layers") or [(index + 1) % interval for index in range(layers)]
    if not isinstance(turned, list) or len(turned) != layers:
        raise ValueError(f"no_rope_layers is {turned!r}; it must have a number for each layer.")
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    kinds = [FULL if each else SLIDING for each in turned]
    return {
        **rotary.read(config, positions, 2_000_000.0),
        "biases": _biases(config),
        "no_rope_layers": tuple(index for index, each in enumerate(turned) if not each),
        "windows": windows_of(window, config.get("layer_types") or kinds, layers),
    }


SMOLLM3 = dataclasses.replace(
    LLAMA,
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": lambda config: 4,
        "tie_word_embeddings": lambda config: True,
        "max_position_embeddings": lambda config: 32_768,
    },
    fixed=WINDOWED,
    features=_of_smollm3,
    written=lambda config: {
        **rotary.write(config),
        **_written_biases(config),
        "layer_types": [FULL] * config.num_layers,
        **written_windows(config),
        "use_sliding_window": bool(config.windows),
        "no_rope_layers": [int(n not in config.no_rope_layers) for n in range(config.num_layers)],
    },
)


def _of_olmo3(config: Json, positions: Positions) -> Json:
    theta = first_of(config.get("rope_theta"), 500_000.0)
    return {
        **rotary.read_by_layer({"rope_theta": theta, **config}, positions, theta),
        "biases": _biases(config),
        "head_norms": "whole",
        "norms": ("attention_post_norm", "mlp_post_norm"),
        "windows": windows_of(
            config.get("sliding_window", 4096), _kinds(config, _PATTERN),
            config["num_hidden_layers"],
        ),
    }  # fmt: skip


OLMO3 = dataclasses.replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    fixed={**WINDOWED, "mlp_bias": (False,)},
    features=_of_olmo3,
    written=lambda config: {
        **rotary.write(config),
        "layer_types": [FULL] * config.num_layers,
        **written_windows(config),
        "attention_bias": "query" in config.biases,
    },
)

EXAONE4 = dataclasses.replace(
    LLAMA,
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": lambda config: 32,
        "rms_norm_eps": lambda config: 1e-5,
    },
    fixed={**WINDOWED, "attention_bias": (False,), "mlp_bias": (False,)},
    layer={
        **{leaf: LLAMA.layer[leaf] for leaf in (*ATTENTION, *MLP)},
        **HEAD_NORMS,
        "attention_post_norm": "post_attention_layernorm.weight",
        "mlp_post_norm": "post_feedforward_layernorm.weight",
    },
    features=lambda config, positions: {
        **rotary.read(config, positions),
        **_turned_in_windows(config, first_of(config.get("sliding_window_pattern"), _PATTERN)),
        "head_norms": "head",
        "norms": ("attention_post_norm", "mlp_post_norm"),
    },
    written=lambda config: {**rotary.write(config), **_written_turned(config)},
)

_COHERE = {
    "norm": "unbiased_layer",
    "norms": ("attention_norm",),
    "parallel": True,
}


def _logit_scale(config: Json) -> float:
    return float(first_of(config.get("logit_scale"), 0.0625))


COHERE = dataclasses.replace(
    LLAMA,
    model_type="cohere",
    architecture="CohereForCausalLM",
    fields={**LLAMA.fields, "norm_eps": "layer_norm_eps"},
    defaults={
        **LLAMA.defaults,
        "layer_norm_eps": lambda config: 1e-5,
        "tie_word_embeddings": lambda config: True,
        "max_position_embeddings": lambda config: 8192,
    },
    fixed={**LLAMA.fixed, "use_qk_norm": (False, None), "mlp_bias": (False,)},
    layer={leaf: name for leaf, name in LLAMA.layer.items() if leaf != "mlp_norm"},
    interleaved=("query", "key"),
    features=lambda config, positions: {
        **_COHERE,
        **rotary.read(config, positions, 500_000.0),
        "biases": _biases(config),
        "logit_scale": _logit_scale(config),
    },
    written=lambda config: {
        **rotary.write(config),
        "attention_bias": "query" in config.biases,
        "logit_scale": config.logit_scale,
    },
)

COHERE2 = dataclasses.replace(
    COHERE,
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    fixed={**WINDOWED, "mlp_bias": (False,)},
    features=lambda config, positions: {
        **_COHERE,
        **rotary.read(config, positions),
        **_turned_in_windows(config, first_of(config.get("sliding_window_pattern"), _PATTERN)),
        "biases": _biases(config),
        "logit_scale": _logit_scale(config),
    },
    written=lambda config: {**COHERE.written(config), **_written_turned(config)},
)

STARCODER2 = dataclasses.replace(
    LLAMA,
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    fields={**LLAMA.fields, "norm_eps": "norm_epsilon"},
    defaults={
        **LLAMA.defaults,
        "norm_epsilon": lambda config: 1e-5,
        "num_key_value_heads": lambda config: 2,
        "tie_word_embeddings": lambda config: True,
        "max_position_embeddings": lambda config: 4096,
        "hidden_act": lambda config: "gelu_pytorch_tanh",
    },
    fixed=WINDOWED,
    layer={
        **{leaf: name for leaf, name in LLAMA.layer.items() if leaf not in MLP},
        "up": "mlp.c_fc.weight",
        "down": "mlp.c_proj.weight",
    },
    features=lambda config, positions: {
        **rotary.read(config, positions),
        "norm": "layer",
        "gated": False,
        "biases": (*ATTENTION, *_UNGATED) * bool(first_of(config.get("use_bias"), True)),
        "windows": window_everywhere(config, None),
    },
    written=lambda config: {
        **rotary.write(config),
        **written_windows(config),
        "use_bias": "query" in config.biases,
    },
)

ARCEE = dataclasses.replace(
    LLAMA,
    model_type="arcee",
    architecture="ArceeForCausalLM",
    defaults={
        **LLAMA.defaults,
        "rms_norm_eps": lambda config: 1e-5,
        "max_position_embeddings": lambda config: 4096,
        "hidden_act": lambda config: "relu2",
    },
    layer={leaf: name for leaf, name in LLAMA.layer.items() if leaf != "gate"},
    features=lambda config, positions: {
        **rotary.read(config, positions),
        "gated": False,
        "biases": _biases(config, mlp=_UNGATED),
    },
    written=lambda config: {**rotary.write(config), **_written_biases(config)},
)

NEMOTRON = dataclasses.replace(
    ARCEE,
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    fields={**LLAMA.fields, "norm_eps": "norm_eps"},
    defaults={**ARCEE.defaults, "norm_eps": lambda config: 1e-5},
    features=lambda config, positions: {
        **rotary.read(config, positions, turned=0.5),
        "norm": "offset_layer",
        "gated": False,
        "biases": _biases(config, mlp=_UNGATED),
    },
    written=lambda config: {
        **rotary.write(config),
        **_written_biases(config),
        "partial_rotary_factor": config.rotated / config.head_dim,
    },
)

SEED_OSS = dataclasses.replace(
    LLAMA,
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    defaults={
        **LLAMA.defaults,
        "head_dim": lambda config: 128,
        "max_position_embeddings": lambda config: 524_288,
    },
    features=lambda config, positions: {
        **rotary.read(config, positions),
        "biases": ATTENTION[:3] * bool(first_of(config.get("attention_bias"), True))
        + ATTENTION[3:] * bool(config.get("attention_out_bias"))
        + MLP * bool(config.get("mlp_bias")),
    },
    written=lambda config: {
        **rotary.write(config),
        **_written_biases(config),
        "attention_out_bias": "output" in config.biases,
    },
)

ERNIE45 = dataclasses.replace(
    LLAMA,
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": lambda config: 2,
        "head_dim": lambda config: 128,
        "rms_norm_eps": lambda config: 1e-5,
        "tie_word_embeddings": lambda config: True,
        "max_position_embeddings": lambda config: 131_072,
    },
    interleaved=("query", "key"),
    features=lambda config, positions: {
        **rotary.read(config, positions, 500_000.0),
        "biases": (*ATTENTION, *MLP) * bool(config.get("use_bias")),
    },
    written=lambda config: {**rotary.write(config), "use_bias": "query" in config.biases},
)


def _of_internlm(config: Json) -> Json:
    """Files call the biases otherwise than transformers does."""
    named = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}
    return {named.get(key, key): value for key, value in config.items()}


INTERNLM3 = dataclasses.replace(
    LLAMA,
    model_type="internlm3",
    architecture="InternLM3ForCausalLM",
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": lambda config: 2,
        "head_dim": lambda config: 128,
        "rms_norm_eps": lambda config: 1e-5,
        "max_position_embeddings": lambda config: 32_768,
    },
    upgrade=_of_internlm,
)

DENSE = (
    SMOLLM3, OLMO3, EXAONE4, COHERE, COHERE2, STARCODER2, ARCEE, NEMOTRON, SEED_OSS, ERNIE45,
    INTERNLM3,
)  # fmt: skip
