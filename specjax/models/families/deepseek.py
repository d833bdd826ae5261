"""DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437), whose experts and latents others took over."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.models.config import Experts, Latent, ModelConfig
from specjax.models.families import rotary
from specjax.models.families.family import Json, Positions, first_of
from specjax.models.families.llama import LLAMA

ROUTED: Mapping[str, str] = {
    "router": "mlp.gate.weight",
    "correction_bias": "mlp.gate.e_score_correction_bias",
    "expert_gate": "mlp.experts.{expert}.gate_proj.weight",
    "expert_up": "mlp.experts.{expert}.up_proj.weight",
    "expert_down": "mlp.experts.{expert}.down_proj.weight",
    "gate": "mlp.shared_experts.gate_proj.weight",
    "up": "mlp.shared_experts.up_proj.weight",
    "down": "mlp.shared_experts.down_proj.weight",
}
"""Leaves of a layer with experts."""

_GROUP_BEST = 2
_NEEDED = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")

PLAIN_ROUTING: Json = {
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
"""What a file means that leaves these out, unless its family means otherwise."""


def routed(config: Json, usual: Json) -> Experts:
    """The experts that a file names, which may leave out what is `usual`.

    Raises:
      ValueError: it names no experts, or more layers without than there are.
    """
    for key in _NEEDED:
        if config.get(key) is None:
            raise ValueError(f"the configuration has no {key!r}, which mixtures need.")
    said = {key: first_of(config.get(key), usual[key]) for key in usual}
    dense, layers = said["first_k_dense_replace"], config["num_hidden_layers"]
    if dense > layers:
        raise ValueError(f"first_k_dense_replace is {dense}; there are {layers} layers.")
    size, groups = config["moe_intermediate_size"], said["n_group"]
    return Experts(
        num_experts=config["n_routed_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=size,
        scores="sigmoid",
        norm_topk=said["norm_topk_prob"],
        routed_scale=float(said["routed_scaling_factor"]),
        correction_bias=True,
        num_groups=groups,
        topk_groups=said["topk_group"],
        group_best=1 if groups == 1 else _GROUP_BEST,
        shared_size=size * said["n_shared_experts"],
        dense_layers=tuple(range(dense)),
    )


def written_routed(config: ModelConfig) -> Json:
    """The keys that `routed` reads."""
    experts = config.experts
    assert experts is not None
    return {
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.norm_topk,
        "routed_scaling_factor": experts.routed_scale,
        "n_group": experts.num_groups,
        "topk_group": experts.topk_groups,
        "n_shared_experts": experts.shared_size // experts.intermediate_size,
        "first_k_dense_replace": len(experts.dense_layers),
    }


_OF_LATENTS: Mapping[str, str] = {
    **{leaf: name for leaf, name in LLAMA.layer.items() if leaf not in ("key", "value")},
    "query_down": "self_attn.q_a_proj.weight",
    "query_down_norm": "self_attn.q_a_layernorm.weight",
    "query_up": "self_attn.q_b_proj.weight",
    "key": "self_attn.kv_a_proj_with_mqa.weight",
    "latent_norm": "self_attn.kv_a_layernorm.weight",
    "latent_key latent_value": "self_attn.kv_b_proj.weight",
}


def latents(config: Json, positions: Positions, usual: Json) -> Json:
    """The attention of a file, which may leave out what is `usual`."""
    sizes = {key: first_of(config.get(key), usual[key]) for key in usual if key != "q_lora_rank"}
    rank, turned, unrotated, value = (
        sizes[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    scale = rotary.all_dims_scale(config) * (unrotated + turned) ** -0.5
    return {
        **rotary.read({**config, "head_dim": turned}, positions),
        "rotary_dim": turned,
        "head_dim": rank + turned,
        "num_kv_heads": 1,
        "query_scale": scale,
        "latent": Latent(rank, unrotated, value, config.get("q_lora_rank", usual["q_lora_rank"])),
    }


def written_latents(config: ModelConfig) -> dict[str, Any]:
    """The keys that `latents` reads."""
    latent, turned = config.latent, config.rotated
    assert latent is not None
    assert config.query_scale is not None
    scale = config.query_scale * (latent.unrotated + turned) ** 0.5
    return {
        **rotary.write(config, rotary.write_all_dims(config, scale)),
        "kv_lora_rank": latent.rank,
        "q_lora_rank": latent.query_rank,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": latent.unrotated,
        "v_head_dim": latent.value,
    }


_OWN = ("num_kv_heads", "head_dim")
"""Fields that follow from the latents."""

_USUAL = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}

_ROUTING = {
    **PLAIN_ROUTING,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
}

DEEPSEEK_V3 = dataclasses.replace(
    LLAMA,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    fields={field: key for field, key in LLAMA.fields.items() if field not in _OWN},
    defaults={**LLAMA.defaults, "max_position_embeddings": lambda config: 4096},
    fixed={
        **LLAMA.fixed,
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "rope_interleave": (True, None),
        "moe_layer_freq": (1, None),
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
    },
    layer=_OF_LATENTS,
    interleaved=("query", "query_up", "key"),
    rotated_last=True,
    experts=ROUTED,
    features=lambda config, positions: {
        **latents(config, positions, _USUAL),
        "experts": routed(config, _ROUTING),
    },
    written=lambda config: {**written_latents(config), **written_routed(config)},
)

KIMI_K2 = dataclasses.replace(DEEPSEEK_V3, model_type="kimi_k2")
"""Moonshot's, which is a DeepSeek-V3 by another name."""


def _of_v2(config: Json, positions: Positions) -> Json:
    method = first_of(config.get("topk_method"), "greedy")
    grouped = {} if method == "group_limited_greedy" else {"n_group": 1, "topk_group": 1}
    usual = {**PLAIN_ROUTING, "first_k_dense_replace": 0, "n_shared_experts": 2}
    experts = routed({**config, **grouped}, usual)
    return {
        **latents(config, positions, _USUAL),
        "experts": dataclasses.replace(
            experts, scores="softmax", norm_topk=False, correction_bias=False, group_best=1
        ),
    }


def _written_v2(config: ModelConfig) -> Json:
    assert config.experts is not None
    grouped = config.experts.num_groups > 1
    return {
        **written_latents(config),
        **written_routed(config),
        "topk_method": "group_limited_greedy" if grouped else "greedy",
    }


DEEPSEEK_V2 = dataclasses.replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    defaults={**LLAMA.defaults, "max_position_embeddings": lambda config: 2048},
    fixed={
        **DEEPSEEK_V3.fixed,
        "norm_topk_prob": (False, None),
        "scoring_func": ("softmax", None),
        "topk_method": ("greedy", "group_limited_greedy", None),
    },
    experts={leaf: name for leaf, name in ROUTED.items() if leaf != "correction_bias"},
    features=_of_v2,
    written=_written_v2,
)
