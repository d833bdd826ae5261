"""GGUF's mixtures of experts: their metadata as a `config.json` says it."""

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.gguf.header import Header, shown
from specjax.checkpoints.gguf.metadata import Json, one, rotary, with_share, without_windows

SOFTMAX, SIGMOID = 1, 2
"""What `expert_gating_func` says."""
CORRECTION = "exp_probs_b.bias"
"""Which has an axis of 1 in some files."""
SHARED = "ffn_up_shexp.weight"
KEYS_BY_HEAD, VALUES_BY_HEAD = "attn_k_b.weight", "attn_v_b.weight"
KEYS_AND_VALUES = "attn_kv_b.weight"
UNPACKED = (KEYS_BY_HEAD, VALUES_BY_HEAD, KEYS_AND_VALUES)
"""Matrices of latents, which do not stay packed."""


def _router(header: Header) -> Json:
    """What a mixture's router does; how it weighs, llama.cpp knows by the architecture."""
    name = header.architecture
    count, chosen, size, shared = (
        one(header, f"{name}.expert_{key}")
        for key in ("count", "used_count", "feed_forward_length", "shared_feed_forward_length")
    )
    made = {
        "num_experts": count, "num_local_experts": count, "num_experts_per_tok": chosen,
        "moe_intermediate_size": size, "shared_expert_intermediate_size": shared,
        "shared_intermediate_size": shared,
    }  # fmt: skip
    return {key: value for key, value in made.items() if value is not None}


def mixture(header: Header, config: Json) -> Json:
    """Mixtral's, Qwen's and OLMoE's."""
    norm_topk, bias = header.architecture == "qwen3moe", config["attention_bias"]
    made = without_windows(header, config) | _router(header)
    return made | {"norm_topk_prob": norm_topk, "qkv_bias": bias}


def granite(header: Header, config: Json) -> Json:
    """Granite's multipliers, and the router of its mixtures."""
    made = without_windows(header, config) | _router(header)
    for key, own in (
        ("attention_multiplier", "attention.scale"),
        ("embedding_multiplier", "embedding_scale"),
        ("residual_multiplier", "residual_scale"),
        ("logits_scaling", "logit_scale"),
    ):
        if value := header.get(f"{header.architecture}.{own}", float):
            made[key] = value
    return made


def gpt_oss(header: Header, config: Json) -> Json:
    """gpt-oss': every other layer has a window, and YaRN's bounds are no whole numbers."""
    made = rotary(header, config) | _router(header)
    made["sliding_window"] = one(header, f"{header.architecture}.attention.sliding_window")
    made["intermediate_size"] = made.get("moe_intermediate_size", made.get("intermediate_size"))
    stretch = made.get("rope_scaling")
    if stretch is not None and stretch["rope_type"] == "yarn":
        made["rope_scaling"] = stretch | {"truncate": False}
    return made


def scores(header: Header) -> int:
    """What a router's logits become, as its file says.

    Where it says nothing sigmoid if it has correction biases, as those of files from before that
    key have, else softmax.
    """
    corrected = any(name.endswith(CORRECTION) for name in header.tensors)
    said = one(header, f"{header.architecture}.expert_gating_func")
    return said or (SIGMOID if corrected else SOFTMAX)


def routed(header: Header, config: Json) -> Json:
    """A router as DeepSeek's, behind some dense layers: that of GLM-4.5 to 4.7 and dots.llm1.

    Raises:
      CheckpointError: it is another one.
    """
    name, made = header.architecture, with_share(header, without_windows(header, config))
    if scores(header) != SIGMOID:
        raise CheckpointError(
            f"{header.file}: {name}.expert_gating_func is {scores(header)}; {SIGMOID} (sigmoid) is "
            "supported."
        )
    heads = any(each.endswith(".attn_q_norm.weight") for each in header.tensors)
    return made | _routing(header) | {"use_qk_norm": heads, "sliding_window": None}


def _routing(header: Header) -> Json:
    name, named = header.architecture, _router(header)
    size = named.get("moe_intermediate_size")
    return {
        "n_routed_experts": named.get("num_experts"),
        "num_experts_per_tok": named.get("num_experts_per_tok"),
        "moe_intermediate_size": size,
        "n_shared_experts": _shared(header) // size if size else 0,
        "first_k_dense_replace": one(header, f"{name}.leading_dense_block_count") or 0,
        "norm_topk_prob": header.get(f"{name}.expert_weights_norm", bool, False),
        "routed_scaling_factor": header.get(f"{name}.expert_weights_scale", float, 0.0) or 1.0,
        "n_group": one(header, f"{name}.expert_group_count") or 1,
        "topk_group": one(header, f"{name}.expert_group_used_count") or 1,
    }


def _shared(header: Header) -> int:
    """Features of the shared expert, as its tensors say them; 0 where there is none."""
    found = [each for own, each in header.tensors.items() if own.endswith(SHARED)]
    return found[0].shape[0] if found else 0


def deepseek(header: Header, config: Json) -> Json:
    """DeepSeek's latents and routers. Old files have keys and values of all heads in one tensor,
    and with it the sizes of these instead of the latent's.

    Raises:
      CheckpointError: a size is missing, or no number of latents is.
    """
    name = header.architecture
    sizes = {
        key: one(header, f"{name}.{own}")
        for key, own in (
            ("kv_lora_rank", "attention.kv_lora_rank"), ("q_lora_rank", "attention.q_lora_rank"),
            ("qk_rope_head_dim", "rope.dimension_count"),
        )
    }  # fmt: skip
    end = "_mla" if one(header, f"{name}.attention.key_length_mla") else ""
    whole, value = (
        one(header, f"{name}.attention.{each}_length{end}") for each in ("key", "value")
    )
    turned = sizes["qk_rope_head_dim"]
    if whole is None or value is None or not turned or not sizes["kv_lora_rank"]:
        found = {**sizes, "key_length": whole, "value_length": value}
        lacking = ", ".join(key for key, each in found.items() if not each and key != "q_lora_rank")
        raise CheckpointError(f"{header.file} does not say {lacking} of its latents.")
    if whole <= turned:
        raise CheckpointError(
            f"{header.file}: {name}.rope.dimension_count is {turned}; keys have {shown(whole)}."
        )
    made: Json = without_windows(header, config) | sizes | _routing(header)
    made |= {"qk_nope_head_dim": whole - turned, "v_head_dim": value}
    made.pop("partial_rotary_factor", None)
    if made["n_group"] > 1 and scores(header) != SIGMOID:
        made["topk_method"] = "group_limited_greedy"
    stretch = made.get("rope_scaling")
    if stretch is not None and stretch["rope_type"] == "yarn":
        grown = 10 * header.get(f"{name}.rope.scaling.yarn_log_multiplier", float, 0.0)
        if grown := round(grown, 6):  # of a number in 32 bits
            made["rope_scaling"] = stretch | {"mscale": grown, "mscale_all_dim": grown}
    return made


def ernie(header: Header, config: Json) -> Json:
    """ERNIE 4.5's, with experts in every so many layers from one on, or without any."""
    name, named = header.architecture, _router(header)
    made = without_windows(header, config) | {"use_bias": config["attention_bias"]}
    size = named.get("moe_intermediate_size")
    if not size:
        return made
    return made | {
        "moe_num_experts": named.get("num_experts"),
        "moe_k": named.get("num_experts_per_tok"),
        "moe_intermediate_size": size,
        "moe_num_shared_experts": _shared(header) // size,
        "moe_layer_start_index": one(header, f"{name}.leading_dense_block_count") or 0,
        "moe_layer_interval": one(header, f"{name}.interleave_moe_layer_step") or 1,
    }


def minimax(header: Header, config: Json) -> Json:
    """MiniMax-M2's, whose experts have the features that dense layers would have."""
    named = _router(header)
    made = with_share(header, without_windows(header, config)) | named
    return made | {"intermediate_size": named.get("moe_intermediate_size")}
