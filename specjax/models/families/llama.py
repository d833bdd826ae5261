"""LLaMA, and the families that differ from it by little."""

import dataclasses

from specjax.models.config import MATRICES, ModelConfig
from specjax.models.families import rotary
from specjax.models.families.family import (
    FULL,
    SLIDING,
    Family,
    Json,
    Positions,
    Windows,
    whole_heads,
    windows_of,
    written_windows,
)

ATTENTION, MLP = MATRICES[:4], MATRICES[4:]


def _features(config: Json, positions: Positions) -> Json:
    biases = ATTENTION * bool(config.get("attention_bias")) + MLP * bool(config.get("mlp_bias"))
    return {**rotary.read(config, positions), "biases": biases}


def _written(config: ModelConfig) -> Json:
    return {
        **rotary.write(config),
        "attention_bias": "query" in config.biases,
        "mlp_bias": "gate" in config.biases,
    }


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "norm_eps": "rms_norm_eps",
        "tie_embeddings": "tie_word_embeddings",
        "max_positions": "max_position_embeddings",
        "activation": "hidden_act",
    },
    defaults={
        "num_key_value_heads": lambda config: config["num_attention_heads"],
        "head_dim": whole_heads,
        "rms_norm_eps": lambda config: 1e-6,
        "tie_word_embeddings": lambda config: False,
        "max_position_embeddings": lambda config: 2048,
        "hidden_act": lambda config: "silu",
    },
    fixed={
        "sliding_window": (None,),
        "use_sliding_window": (False,),
    },
    outer={
        "embedding": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "unembedding": "lm_head.weight",
    },
    layer_prefix="model.layers.{index}.",
    base="model.",
    layer={
        "attention_norm": "input_layernorm.weight",
        "query": "self_attn.q_proj.weight",
        "key": "self_attn.k_proj.weight",
        "value": "self_attn.v_proj.weight",
        "output": "self_attn.o_proj.weight",
        "mlp_norm": "post_attention_layernorm.weight",
        "gate": "mlp.gate_proj.weight",
        "up": "mlp.up_proj.weight",
        "down": "mlp.down_proj.weight",
    },
    ignored=("rotary_emb.inv_freq",),
    features=_features,
    written=_written,
)

WINDOWED = {key: LLAMA.fixed[key] for key in LLAMA.fixed if "sliding" not in key}
HEAD_NORMS = {"query_norm": "self_attn.q_norm.weight", "key_norm": "self_attn.k_norm.weight"}


def window_everywhere(config: Json, default: int | None) -> Windows:
    """Mistral's: in every layer, or in those that are named (Ministral)."""
    window, layers = config.get("sliding_window", default), config["num_hidden_layers"]
    return windows_of(window, config.get("layer_types") or [SLIDING] * layers, layers)


MISTRAL = dataclasses.replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": lambda config: (
            config["num_attention_heads"] if "num_key_value_heads" in config else 8
        ),
        "max_position_embeddings": lambda config: 4096 * 32,
    },
    fixed={**WINDOWED, "attention_bias": (False,), "mlp_bias": (False,)},
    features=lambda config, positions: {
        **rotary.read(config, positions),
        "windows": window_everywhere(config, 4096),
    },
    written=lambda config: {**rotary.write(config), **written_windows(config)},
)

MINISTRAL = dataclasses.replace(
    MISTRAL, model_type="ministral", architecture="MinistralForCausalLM"
)


def window_by_layer(config: Json) -> Windows:
    """Qwen's: off unless `use_sliding_window`, and then in the layers that are named or last."""
    window, layers = config.get("sliding_window", 4096), config["num_hidden_layers"]
    if not config.get("use_sliding_window"):
        return ()
    first = min(config.get("max_window_layers", 28), layers)
    kinds = config.get("layer_types") or [FULL] * first + [SLIDING] * (layers - first)
    return windows_of(window, kinds, layers)


def written_qwen(config: ModelConfig) -> Json:
    """The keys of a Qwen 2's rotary embeddings and windows."""
    used = {"use_sliding_window": bool(config.windows)}
    return {**rotary.write(config), **used, **written_windows(config)}


QWEN2 = dataclasses.replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults={**LLAMA.defaults, "max_position_embeddings": lambda config: 32768},
    fixed={**WINDOWED, "mlp_bias": (False,)},
    features=lambda config, positions: {
        **rotary.read(config, positions),
        "biases": ("query", "key", "value"),
        "windows": window_by_layer(config),
    },
    written=written_qwen,
)

QWEN3 = dataclasses.replace(
    QWEN2,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults={**QWEN2.defaults, "head_dim": lambda config: 128},
    layer={**LLAMA.layer, **HEAD_NORMS},
    features=lambda config, positions: {
        **rotary.read(config, positions),
        "biases": ATTENTION * bool(config.get("attention_bias")),
        "head_norms": "head",
        "windows": window_by_layer(config),
    },
    written=lambda config: {
        **written_qwen(config),
        "attention_bias": "query" in config.biases,
    },
)


def _of_phi(config: Json) -> Json:
    """Phi-3's files of before call their scaling "su" or "yarn"."""
    made = dict(config)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := made.get(key), dict):
            kind = rope.get("rope_type", rope.get("type"))
            made[key] = rope | {"rope_type": "longrope"} if kind in ("su", "yarn") else rope
    return made


PHI3 = dataclasses.replace(
    MISTRAL,
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    defaults={
        **LLAMA.defaults,
        "rms_norm_eps": lambda config: 1e-5,
        "max_position_embeddings": lambda config: 4096,
    },
    layer={
        "attention_norm": "input_layernorm.weight",
        "query key value": "self_attn.qkv_proj.weight",
        "output": "self_attn.o_proj.weight",
        "mlp_norm": "post_attention_layernorm.weight",
        "gate up": "mlp.gate_up_proj.weight",
        "down": "mlp.down_proj.weight",
    },
    upgrade=_of_phi,
    features=lambda config, positions: {
        **rotary.read(config, positions, turned=1.0),
        "windows": window_everywhere(config, None),
    },
)

OLMO2 = dataclasses.replace(
    LLAMA,
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    defaults={**LLAMA.defaults, "rms_norm_eps": lambda config: 1e-5},
    fixed={**LLAMA.fixed, "mlp_bias": (False,)},
    layer={
        **{leaf: LLAMA.layer[leaf] for leaf in MATRICES},
        **HEAD_NORMS,
        "attention_post_norm": "post_attention_layernorm.weight",
        "mlp_post_norm": "post_feedforward_layernorm.weight",
    },
    features=lambda config, positions: {
        **_features(config, positions),
        "head_norms": "whole",
        "norms": ("attention_post_norm", "mlp_post_norm"),
    },
)
