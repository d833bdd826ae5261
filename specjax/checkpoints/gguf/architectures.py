"""What GGUF's architectures are: tables of tensor names beside those of the families, and their
metadata as a `config.json` would say it.

Sources: the package gguf (`constants.py`, which names keys and tensors), and llama.cpp's converter
and models, which say what is done to tensors, and what the absence of a key stands for.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.gguf.blocks import form_of
from specjax.checkpoints.gguf.header import Header, header_of, shown
from specjax.models.families import FAMILIES, Family

Json = dict[str, Any]

_OUTER = {
    "embedding": "token_embd.weight",
    "position_embedding": "position_embd.weight",
    "final_norm": "output_norm.weight",
    "unembedding": "output.weight",
}
_LAYER = {
    "attention_norm": "attn_norm.weight",
    "query": "attn_q.weight",
    "key": "attn_k.weight",
    "value": "attn_v.weight",
    "query key value": "attn_qkv.weight",
    "query_norm": "attn_q_norm.weight",
    "key_norm": "attn_k_norm.weight",
    "output": "attn_output.weight",
    "attention_post_norm": "post_attention_norm.weight",
    "sinks": "attn_sinks.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "gate up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "mlp_post_norm": "post_ffw_norm.weight",
}
_EXPERTS = {
    "router": "ffn_gate_inp.weight",
    "expert_gate": "ffn_gate_exps.weight",
    "expert_up": "ffn_up_exps.weight",
    "expert_down": "ffn_down_exps.weight",
    "gate": "ffn_gate_shexp.weight",
    "up": "ffn_up_shexp.weight",
    "down": "ffn_down_shexp.weight",
    "shared_gate": "ffn_gate_inp_shexp.weight",
}
_FREQUENCIES = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_IGNORED = (_FREQUENCIES, _LONG, _SHORT, "attn_rot_embd.weight")
_FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_positions": "context_length",
}
"""Fields of a model's configuration, and the keys that they have in metadata."""
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_OFF: Mapping[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.causal": (True,),
}
"""Keys that would change what a model computes, with the values that do not."""
_ENDS = ("<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>")
"""Control tokens that end a text or a turn of a chat, as llama.cpp has it, named or not."""
_HARMONY = {"<|return|>", "<|call|>"}
"""Those of gpt-oss, of whose messages `<|end|>` ends one and not the turn."""
_CONTROL = 3
_MOST_FACTORS = 1 << 16


@dataclasses.dataclass(frozen=True)
class _Architecture:
    """A family's table with GGUF's names, and what its configuration has beside the common keys.

    `reads` are the keys of `_OFF` that `more` reads.
    """

    family: Family
    more: Callable[[Header, Json], Json]
    reads: tuple[str, ...] = ()


def config_of(file: Path) -> Json:
    """A file's metadata in the words of a `config.json`.

    Raises:
      CheckpointError: it is missing, damaged or not supported.
    """
    header = header_of(file)
    known = _architecture(header)
    name = header.architecture
    for key, neutral in _OFF.items():
        value = header.metadata.get(f"{name}.{key}")
        if value is None or key in known.reads:
            continue
        if not np.isscalar(value) or value not in neutral:
            raise CheckpointError(
                f"{file}: {name}.{key} is {shown(value)}, which {name} models do not support here."
            )
    config: Json = {"model_type": known.family.model_type}
    for field, own in _FIELDS.items():
        value = _one(header, f"{name}.{own}")
        if value is not None and field in known.family.fields:
            config[known.family.fields[field]] = value
    for own in _EPSILONS:
        if (epsilon := header.get(f"{name}.{own}", float)) is not None:
            config[known.family.fields["norm_eps"]] = epsilon
    embedding = header.tensors.get(_OUTER["embedding"])
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file} has no matrix {_OUTER['embedding']}.")
    config |= {
        "vocab_size": embedding.shape[0],
        known.family.fields["tie_embeddings"]: _OUTER["unembedding"] not in header.tensors,
        "attention_bias": any(f"blk.0.attn_{own}.bias" in header.tensors for own in ("q", "qkv")),
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "eos_token_id": [end for end in _ends(header) if end < embedding.shape[0]],
    }
    return known.more(header, config)


def family_of(file: Path) -> Family:
    """The table of a file's tensors.

    Raises:
      CheckpointError: the file is missing or damaged, or its architecture is not supported.
    """
    return _architecture(header_of(file)).family


def _architecture(header: Header) -> _Architecture:
    name = header.architecture
    if name == "llama" and _one(header, "llama.expert_count"):
        return _MIXTRAL
    if name == "granitemoe" and _one(header, f"{name}.expert_shared_feed_forward_length"):
        return _GRANITE_SHARED
    found = _ARCHITECTURES.get(name)
    if found is None:
        raise CheckpointError(
            f"{header.file}: architecture {shown(header.architecture)} is not supported; "
            f"{', '.join(_ARCHITECTURES)} are."
        )
    return found


def _one(header: Header, key: str) -> int | None:
    """A whole number, which may be there once for each layer.

    Raises:
      CheckpointError: it differs between layers, or is no whole number.
    """
    value = header.metadata.get(key)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        each = sorted(set(value.tolist()))
        if len(each) != 1:
            raise CheckpointError(
                f"{header.file}: {key} is {shown(each)}; layers that differ are not supported."
            )
        return each[0]
    return header.get(key, int)


def _ends(header: Header) -> list[int]:
    """Tokens that end a text: the end of a text, of a turn and of a message."""
    metadata = header.metadata
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = (metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if isinstance(tokens, list) and isinstance(types, np.ndarray):
        control = [at for at in np.flatnonzero(types == _CONTROL).tolist() if at < len(tokens)]
        found = {tokens[at] for at in control}
        ends = (_HARMONY | set(_ENDS)) - {"<|end|>"} if found >= _HARMONY else _ENDS
        named += [at for at in control if tokens[at] in ends]
    return list(dict.fromkeys(end for end in named if type(end) is int and end >= 0))


def _rotary(header: Header, config: Json) -> Json:
    """The base of rotary embeddings and how they are stretched."""
    name, whole = header.architecture, config.get("max_position_embeddings")
    made: Json = {"rope_theta": header.get(f"{name}.rope.freq_base", float, 10_000.0)}
    turned, size = _one(header, f"{name}.rope.dimension_count"), _head_size(header)
    if turned is not None and size and turned != size:
        made["partial_rotary_factor"] = turned / size
    named = _stretch(header)
    if _FREQUENCIES in header.tensors:
        if named is not None:
            raise CheckpointError(
                f"{header.file} has {_FREQUENCIES} and {name}.rope.scaling.factor; one of them is "
                "supported."
            )
        factors = _numbers(header, _FREQUENCIES)
        stretch: Json = {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0,
                         "original_max_position_embeddings": whole,
                         "short_factor": factors, "long_factor": factors}  # fmt: skip
        return config | made | {"rope_scaling": stretch}
    if named is not None:
        made["rope_scaling"] = named
    return config | made


def _stretch(header: Header) -> Json | None:
    """The stretch that metadata names."""
    start = f"{header.architecture}.rope."
    factor = header.get(f"{start}scaling.factor", float, 0.0)
    factor = factor or header.get(f"{start}scale_linear", float, 0.0)  # as of 2023
    kind = header.get(f"{start}scaling.type", str, "linear")
    if kind == "none" or not factor or (kind == "linear" and factor == 1):
        return None
    if kind == "longrope" and _LONG in header.tensors:
        return None  # whose factors are tensors
    if not 0 < factor < math.inf:
        raise CheckpointError(
            f"{header.file}: {start}scaling.factor is {factor}; it must be a number above 0."
        )
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise CheckpointError(
            f"{header.file}: {start}scaling.type is {shown(kind)}; linear and yarn are supported."
        )
    made: Json = {"rope_type": "yarn", "factor": factor}
    if (original := _one(header, f"{start}scaling.original_context_length")) is not None:
        made["original_max_position_embeddings"] = original
    for own in ("beta_fast", "beta_slow"):
        if (value := header.get(f"{start}scaling.yarn_{own}", float)) is not None:
            made[own] = value
    if (grown := header.get(f"{start}scaling.attn_factor", float, 1.0)) != 1:
        made["attention_factor"] = grown * (1 + 0.1 * math.log(factor))
    return made


def _numbers(header: Header, name: str) -> list[float]:
    """The numbers of a small tensor.

    Raises:
      CheckpointError: it is not one row of floats, or the file ends before.
    """
    tensor = header.tensors[name]
    form, shape = form_of(tensor)
    if form.names is not None or len(shape) != 1:
        raise CheckpointError(f"{name} in {tensor.file} must be a row of floats.")
    size = form.itemsize * shape[0]
    if tensor.start + size > tensor.file.stat().st_size or shape[0] > _MOST_FACTORS:
        raise CheckpointError(
            f"{tensor.file} is truncated or damaged: {name} has {shape[0]:,} numbers."
        )
    with tensor.file.open("rb") as opened:
        opened.seek(tensor.start)
        held = opened.read(size)
    return [float(str(each)) for each in np.frombuffer(held, form).astype(np.float32)]


def _head_size(header: Header) -> int | None:
    name = header.architecture
    own, heads = (_one(header, f"{name}.attention.{key}") for key in ("key_length", "head_count"))
    whole = _one(header, f"{name}.embedding_length")
    return own or (whole // heads if whole and heads else None)


def _phi3(header: Header, config: Json) -> Json:
    """Phi-3's: long and short factors are tensors, and a window may be 0."""
    made = _rotary(header, config)
    made["sliding_window"] = _one(header, "phi3.attention.sliding_window") or None
    original = _one(header, "phi3.rope.scaling.original_context_length")
    if _LONG in header.tensors and _SHORT in header.tensors:
        grown = header.get("phi3.rope.scaling.attn_factor", float)
        made["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": _numbers(header, _SHORT),
            "long_factor": _numbers(header, _LONG),
            **({} if grown is None else {"attention_factor": grown}),
            **({} if original is None else {"original_max_position_embeddings": original}),
        }
    return made


def _gemma(header: Header, config: Json) -> Json:
    """Gemma's: of the largest models of each version queries are scaled by another size."""
    name = header.architecture
    made = _rotary(header, config)
    large = {"gemma2": 46, "gemma3": 62}[name]  # layers of the models of 27B
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    scalar = _head_size(header)
    if layers == large and heads:
        scalar = config.get("hidden_size", 0) // heads
    if scalar:
        made["query_pre_attn_scalar"] = scalar
    if (window := _one(header, f"{name}.attention.sliding_window")) is not None:
        made["sliding_window"] = window or None
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (cap := header.get(f"{name}.{key}", float)) is not None:
            made[key] = cap
    pattern = header.metadata.get(f"{name}.attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        kinds = ("full_attention", "sliding_attention")
        made["layer_types"] = [kinds[bool(each)] for each in pattern.tolist()]
    elif pattern is not None:
        made["sliding_window_pattern"] = pattern
    made["rope_local_base_freq"] = header.get(f"{name}.rope.freq_base_swa", float, 10_000.0)
    return made


def _without_windows(header: Header, config: Json) -> Json:
    window = _one(header, f"{header.architecture}.attention.sliding_window")
    if window:
        raise CheckpointError(
            f"{header.file}: {header.architecture}.attention.sliding_window is {window}, which is "
            "not supported here."
        )
    return _rotary(header, config)


def _neox(header: Header, config: Json) -> Json:
    made = _rotary(header, config)
    parallel = header.get("gptneox.use_parallel_residual", bool, True)
    share = {"rotary_pct": made.pop("partial_rotary_factor", 1.0)}
    return made | share | {
        "rotary_emb_base": made["rope_theta"], "use_parallel_residual": parallel,
    }  # fmt: skip


def _router(header: Header) -> Json:
    """What a mixture's router does; how it weighs, llama.cpp knows by the architecture."""
    name = header.architecture
    count, chosen, size, shared = (
        _one(header, f"{name}.expert_{key}")
        for key in ("count", "used_count", "feed_forward_length", "shared_feed_forward_length")
    )
    made = {
        "num_experts": count, "num_local_experts": count, "num_experts_per_tok": chosen,
        "moe_intermediate_size": size, "shared_expert_intermediate_size": shared,
        "shared_intermediate_size": shared,
    }  # fmt: skip
    return {key: value for key, value in made.items() if value is not None}


def _mixture(header: Header, config: Json) -> Json:
    norm_topk, bias = header.architecture == "qwen3moe", config["attention_bias"]
    made = _without_windows(header, config) | _router(header)
    return made | {"norm_topk_prob": norm_topk, "qkv_bias": bias}


def _granite(header: Header, config: Json) -> Json:
    """Granite's multipliers, and the router of its mixtures."""
    made = _without_windows(header, config) | _router(header)
    for key, own in (
        ("attention_multiplier", "attention.scale"),
        ("embedding_multiplier", "embedding_scale"),
        ("residual_multiplier", "residual_scale"),
        ("logits_scaling", "logit_scale"),
    ):
        if value := header.get(f"{header.architecture}.{own}", float):
            made[key] = value
    return made


def _gpt_oss(header: Header, config: Json) -> Json:
    """gpt-oss': every other layer has a window, and YaRN's bounds are no whole numbers."""
    made = _rotary(header, config) | _router(header)
    made["sliding_window"] = _one(header, f"{header.architecture}.attention.sliding_window")
    made["intermediate_size"] = made.get("moe_intermediate_size", made.get("intermediate_size"))
    stretch = made.get("rope_scaling")
    if stretch is not None and stretch["rope_type"] == "yarn":
        made["rope_scaling"] = stretch | {"truncate": False}
    return made


def _with_names(model_type: str, names: Mapping[str, str] | None = None, **more: Any) -> Family:
    """A family's table with GGUF's names for its tensors, some of them its own `names`."""
    family, own = FAMILIES[model_type], {**_LAYER, **(names or {})}
    experts = [leaf for leaves in family.experts for leaf in leaves.split()]
    return dataclasses.replace(
        family,
        outer={leaf: _OUTER[leaf] for leaf in family.outer},
        layer={leaves: own[leaves] for leaves in family.layer},
        experts={leaf: _EXPERTS[leaf] for leaf in experts}, expert_packing="rows",
        layer_prefix="blk.{index}.", base="", renamed={}, ignored=_IGNORED, packing="rows", **more,
    )  # fmt: skip


_OF_EXPERTS = ("expert_count",)
_OF_GRANITE = (
    *_OF_EXPERTS, "attention.scale", "embedding_scale", "residual_scale", "logit_scale",
)  # fmt: skip
_MIXTRAL = _Architecture(
    _with_names("mixtral", interleaved=("query", "key")), _mixture, _OF_EXPERTS
)
_GRANITE_SHARED = _Architecture(
    _with_names("granitemoeshared", interleaved=("query", "key")), _granite, _OF_GRANITE
)
_ARCHITECTURES = {
    "llama": _Architecture(
        _with_names("llama", interleaved=("query", "key")), _without_windows
    ),
    "qwen2": _Architecture(_with_names("qwen2"), _without_windows),
    "qwen3": _Architecture(_with_names("qwen3"), _without_windows),
    "gemma2": _Architecture(_with_names("gemma2", norm_shift=1.0), _gemma),
    "gemma3": _Architecture(_with_names("gemma3_text", norm_shift=1.0), _gemma),
    "phi3": _Architecture(_with_names("phi3"), _phi3),
    "olmo2": _Architecture(_with_names("olmo2"), _without_windows),
    "gpt2": _Architecture(_with_names("gpt2"), lambda header, config: config),
    "gptneox": _Architecture(_with_names("gpt_neox"), _neox),
    "granite": _Architecture(
        _with_names("granite", interleaved=("query", "key")), _granite, _OF_GRANITE
    ),
    "qwen2moe": _Architecture(_with_names("qwen2_moe"), _mixture, _OF_EXPERTS),
    "qwen3moe": _Architecture(_with_names("qwen3_moe"), _mixture, _OF_EXPERTS),
    "olmoe": _Architecture(_with_names("olmoe"), _mixture, _OF_EXPERTS),
    "granitemoe": _Architecture(
        _with_names("granitemoe", interleaved=("query", "key")), _granite, _OF_GRANITE
    ),
    "gpt-oss": _Architecture(
        _with_names("gpt_oss", {"mlp_norm": "post_attention_norm.weight"}), _gpt_oss, _OF_EXPERTS
    ),
}  # fmt: skip
"""By what files call them. OPT has no name in GGUF."""
