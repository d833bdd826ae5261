"""GGUF files made of Hugging Face folders, as llama.cpp's converter makes them.

Names are those of the package gguf (`get_tensor_name_map`), which specjax does not ask.
"""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file

ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "phi3": "phi3", "olmo2": "olmo2", "gpt2": "gpt2",
    "gpt_neox": "gptneox", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe", "granitemoe": "granitemoe", "granitemoeshared": "granitemoe",
    "gpt_oss": "gpt-oss", "granite": "granite", "glm4": "glm4", "glm4_moe": "glm4moe",
    "dots1": "dots1", "ernie4_5": "ernie4_5", "ernie4_5_moe": "ernie4_5-moe",
    "minimax_m2": "minimax-m2", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
}  # fmt: skip
WHOLE = {"F32": np.float32, "F16": np.float16}


def write_gguf(
    folder: Path, file: Path, kind: str = "F32", of_2024: bool = False, **metadata
) -> Path:
    """Writes the model of a folder, its matrices in blocks of a type; further keys as they are.

    DeepSeek's latents lie in one matrix as `of_2024`, else by head.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config |= {"of_2024": of_2024}
    name = name_of(config)
    writer = gguf.GGUFWriter(file, name)
    _write_config(writer, config)
    held = {}
    for each in sorted(folder.glob("*.safetensors")):
        held |= load_file(each)
    for tensor, values in _tensors(held, config, name):
        add_tensor(writer, tensor, values, kind)
    for block in range(_predicting(config)):
        start = f"blk.{config['num_hidden_layers'] + block}."
        for tensor in ("attn_norm", "nextn.enorm"):
            add_tensor(writer, f"{start}{tensor}.weight", np.ones(config["hidden_size"]))
    for key, value in metadata.items():
        add(writer, key.replace("__", "."), value)
    finish(writer)
    return file


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str = "F32") -> None:
    """A tensor in blocks of a type, if it is a matrix of whole blocks."""
    values = values.astype(np.float32)
    block = gguf.GGML_QUANT_SIZES[Type[kind]][0]
    if values.ndim == 1 or values.shape[-1] % block:
        kind = "F32"
    if kind in WHOLE:
        writer.add_tensor(name, np.ascontiguousarray(values.astype(WHOLE[kind])))
    elif kind in DRAWN:
        writer.add_tensor(name, drawn_blocks(kind, *values.shape), raw_dtype=Type[kind])
    else:
        blocks = gguf.quants.quantize(values, Type[kind])
        writer.add_tensor(name, blocks, raw_dtype=Type[kind])


DRAWN = ("Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
"""Types that the package gguf does not write; their blocks are drawn."""


def drawn_blocks(kind: str, *shape: int, seed: int = 0) -> np.ndarray:
    """Blocks of random codes with small scales, of which those of 16 bits begin or end a block."""
    weights, size = gguf.GGML_QUANT_SIZES[Type[kind]]
    drawn = np.random.default_rng(seed)
    *outer, inputs = shape
    made = drawn.integers(0, 256, (*outer, inputs // weights, size), np.uint8)
    for at in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (size - 2,), "IQ4_NL": (0,)}[kind]:
        scales = drawn.uniform(1e-4, 1e-3, made.shape[:-1]).astype(np.float16)
        made[..., at : at + 2] = scales.view(np.uint8).reshape(*made.shape[:-1], 2)
    return made.reshape(*outer, -1)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A key of metadata, in the type that its value has."""
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def _write_config(writer: gguf.GGUFWriter, config: dict) -> None:
    def of(*names: str, default: Any = None) -> Any:
        return next((config[name] for name in names if config.get(name) is not None), default)

    hidden, heads = of("hidden_size", "n_embd"), of("num_attention_heads", "n_head")
    writer.add_context_length(of("max_position_embeddings", "n_positions"))
    writer.add_embedding_length(hidden)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_block_count(of("num_hidden_layers", "n_layer") + _predicting(config))
    if _predicting(config):
        writer.add_nextn_predict_layers(_predicting(config))
    writer.add_feed_forward_length(of("intermediate_size", "n_inner") if "n_embd" not in config
                                   else of("n_inner", default=4 * hidden))  # fmt: skip
    writer.add_head_count(heads)
    writer.add_head_count_kv(of("num_key_value_heads", default=heads))
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(of("layer_norm_eps", "layer_norm_epsilon"))
    size = of("head_dim", default=hidden // heads)
    if name_of(config) == "deepseek2":
        size = config["qk_rope_head_dim"]
        _write_latents(writer, config)
    elif "head_dim" in config:
        writer.add_key_length(size)
        writer.add_value_length(size)
    ends = of("eos_token_id", default=0)
    first, *more = ends if isinstance(ends, list) else [ends]
    writer.add_eos_token_id(first)
    for end in more:
        writer.add_eot_token_id(end)
    if writer.arch in ROUTED:
        _write_routed(writer, config)
    else:
        _write_experts(writer, config)
    for own, key in GRANITE.items():
        if writer.arch.startswith("granite"):
            writer.add_float32(f"{writer.arch}.{own}", config[key])
    unsaid = ("qwen2", "qwen3", "mixtral", "dots1")
    if of("sliding_window") and not config["model_type"].startswith(unsaid):
        writer.add_sliding_window(config["sliding_window"])
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if of(key):
            add(writer, f"{writer.arch}.{key}", config[key])
    if "use_parallel_residual" in config:
        writer.add_parallel_residual(config["use_parallel_residual"])
    if "layer_types" in config and writer.arch == "gemma3":
        kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_array("gemma3.attention.sliding_window_pattern", kinds)
    _write_rope(writer, config, size)


GRANITE = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
           "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}  # fmt: skip


ROUTED = ("glm4moe", "dots1", "deepseek2")


def _predicting(config: dict) -> int:
    """Blocks behind the last layer that predict further tokens."""
    return config.get("num_nextn_predict_layers") or 0


def name_of(config: dict) -> str:
    return ARCHITECTURES[config["model_type"]]


def _write_latents(writer: gguf.GGUFWriter, config: dict) -> None:
    """As today, if the keys' and values' matrices are by head, else as in 2024."""
    turned, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    key, value = config["qk_nope_head_dim"] + turned, config["v_head_dim"]
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    if config.get("of_2024"):
        writer.add_key_length(key)
        writer.add_value_length(value)
    else:
        writer.add_key_length(rank + turned)
        writer.add_value_length(rank)
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)


def _write_routed(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    kinds = config.get("mlp_layer_types", [])
    writer.add_leading_dense_block_count(config.get("first_k_dense_replace", kinds.count("dense")))
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    scores = "SOFTMAX" if config["model_type"] == "deepseek_v2" else "SIGMOID"
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType[scores])
    if config["n_group"] > 1:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def _write_experts(writer: gguf.GGUFWriter, config: dict) -> None:
    def of(*names: str) -> Any:
        return next((config[name] for name in names if config.get(name)), None)

    count = of("num_experts", "num_local_experts", "moe_num_experts")
    if not count:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(of("num_experts_per_tok", "moe_k"))
    if of("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["model_type"] == "minimax_m2":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config["model_type"] == "ernie4_5_moe":
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    for key in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        if config.get(key):
            writer.add_expert_shared_feed_forward_length(config[key])


def _write_rope(writer: gguf.GGUFWriter, config: dict, size: int) -> None:
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:
        writer.add_float32(
            f"{writer.arch}.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"]
        )
        rope = rope["full_attention"]
    if not rope:
        return
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1)))
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if "beta_fast" in rope:
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for own in ("long", "short") if kind == "longrope" else ():
        factors = np.array(rope[f"{own}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{own}.weight", factors)
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, size))


def llama3_factors(rope: dict, size: int) -> np.ndarray:
    """What Llama 3 divides its frequencies by."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    made = []
    for at in range(0, size, 2):
        length = 2 * np.pi * rope["rope_theta"] ** (at / size)
        turns = rope["original_max_position_embeddings"] / length
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        made.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(made, np.float32)


PERMUTED = ("llama", "granite", "granitemoe")


def _with_experts(held: dict, config: dict):
    """Tensors, those of experts together and each matrix by itself."""
    waiting = {}
    for own, values in held.items():
        parts = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", own)
        if parts:
            waiting.setdefault(f"{parts[1]}.{parts[3]}", {})[int(parts[2])] = values
        elif config["model_type"] == "gpt_oss" and ".experts." in own:
            name, bias, _ = own.partition("_bias")
            values = values if bias else values.swapaxes(1, 2)
            end = "bias" if bias else "weight"
            if name.endswith("gate_up_proj"):
                base = name.removesuffix("gate_up_proj")
                yield f"{base}gate_proj.{end}", values[:, 0::2]
                yield f"{base}up_proj.{end}", values[:, 1::2]
            else:
                yield f"{name}.{end}", values
        elif own.endswith("self_attn.sinks"):
            yield f"{own}.weight", values
        elif own.endswith("shared_mlp.output_linear.weight"):
            base = own.removesuffix("shared_mlp.output_linear.weight")
            yield f"{base}mlp.shared_expert.down_proj.weight", values
        elif own.endswith("input_linear.weight"):
            base = own.removesuffix("input_linear.weight")
            base = base.replace("shared_mlp.", "mlp.shared_expert.")
            axis = values.ndim - 2
            names = ("w1", "w3") if values.ndim == 3 else ("gate_proj", "up_proj")
            base = base + ("experts." if values.ndim == 3 else "")
            for part, matrix in zip(names, np.split(values, 2, axis=axis), strict=True):
                yield f"{base}{part}.weight", matrix
        else:
            yield own, values
    for own, parts in waiting.items():
        yield own, np.stack([parts[number] for number in range(len(parts))])


def _by_head(names, base: str, values: np.ndarray, config: dict):
    """What makes keys of latents, turned, and what makes values of them."""
    parts = values.reshape(config["num_attention_heads"], -1, values.shape[-1])
    key, value = np.split(parts, [config["qk_nope_head_dim"]], axis=1)
    for own, matrix in (("k", key.swapaxes(1, 2)), ("v", value)):
        yield names.get_name(base.replace("kv_b", f"{own}_b")) + ".weight", matrix


def _tensors(held: dict, config: dict, name: str):
    """Tensors as the converter has them."""
    arch = next(each for each, own in gguf.MODEL_ARCH_NAMES.items() if own == name)
    layers = config.get("num_hidden_layers") or config["n_layer"]
    names = gguf.get_tensor_name_map(arch, layers)
    heads = config.get("num_attention_heads") or config["n_head"]
    for own, values in _with_experts(held, config):
        base, _, end = own.rpartition(".")
        if own.endswith((".attn.bias", ".masked_bias", "inv_freq")):
            continue
        if own.endswith("e_score_correction_bias"):
            base, end = own.removesuffix("_bias"), "bias"
        if name == "deepseek2" and base.endswith("kv_b_proj") and not config.get("of_2024"):
            yield from _by_head(names, base, values.astype(np.float32), config)
            continue
        if config.get("tie_word_embeddings") and base in ("lm_head", "embed_out"):
            continue
        found = names.get_name(base)
        assert found is not None, own
        values = values.astype(np.float32)
        if name in PERMUTED and base.endswith(("q_proj", "k_proj")):
            kv = config.get("num_key_value_heads") or heads
            count = heads if base.endswith("q_proj") else kv
            parts = values.reshape(count, 2, -1, *values.shape[1:])
            values = parts.swapaxes(1, 2).reshape(values.shape)
        if name.startswith("gemma") and base.endswith("norm"):
            values = values + 1
        if name == "gptneox" and base.endswith("query_key_value"):
            parts = values.reshape(heads, 3, -1, *values.shape[1:])
            values = parts.swapaxes(0, 1).reshape(values.shape)
        if name == "gpt2" and base.endswith(("c_attn", "c_proj", "c_fc")):
            values = values.T
        yield f"{found}.{end}", values
