"""Mixtures of experts that are like LLaMA and its relatives otherwise."""

import dataclasses

from specjax.models.config import Experts, ModelConfig
from specjax.models.families import rotary
from specjax.models.families.deepseek import PLAIN_ROUTING, ROUTED, routed, written_routed
from specjax.models.families.family import (
    FULL,
    SLIDING,
    Json,
    Positions,
    Windows,
    first_of,
    windows_of,
    written_windows,
)
from specjax.models.families.granite import GRANITE, multipliers, written_multipliers
from specjax.models.families.llama import (
    ATTENTION,
    HEAD_NORMS,
    LLAMA,
    MISTRAL,
    MLP,
    QWEN2,
    QWEN3,
    WINDOWED,
    window_everywhere,
    written_qwen,
)
from specjax.models.families.relatives import ERNIE45

_GROUPED = {
    "router": "mlp.gate.weight",
    "expert_gate": "mlp.experts.{expert}.gate_proj.weight",
    "expert_up": "mlp.experts.{expert}.up_proj.weight",
    "expert_down": "mlp.experts.{expert}.down_proj.weight",
}


MIXTRAL = dataclasses.replace(
    MISTRAL,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    defaults={**MISTRAL.defaults, "rms_norm_eps": lambda config: 1e-5},
    experts={
        "router": "block_sparse_moe.gate.weight",
        "expert_gate": "block_sparse_moe.experts.{expert}.w1.weight",
        "expert_up": "block_sparse_moe.experts.{expert}.w3.weight",
        "expert_down": "block_sparse_moe.experts.{expert}.w2.weight",
    },
    features=lambda config, positions: {
        **rotary.read(config, positions, 1_000_000.0),
        "windows": window_everywhere(config, None),
        "experts": Experts(
            num_experts=first_of(config.get("num_local_experts"), 8),
            experts_per_token=first_of(config.get("num_experts_per_tok"), 2),
            intermediate_size=config["intermediate_size"],
        ),
    },
    written=lambda config: {
        **rotary.write(config),
        **written_windows(config),
        "num_local_experts": _experts(config).num_experts,
        "num_experts_per_tok": _experts(config).experts_per_token,
    },
)


def _experts(config: ModelConfig) -> Experts:
    assert config.experts is not None
    return config.experts


def _dense_of_qwen(config: Json) -> tuple[int, ...]:
    """Layers without experts: those that are named, and all but each `decoder_sparse_step`-th.

    Raises:
      ValueError: layers are named otherwise than in a list.
    """
    step = first_of(config.get("decoder_sparse_step"), 1)
    named = first_of(config.get("mlp_only_layers"), [])
    if not isinstance(named, list):
        raise ValueError(f"mlp_only_layers is {named!r}; it must be a list of layers.")
    layers = range(config["num_hidden_layers"])
    return tuple(layer for layer in layers if layer in named or (layer + 1) % step)


def _of_qwen(config: Json, chosen: int, count: int, size: int) -> Experts:
    return Experts(
        num_experts=first_of(config.get("num_experts"), config.get("num_local_experts"), count),
        experts_per_token=first_of(config.get("num_experts_per_tok"), chosen),
        intermediate_size=first_of(config.get("moe_intermediate_size"), size),
        norm_topk=first_of(config.get("norm_topk_prob"), False),
        dense_layers=_dense_of_qwen(config),
    )


def _written_experts(config: ModelConfig) -> Json:
    experts = _experts(config)
    return {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.norm_topk,
        "mlp_only_layers": list(experts.dense_layers),
        "decoder_sparse_step": 1,
    }


def _windows_of_qwen2(config: Json) -> Windows:
    """Where they are used every other one of the first `max_window_layers` has one."""
    layers = config["num_hidden_layers"]
    if not config.get("use_sliding_window"):
        return ()
    first = min(first_of(config.get("max_window_layers"), 28), layers)
    kinds = [FULL if index % 2 or index >= first else SLIDING for index in range(layers)]
    kinds = config.get("layer_types") or kinds
    return windows_of(config.get("sliding_window", 4096), kinds, layers)


QWEN2_MOE = dataclasses.replace(
    QWEN2,
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    experts={
        **_GROUPED,
        "gate": "mlp.shared_expert.gate_proj.weight",
        "up": "mlp.shared_expert.up_proj.weight",
        "down": "mlp.shared_expert.down_proj.weight",
        "shared_gate": "mlp.shared_expert_gate.weight",
    },
    features=lambda config, positions: {
        **rotary.read(config, positions),
        "biases": ("query", "key", "value") * bool(first_of(config.get("qkv_bias"), True)),
        "windows": _windows_of_qwen2(config),
        "experts": dataclasses.replace(
            _of_qwen(config, 4, 60, 1408),
            shared_size=first_of(config.get("shared_expert_intermediate_size"), 5632),
            shared_gate=True,
        ),
    },
    written=lambda config: {
        **written_qwen(config),
        **_written_experts(config),
        "qkv_bias": "query" in config.biases,
        "shared_expert_intermediate_size": _experts(config).shared_size,
    },
)

QWEN3_MOE = dataclasses.replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    defaults={**QWEN3.defaults, "head_dim": LLAMA.defaults["head_dim"]},
    experts=_GROUPED,
    features=lambda config, positions: {
        **rotary.read(config, positions),
        "biases": ATTENTION * bool(config.get("attention_bias")),
        "head_norms": "head",
        "windows": _windows_of_qwen3(config),
        "experts": _of_qwen(config, 8, 128, 768),
    },
    written=lambda config: {
        **written_qwen(config),
        **_written_experts(config),
        "attention_bias": "query" in config.biases,
    },
)


def _windows_of_qwen3(config: Json) -> Windows:
    """All layers have one, where they are used: transformers reads no kinds of layers here."""
    return window_everywhere(config, 4096) if config.get("use_sliding_window") else ()


OLMOE = dataclasses.replace(
    LLAMA,
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    defaults={
        **LLAMA.defaults,
        "rms_norm_eps": lambda config: 1e-5,
        "max_position_embeddings": lambda config: 4096,
    },
    fixed={**LLAMA.fixed, "clip_qkv": (None,), "mlp_bias": (False,)},
    layer={**LLAMA.layer, **HEAD_NORMS},
    experts=_GROUPED,
    features=lambda config, positions: {
        **rotary.read(config, positions),
        "biases": ATTENTION * bool(config.get("attention_bias")),
        "head_norms": "whole",
        "experts": Experts(
            num_experts=first_of(config.get("num_experts"), 64),
            experts_per_token=first_of(config.get("num_experts_per_tok"), 8),
            intermediate_size=config["intermediate_size"],
            norm_topk=first_of(config.get("norm_topk_prob"), False),
        ),
    },
    written=lambda config: {
        **rotary.write(config),
        "attention_bias": "query" in config.biases,
        "num_experts": _experts(config).num_experts,
        "num_experts_per_tok": _experts(config).experts_per_token,
        "norm_topk_prob": _experts(config).norm_topk,
    },
)


def _of_granite(config: Json, positions: Positions) -> Json:
    return {
        **multipliers(config, positions),
        "experts": Experts(
            num_experts=first_of(config.get("num_local_experts"), 8),
            experts_per_token=first_of(config.get("num_experts_per_tok"), 2),
            intermediate_size=config["intermediate_size"],
            shared_size=first_of(config.get("shared_intermediate_size"), 0),
        ),
    }


def _written_granite(config: ModelConfig) -> Json:
    return {
        **written_multipliers(config),
        "num_local_experts": _experts(config).num_experts,
        "num_experts_per_tok": _experts(config).experts_per_token,
    }


GRANITE_MOE = dataclasses.replace(
    GRANITE,
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    fixed={**GRANITE.fixed, "mlp_bias": (False,), "shared_intermediate_size": (0,)},
    experts={
        "router": "block_sparse_moe.router.layer.weight",
        "expert_gate expert_up": "block_sparse_moe.input_linear.weight",
        "expert_down": "block_sparse_moe.output_linear.weight",
    },
    features=_of_granite,
    written=_written_granite,
)

GRANITE_MOE_SHARED = dataclasses.replace(
    GRANITE_MOE,
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    fixed={**GRANITE.fixed, "mlp_bias": (False,)},
    layer={leaf: name for leaf, name in GRANITE.layer.items() if leaf not in MLP},
    experts={
        **GRANITE_MOE.experts,
        "gate up": "shared_mlp.input_linear.weight",
        "down": "shared_mlp.output_linear.weight",
    },
    written=lambda config: {
        **_written_granite(config),
        "shared_intermediate_size": _experts(config).shared_size,
    },
)


def _with_share(config: Json) -> Json:
    """MiniMax' files say how many features of a head are rotated, transformers which share."""
    features, size = config.get("rotary_dim"), config.get("head_dim")
    if features is None or size is None or config.get("partial_rotary_factor") is not None:
        return config
    return {**config, "partial_rotary_factor": features / size}


MINIMAX_M2 = dataclasses.replace(
    LLAMA,
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": lambda config: 8,
        "head_dim": lambda config: 128,
        "max_position_embeddings": lambda config: 196_608,
    },
    fixed={
        **LLAMA.fixed,
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "shared_intermediate_size": (0,),
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "scoring_func": ("sigmoid",),
    },
    layer={**LLAMA.layer, **HEAD_NORMS},
    experts={
        **MIXTRAL.experts,
        "correction_bias": "block_sparse_moe.e_score_correction_bias",
    },
    upgrade=_with_share,
    features=lambda config, positions: {
        **rotary.read(config, positions, 5_000_000.0, turned=1.0),
        "head_norms": "whole",
        "experts": Experts(
            num_experts=first_of(config.get("num_local_experts"), 256),
            experts_per_token=first_of(config.get("num_experts_per_tok"), 8),
            intermediate_size=config["intermediate_size"],
            scores="sigmoid",
            correction_bias=True,
        ),
    },
    written=lambda config: {
        **rotary.write(config),
        "num_local_experts": _experts(config).num_experts,
        "num_experts_per_tok": _experts(config).experts_per_token,
    },
)


def _windows_of_dots(config: Json) -> Windows:
    """Those of the layers from `max_window_layers` on, where there is a window."""
    layers, window = config["num_hidden_layers"], config.get("sliding_window", 4096)
    first = min(first_of(config.get("max_window_layers"), 62), layers)
    kinds = config.get("layer_types") or [FULL] * first + [SLIDING] * (layers - first)
    return windows_of(window, kinds, layers)


_ROUTING_OF_DOTS = {
    **PLAIN_ROUTING,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
    "n_shared_experts": 0,
}

DOTS1 = dataclasses.replace(
    LLAMA,
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    fixed={**WINDOWED, "mlp_bias": (False,)},
    layer={**LLAMA.layer, **HEAD_NORMS},
    experts=ROUTED,
    features=lambda config, positions: {
        **rotary.read(config, positions),
        "biases": ATTENTION * bool(config.get("attention_bias")),
        "head_norms": "head",
        "windows": _windows_of_dots(config),
        "experts": routed(config, _ROUTING_OF_DOTS),
    },
    written=lambda config: {
        **rotary.write(config),
        "layer_types": [FULL] * config.num_layers,
        **written_windows(config),
        **written_routed(config),
        "attention_bias": "query" in config.biases,
    },
)


def _of_ernie(config: Json, positions: Positions) -> Json:
    layers, size = config["num_hidden_layers"], first_of(config.get("moe_intermediate_size"), 1536)
    first, last = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    step, last = first_of(config.get("moe_layer_interval"), 1), layers - 1 if last == -1 else last
    sparse = [n for n in range(layers) if (n + 1) % step == 0 and first <= n <= last]
    return {
        **rotary.read(config, positions, 500_000.0),
        "experts": Experts(
            num_experts=first_of(config.get("moe_num_experts"), 64),
            experts_per_token=first_of(config.get("moe_k"), 6),
            intermediate_size=size,
            correction_bias=True,
            shared_size=size * first_of(config.get("moe_num_shared_experts"), 2),
            dense_layers=tuple(n for n in range(layers) if n not in sparse),
        ),
    }


def _written_ernie(config: ModelConfig) -> Json:
    """The layers with experts as a step and its ends, if they can be said so."""
    experts = _experts(config)
    sparse = [n for n in range(config.num_layers) if config.has_experts(n)]
    step = sparse[1] - sparse[0] if sparse[1:] else 1
    return {
        **rotary.write(config),
        "moe_num_experts": experts.num_experts,
        "moe_k": experts.experts_per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "moe_num_shared_experts": experts.shared_size // experts.intermediate_size,
        "moe_layer_start_index": sparse[0] if sparse else config.num_layers,
        "moe_layer_end_index": sparse[-1] if sparse else config.num_layers,
        "moe_layer_interval": step,
    }


ERNIE45_MOE = dataclasses.replace(
    ERNIE45,
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    defaults={
        **ERNIE45.defaults,
        "num_key_value_heads": lambda config: 4,
        "head_dim": LLAMA.defaults["head_dim"],
    },
    fixed={**ERNIE45.fixed, "use_bias": (False, None), "moe_norm_min": (1e-12, None)},
    experts={**ROUTED, "correction_bias": "mlp.moe_statics.e_score_correction_bias"},
    lone=("correction_bias",),
    features=_of_ernie,
    written=_written_ernie,
)
