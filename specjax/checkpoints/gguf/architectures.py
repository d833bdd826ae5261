"""What GGUF's architectures are: tables of tensor names beside those of the families, and their
metadata as a `config.json` would say it.

Sources: the package gguf (`constants.py`, which names keys and tensors), and llama.cpp's converter
and models, which say what is done to tensors, and what the absence of a key stands for.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.gguf import mixtures
from specjax.checkpoints.gguf.header import Header, header_of, shown
from specjax.checkpoints.gguf.metadata import (
    FREQUENCIES,
    LONG,
    SHORT,
    Json,
    head_size,
    numbers,
    one,
    rotary,
    with_share,
    without_windows,
)
from specjax.models.families import FAMILIES, Family

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
    "query_down": "attn_q_a.weight",
    "query_down_norm": "attn_q_a_norm.weight",
    "query_up": "attn_q_b.weight",
    "latent_norm": "attn_kv_a_norm.weight",
    "latent_key": mixtures.KEYS_BY_HEAD,
    "latent_value": mixtures.VALUES_BY_HEAD,
    "latent_key latent_value": mixtures.KEYS_AND_VALUES,
}
_EXPERTS = {
    "router": "ffn_gate_inp.weight",
    "correction_bias": mixtures.CORRECTION,
    "expert_gate": "ffn_gate_exps.weight",
    "expert_up": "ffn_up_exps.weight",
    "expert_down": "ffn_down_exps.weight",
    "gate": "ffn_gate_shexp.weight",
    "up": mixtures.SHARED,
    "down": "ffn_down_shexp.weight",
    "shared_gate": "ffn_gate_inp_shexp.weight",
}
_IGNORED = (FREQUENCIES, LONG, SHORT, "attn_rot_embd.weight")
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
        value = one(header, f"{name}.{own}")
        if value is not None and field in known.family.fields:
            config[known.family.fields[field]] = value
    if _predicting(header):
        config[known.family.fields["num_layers"]] = _layers(header)
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
    header = header_of(file)
    family, layers = _architecture(header).family, _layers(header)
    own = tuple(f"blk.{layers + behind}." for behind in range(_predicting(header)))
    biases = [each for name, each in header.tensors.items() if name.endswith(mixtures.CORRECTION)]
    lone = family.lone if any(len(each.shape) > 1 for each in biases) else ()
    return dataclasses.replace(family, ignored=(*family.ignored, *own), lone=lone)


def _predicting(header: Header) -> int:
    """Blocks behind the last layer that predict further tokens, which are left out."""
    return one(header, f"{header.architecture}.nextn_predict_layers") or 0


def _layers(header: Header) -> int:
    """Blocks that are layers.

    Raises:
      CheckpointError: none is.
    """
    name = header.architecture
    blocks, predicting = one(header, f"{name}.block_count") or 0, _predicting(header)
    if not 0 <= predicting < max(blocks, 1):
        raise CheckpointError(
            f"{header.file}: {name}.nextn_predict_layers is {predicting}; there are {blocks} "
            "blocks."
        )
    return blocks - predicting


def _architecture(header: Header) -> _Architecture:
    name = header.architecture
    if name == "llama" and one(header, "llama.expert_count"):
        return _MIXTRAL
    if name == "granitemoe" and one(header, f"{name}.expert_shared_feed_forward_length"):
        return _GRANITE_SHARED
    if name == "deepseek2":
        return _deepseek(header)
    found = _ARCHITECTURES.get(name)
    if found is None:
        raise CheckpointError(
            f"{header.file}: architecture {shown(header.architecture)} is not supported; "
            f"{', '.join(_ARCHITECTURES)}, deepseek2 are."
        )
    return found


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


def _phi3(header: Header, config: Json) -> Json:
    """Phi-3's: long and short factors are tensors, and a window may be 0."""
    made = rotary(header, config)
    made["sliding_window"] = one(header, "phi3.attention.sliding_window") or None
    original = one(header, "phi3.rope.scaling.original_context_length")
    if LONG in header.tensors and SHORT in header.tensors:
        grown = header.get("phi3.rope.scaling.attn_factor", float)
        made["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": numbers(header, SHORT),
            "long_factor": numbers(header, LONG),
            **({} if grown is None else {"attention_factor": grown}),
            **({} if original is None else {"original_max_position_embeddings": original}),
        }
    return made


def _gemma(header: Header, config: Json) -> Json:
    """Gemma's: of the largest models of each version queries are scaled by another size."""
    name = header.architecture
    made = rotary(header, config)
    large = {"gemma2": 46, "gemma3": 62}[name]  # layers of the models of 27B
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    scalar = head_size(header)
    if layers == large and heads:
        scalar = config.get("hidden_size", 0) // heads
    if scalar:
        made["query_pre_attn_scalar"] = scalar
    if (window := one(header, f"{name}.attention.sliding_window")) is not None:
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


def _neox(header: Header, config: Json) -> Json:
    made = rotary(header, config)
    parallel = header.get("gptneox.use_parallel_residual", bool, True)
    share = {"rotary_pct": made.pop("partial_rotary_factor", 1.0)}
    return made | share | {
        "rotary_emb_base": made["rope_theta"], "use_parallel_residual": parallel,
    }  # fmt: skip


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
_OF_ROUTED = (*_OF_EXPERTS, "leading_dense_block_count")
_OF_GRANITE = (
    *_OF_EXPERTS, "attention.scale", "embedding_scale", "residual_scale", "logit_scale",
)  # fmt: skip
_MIXTRAL = _Architecture(
    _with_names("mixtral", interleaved=("query", "key")), mixtures.mixture, _OF_EXPERTS
)
_GRANITE_SHARED = _Architecture(
    _with_names("granitemoeshared", interleaved=("query", "key")), mixtures.granite, _OF_GRANITE
)
_BEFORE_MLP = {"mlp_norm": "post_attention_norm.weight"}


def _deepseek(header: Header) -> _Architecture:
    """DeepSeek-V2, or V3 and what is like it: by what its router's logits become."""
    like_v3 = mixtures.scores(header) == mixtures.SIGMOID
    family = _with_names(
        "deepseek_v3" if like_v3 else "deepseek_v2", {"key": "attn_kv_a_mqa.weight"}
    )
    if any(name.endswith(mixtures.KEYS_BY_HEAD) for name in header.tensors):
        together = "latent_key latent_value"
        layer = {leaves: name for leaves, name in family.layer.items() if leaves != together}
        by_head = {leaf: _LAYER[leaf] for leaf in together.split()}
        family = dataclasses.replace(family, layer={**layer, **by_head})
    return _Architecture(family, mixtures.deepseek, _OF_ROUTED)


_ARCHITECTURES = {
    "llama": _Architecture(
        _with_names("llama", interleaved=("query", "key")), without_windows
    ),
    "qwen2": _Architecture(_with_names("qwen2"), without_windows),
    "qwen3": _Architecture(_with_names("qwen3"), without_windows),
    "gemma2": _Architecture(_with_names("gemma2", norm_shift=1.0), _gemma),
    "gemma3": _Architecture(_with_names("gemma3_text", norm_shift=1.0), _gemma),
    "phi3": _Architecture(_with_names("phi3"), _phi3),
    "olmo2": _Architecture(_with_names("olmo2"), without_windows),
    "gpt2": _Architecture(_with_names("gpt2"), lambda header, config: config),
    "gptneox": _Architecture(_with_names("gpt_neox"), _neox),
    "granite": _Architecture(
        _with_names("granite", interleaved=("query", "key")), mixtures.granite, _OF_GRANITE
    ),
    "qwen2moe": _Architecture(_with_names("qwen2_moe"), mixtures.mixture, _OF_EXPERTS),
    "qwen3moe": _Architecture(_with_names("qwen3_moe"), mixtures.mixture, _OF_EXPERTS),
    "olmoe": _Architecture(_with_names("olmoe"), mixtures.mixture, _OF_EXPERTS),
    "granitemoe": _Architecture(
        _with_names("granitemoe", interleaved=("query", "key")), mixtures.granite, _OF_GRANITE
    ),
    "gpt-oss": _Architecture(
        _with_names("gpt_oss", _BEFORE_MLP), mixtures.gpt_oss, _OF_EXPERTS
    ),
    "glm4": _Architecture(
        _with_names("glm4"), lambda *of: with_share(of[0], without_windows(*of))
    ),
    "glm4moe": _Architecture(_with_names("glm4_moe", _BEFORE_MLP), mixtures.routed, _OF_ROUTED),
    "dots1": _Architecture(_with_names("dots1"), mixtures.routed, _OF_ROUTED),
    "ernie4_5": _Architecture(_with_names("ernie4_5"), mixtures.ernie),
    "ernie4_5-moe": _Architecture(_with_names("ernie4_5_moe"), mixtures.ernie, _OF_ROUTED),
    "minimax-m2": _Architecture(_with_names("minimax_m2"), mixtures.minimax, _OF_EXPERTS),
}  # fmt: skip
"""By what files call them. OPT has no name in GGUF."""
