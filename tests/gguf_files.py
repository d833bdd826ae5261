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
    "gpt_oss": "gpt-oss", "granite": "granite",
}  # fmt: skip
WHOLE = {"F32": np.float32, "F16": np.float16}


def write_gguf(folder: Path, file: Path, kind: str = "F32", **metadata) -> Path:
    """Writes the model of a folder, its matrices in blocks of a type; further keys as they are."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    name = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(file, name)
    _write_config(writer, config)
    held = {}
    for each in sorted(folder.glob("*.safetensors")):
        held |= load_file(each)
    for tensor, values in _tensors(held, config, name):
        add_tensor(writer, tensor, values, kind)
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
    writer.add_block_count(of("num_hidden_layers", "n_layer"))
    writer.add_feed_forward_length(of("intermediate_size", "n_inner") if "n_embd" not in config
                                   else of("n_inner", default=4 * hidden))  # fmt: skip
    writer.add_head_count(heads)
    writer.add_head_count_kv(of("num_key_value_heads", default=heads))
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(of("layer_norm_eps", "layer_norm_epsilon"))
    size = of("head_dim", default=hidden // heads)
    if "head_dim" in config:
        writer.add_key_length(size)
        writer.add_value_length(size)
    ends = of("eos_token_id", default=0)
    first, *more = ends if isinstance(ends, list) else [ends]
    writer.add_eos_token_id(first)
    for end in more:
        writer.add_eot_token_id(end)
    _write_experts(writer, config)
    for own, key in GRANITE.items():
        if writer.arch.startswith("granite"):
            writer.add_float32(f"{writer.arch}.{own}", config[key])
    if of("sliding_window") and not config["model_type"].startswith(("qwen2", "qwen3", "mixtral")):
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


def _write_experts(writer: gguf.GGUFWriter, config: dict) -> None:
    count = config.get("num_experts") or config.get("num_local_experts")
    if not count:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if config["model_type"] in ("qwen2_moe", "qwen3_moe"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
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
