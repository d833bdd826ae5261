"""EAGLE-3's heads (arXiv 2503.01840) as EAGLE, SpecForge and speculators write them."""

import dataclasses

from specjax.models.config import Features, ModelConfig
from specjax.models.families import rotary
from specjax.models.families.family import Json, Positions, first_of
from specjax.models.families.llama import LLAMA

_LAYERS = "eagle_aux_hidden_state_layer_ids"
"""Of `eagle_config` layers whose outputs are read, as SGLang and SpecForge count; else, as vLLM and
speculators do, hidden states: the first of them are the embeddings."""
NORMS = "fc_norm."
"""Beginning of the names of norms of each hidden state, by their numbers."""
_OWN_EMBEDDING = "has_own_embedding"
"""A key of this project, for what else the tensors say."""
_SPECULATORS = "speculators_model_type"


def is_eagle3(config: Json) -> bool:
    """Whether a parsed `config.json` says that its model is such a head."""
    named = config.get("architectures")
    architectures = map(str, named) if isinstance(named, list) else ()
    kinds = (config.get("model_type"), config.get(_SPECULATORS))
    return "eagle3" in kinds or any("eagle3" in each.lower() for each in architectures)


def _upgrade(config: Json) -> Json:
    """One flat configuration, without the name of the base model's family."""
    within = config.get("transformer_layer_config")
    flat = {**(within if isinstance(within, dict) else {}), **config}
    flat.setdefault("vocab_size", config.get("target_vocab_size"))
    return {**flat, "model_type": EAGLE3.model_type, "tie_word_embeddings": False}


def _layers_of(config: Json) -> tuple[int, ...]:
    """Hidden states by the number of layers before them; none where the file does not say.

    Raises:
      ValueError: they are no numbers, or it cannot be told how they are counted.
    """
    nested = config.get("eagle_config")
    within = nested.get(_LAYERS) if isinstance(nested, dict) else None
    beside = config.get(_LAYERS)
    found = first_of(within, beside)
    if found is None:
        return ()
    least = 0 if within is None else -1  # the embeddings
    if not isinstance(found, list) or not all(type(n) is int and n >= least for n in found):
        raise ValueError(f"{_LAYERS} is {found!r}; it must be a list of layers' numbers.")
    if within is not None:
        return tuple(each + 1 for each in found)
    if _SPECULATORS not in config:
        raise ValueError(
            f"{_LAYERS} is {found!r}, and it cannot be told whether these are hidden states or "
            f"layers' outputs. Say {_SPECULATORS} 'eagle3' for the former, or move it into "
            "eagle_config for the latter."
        )
    return tuple(found)


def _features(config: Json, positions: Positions) -> Json:
    norms = "each" if config.get("fc_norm") else "whole" if config.get("norm_before_fc") else None
    read = Features(
        layers=_layers_of(config),
        size=first_of(config.get("target_hidden_size"), config["hidden_size"]),
        norms=norms,
        normed_residual=bool(config.get("norm_before_residual")),
        normed_output=bool(config.get("norm_output")),
        shares_embedding=not config.get(_OWN_EMBEDDING),
    )
    return {**rotary.read(config, positions), "features": read}


def _written(config: ModelConfig) -> Json:
    read = config.features
    assert read is not None
    return {
        **rotary.write(config),
        "model_type": "llama",
        "target_hidden_size": read.size,
        "eagle_config": {
            _LAYERS: [layer - 1 for layer in read.layers], "use_aux_hidden_state": True,
        },
        "fc_norm": read.norms == "each",
        "norm_before_fc": read.norms == "whole",
        "norm_before_residual": read.normed_residual,
        "norm_output": read.normed_output,
        _OWN_EMBEDDING: not read.shares_embedding,
    }  # fmt: skip


EAGLE3 = dataclasses.replace(
    LLAMA,
    model_type="eagle3",
    architecture="LlamaForCausalLMEagle3",
    outer={
        "embedding": "embed_tokens.weight",
        "final_norm": "norm.weight",
        "unembedding": "lm_head.weight",
        "feature_projection": "fc.weight",
        "feature_norm": "midlayer.hidden_norm.weight",
        "feature_input_norm": "input_norm.weight",
    },
    layer_prefix="midlayer.",
    base="",
    renamed={"model.layers.0.": "midlayer.", "layers.0.": "midlayer.", "model.": ""},
    ignored=(*LLAMA.ignored, "d2t", "t2d", NORMS),  # which feature_drafts reads
    features=_features,
    written=_written,
    upgrade=_upgrade,
)
