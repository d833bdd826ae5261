"""Rebuilds the golden files of test_parity.py with Hugging Face transformers.

Needs torch, which the tests themselves do not:
  pip install torch transformers safetensors numpy && python tests/golden/make.py [CASE...]
The committed files: torch 2.13.0 (CPU), transformers 5.23.0, eager attention, float32; what is
called bfloat16 with transformers 5.24.0.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
PROMPT, NEW = 9, 24
BASE = {
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 0,
}


def phi3(positions: int, original: int) -> dict[str, object]:
    """A Phi-3 whose texts within `original` tokens have factors of their own."""
    return {
        "model_type": "phi3",
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "pad_token_id": 0,
        "max_position_embeddings": positions,
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_theta": 100.0,
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.5],
            "long_factor": [1.0, 1.5, 3.0, 4.0],
            "original_max_position_embeddings": original,
        },
    }


MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.7,
}

CASES = {
    # Query heads per key/value head 3, heads wider than hidden / heads, tied.
    "grouped_tied": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
    },
    # One key/value head, another rotary base, several end tokens, sharded file.
    "single_kv_untied": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
        "eos_token_id": [3, 7],
    },
    # Plain multi-head attention, every optional key at its default.
    "plain": {"num_attention_heads": 3},
    # Every bias; Llama 3.1's rotary scaling, past the original context.
    "llama_biased": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {
            "rope_theta": 100.0,
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 8.0,
            "original_max_position_embeddings": 40,
        },
    },
    "llama_linear": {
        "num_attention_heads": 3,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "linear", "factor": 3.0},
    },
    "llama_yarn": {
        "num_attention_heads": 2,
        "head_dim": 32,
        "rope_parameters": {
            "rope_theta": 1000.0,
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 8.0,
            "original_max_position_embeddings": 256,
        },
    },
    "llama_yarn_exact": {
        "num_attention_heads": 2,
        "head_dim": 32,
        "rope_parameters": {
            "rope_theta": 1000.0,
            "rope_type": "yarn",
            "factor": 2.0,
            "attention_factor": 1.3,
            "truncate": False,
            "original_max_position_embeddings": 256,
        },
    },
    # One kind of attention a layer, as Ministral has.
    "mistral_layers": {
        "model_type": "ministral",
        "num_attention_heads": 2,
        "head_dim": 12,
        "num_key_value_heads": 2,
        "sliding_window": 4,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    # A window shorter than the prompt, and than a tree's path.
    "mistral": {
        "model_type": "mistral",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "sliding_window": 5,
    },
    "qwen2": {"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2},
    # Windows in some layers; tied.
    "qwen2_windows": {
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "model_type": "qwen3",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    },
    "qwen3_biased": {
        "model_type": "qwen3",
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    # Fused projections, a window, half of a head rotated.
    "phi3": {
        "model_type": "phi3",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "sliding_window": 5,
        "partial_rotary_factor": 0.5,
        "pad_token_id": 0,
    },
    # Texts within the original length have the short factors, longer ones the long factors.
    "phi3_short": phi3(160, 40),
    "phi3_long": phi3(64, 8),
    "olmo2": {
        "model_type": "olmo2",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "hidden_size": 48,
        "pad_token_id": 0,
    },
    # Soft caps, every second layer with a window, heads that do not share the hidden size.
    "gemma2": {
        "model_type": "gemma2",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "num_hidden_layers": 3,
        "query_pre_attn_scalar": 7,
        "sliding_window": 5,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        "pad_token_id": 0,
    },
    # A base for layers with a window, another and a stretch for the others.
    "gemma3": {
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "num_hidden_layers": 3,
        "query_pre_attn_scalar": 12,
        "sliding_window": 4,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 3.0,  # which no attention of transformers' Gemma 3 gets
        "rope_parameters": {
            "full_attention": {"rope_theta": 1000.0, "rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
        },
        "pad_token_id": 0,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 24,
        "n_layer": 2,
        "n_head": 3,
        "n_positions": 64,
    },
    "opt": {
        "model_type": "opt",
        "num_attention_heads": 3,
        "ffn_dim": 40,
        "pad_token_id": 1,
    },
    "neox": {"model_type": "gpt_neox", "num_attention_heads": 3, "rotary_pct": 0.5},
    # One part of a layer after the other, every feature rotated.
    "neox_serial": {
        "model_type": "gpt_neox",
        "num_attention_heads": 3,
        "rotary_pct": 1.0,
        "use_parallel_residual": False,
    },
    # All multipliers.
    "granite": {
        "model_type": "granite",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_bias": True,
        **MULTIPLIERS,
    },
    # Layers without positions.
    "smollm3": {
        "model_type": "smollm3",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "no_rope_layers": [1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 5,
        "pad_token_id": 0,
    },
    # A base for all layers, a stretch for those without a window.
    "olmo3": {
        "model_type": "olmo3",
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
        "rope_parameters": {
            "full_attention": {
                "rope_theta": 100.0,
                "rope_type": "yarn",
                "factor": 2.0,
                "beta_fast": 8.0,
                "original_max_position_embeddings": 32,
            },
            "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
        },
        "pad_token_id": 0,
    },
    # Rotated in windows alone, norms behind each part.
    "exaone4": {
        "model_type": "exaone4",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "pad_token_id": 0,
    },
    # One norm for both parts of a layer, without biases; rotated pairs side by side.
    "cohere": {
        "model_type": "cohere",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "attention_bias": True,
        "logit_scale": 0.7,
        "pad_token_id": 0,
    },
    "cohere2": {
        "model_type": "cohere2",
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 32,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "pad_token_id": 0,
    },
    "starcoder2": {
        "model_type": "starcoder2",
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "sliding_window": 6,
    },
    "arcee": {"model_type": "arcee", "num_attention_heads": 3, "mlp_bias": True},
    # Norms whose weights are offsets, half of a head rotated.
    "nemotron": {
        "model_type": "nemotron",
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "attention_bias": True,
    },
    "seed_oss": {
        "model_type": "seed_oss",
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "attention_out_bias": False,
        "pad_token_id": 0,
    },
    "ernie": {
        "model_type": "ernie4_5",
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "use_bias": True,
        "pad_token_id": 0,
    },
    "internlm3": {
        "model_type": "internlm3",
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "qkv_bias": True,
        "bias": True,
        "pad_token_id": 0,
    },
    # Mixtures: three to nine experts, one to four of them for a token.
    "mixtral": {
        "model_type": "mixtral",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
    },
    # A layer without experts, a shared one elsewhere, shares that do not sum to 1.
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 10,
        "shared_expert_intermediate_size": 18,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "num_hidden_layers": 3,
        "decoder_sparse_step": 2,
        "num_experts": 9,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 7,
        "norm_topk_prob": True,
    },
    "olmoe": {
        "model_type": "olmoe",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 6,
        "num_experts_per_tok": 1,
        "intermediate_size": 13,
        "pad_token_id": 0,
    },
    "granitemoe": {
        "model_type": "granitemoe",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "intermediate_size": 11,
        **MULTIPLIERS,
    },
    "granitemoeshared": {
        "model_type": "granitemoeshared",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 3,
        "intermediate_size": 9,
        "shared_intermediate_size": 14,
        **MULTIPLIERS,
    },
    # Half of a head rotated, in pairs side by side; norms after the parts of a layer, too.
    "glm": {
        "model_type": "glm",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "pad_token_id": 0,
    },
    "glm4": {
        "model_type": "glm4",
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "attention_bias": False,
        "pad_token_id": 0,
    },
    # Queries grow every six positions.
    "ministral3": {
        "model_type": "ministral3",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_theta": 100.0,
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 8.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 6,
            "llama_4_scaling_beta": 0.5,
        },
        "max_position_embeddings": 48,
    },
    # Sigmoids, chosen with a bias: in groups, scaled, beside a shared expert; layers without.
    "glm4_moe": {
        "model_type": "glm4_moe",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 3,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 10,
        "routed_scaling_factor": 1.6,
        "num_mtp_layers": 0,
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rotary_dim": 4,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 14,
    },
    "dots1": {
        "model_type": "dots1",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_routed_experts": 7,
        "n_shared_experts": 2,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 6,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    # A softmax, chosen with a bias.
    "ernie_moe": {
        "model_type": "ernie4_5_moe",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_intermediate_size": 11,
        "pad_token_id": 0,
    },
    # Latents: of queries, too; values wider than keys; YaRN, which scales scores.
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "q_lora_rank": 14,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 8,
        "num_mtp_layers": 0,
        "rope_parameters": {
            "rope_theta": 100.0,
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 8.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16,
        },
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 6,
        "v_head_dim": 8,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "topk_method": "group_limited_greedy",
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "moe_intermediate_size": 7,
    },
    "glm4_moe_lite": {
        "model_type": "glm4_moe_lite",
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 9,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
    },
    # Sinks, windows in turns, biases everywhere, a clamped activation.
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 20,
        "sliding_window": 5,
        "swiglu_limit": 1.5,
        "rope_parameters": {
            "rope_theta": 100.0,
            "rope_type": "yarn",
            "factor": 2.0,
            "beta_fast": 8.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
        "max_position_embeddings": 128,
    },
}


def in_bfloat16(name: str, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of a checkpoint with weights and activations in bfloat16."""
    config = AutoConfig.from_pretrained(HERE / name)
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_pretrained(
        HERE / name, config=config, dtype=torch.bfloat16, attn_implementation="eager"
    )
    with torch.no_grad():
        return model.eval()(tokens).logits.float()


def make(name: str, changes: dict) -> None:
    torch.manual_seed(len(name))
    config = AutoConfig.for_model(**({"model_type": "llama"} | BASE | changes))
    config._experts_implementation = "eager"  # which also computes in float64
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for parameter in model.parameters():  # the initial 0.02 would hide errors
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
        for own, buffer in model.named_buffers():
            if own.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
    model.tie_weights()
    tokens = torch.randint(0, config.vocab_size, (2, 19))
    with torch.no_grad():  # in float32 they are as far from these as a test allows
        logits = model.double()(tokens).logits.float()
    model.float()
    model.generation_config.eos_token_id = None  # texts run to their length
    prompts = tokens[:, :PROMPT]
    greedy = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),  # else it leaves out padding tokens
        max_new_tokens=NEW,
        do_sample=False,
    )[:, PROMPT:]
    model.generation_config.eos_token_id = config.eos_token_id
    shards = "20KB" if "untied" in name else "1GB"
    model.save_pretrained(HERE / name, max_shard_size=shards)
    made = {"tokens": tokens, "logits": logits, "greedy": greedy}
    made["bfloat16"] = in_bfloat16(name, tokens)
    np.savez_compressed(HERE / f"{name}.npz", **{key: made[key].numpy() for key in made})


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        make(case, CASES[case])
