"""DFlash's drafts (arXiv 2602.06036) as z-lab and SpecForge write them."""

import dataclasses
import math

from specjax.models.config import CONTEXT, Features, ModelConfig
from specjax.models.families import rotary
from specjax.models.families.family import FULL, Family, Json, Positions, first_of
from specjax.models.families.llama import ATTENTION, QWEN3

_ARCHITECTURE = "DFlashDraftModel"
_BLOCK_SIZE = 16
"""Of files that name none."""
_RELATIVES = ("dflash", "dspark", "domino")
"""Parts of the names of architectures that draft by blocks."""


def is_dflash(config: Json) -> bool:
    """Whether a parsed `config.json` says that its model is such a draft, or a relative of one."""
    named = config.get("architectures")
    architectures = map(str, named) if isinstance(named, list) else ()
    kinds = (config.get("model_type"), config.get("speculators_model_type"))
    named_so = any(part in each.lower() for each in architectures for part in _RELATIVES)
    return named_so or any(kind in _RELATIVES for kind in kinds)


def _said(config: Json, key: str, default: object = None) -> object:
    """A value of `dflash_config`, or of what is around it."""
    within = config.get("dflash_config")
    nested = within.get(key) if isinstance(within, dict) else None
    return first_of(nested, config.get(key), default)


def _upgrade(config: Json) -> Json:
    """A configuration of today, without the name of the base model's family.

    Raises:
      ValueError: it is a relative's.
    """
    named = config.get("architectures")
    if config.get("model_type") != DFLASH.model_type and named != [_ARCHITECTURE]:
        raise ValueError(
            f"architectures is {named!r}; of drafts that predict blocks only {_ARCHITECTURE} "
            "is supported here."
        )
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or {*map(str, kinds)} != {FULL}):
        raise ValueError(f"layer_types is {kinds!r}; of DFlash's only {FULL!r} is supported here.")
    plain = {key: value for key, value in config.items() if key != "layer_types"}
    return {
        **plain,
        "model_type": DFLASH.model_type,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "max_position_embeddings": config.get("max_position_embeddings") or 32768,
    }


def _layers_of(config: Json) -> tuple[int, ...]:
    """Hidden states by the number of layers before them; the file names layers' outputs.

    Raises:
      ValueError: it names none.
    """
    found = _said(config, "target_layer_ids")
    if not isinstance(found, list) or not found or not all(type(n) is int for n in found):
        raise ValueError(f"target_layer_ids is {found!r}; it must be a list of layers' numbers.")
    return tuple(each + 1 for each in found)


def _scale_of(config: Json, key: str, default: float | None) -> float | None:
    """A number above 0.

    Raises:
      ValueError: it is none.
    """
    found = _said(config, key, default)
    if found is None:
        return None
    if type(found) not in (int, float) or not 0 < float(str(found)) < math.inf:
        raise ValueError(f"{key} is {found!r}; it must be a number above 0.")
    return float(str(found))


def _features(config: Json, positions: Positions) -> Json:
    size, mask = _said(config, "block_size", _BLOCK_SIZE), _said(config, "mask_token_id")
    read = Features(
        layers=_layers_of(config),
        size=first_of(config.get("target_hidden_size"), config["hidden_size"]),
        shares_unembedding=True,
        way=CONTEXT,
        block_size=size if type(size) is int else None,
        mask_token=mask if type(mask) is int else None,
    )
    return {
        **rotary.read(config, positions),
        "features": read,
        "biases": ATTENTION * bool(config.get("attention_bias")),
        "head_norms": "head",
        "embedding_scale": _scale_of(config, "input_embedding_scale", 1.0),
        "logit_scale": _scale_of(config, "output_multiplier", 1.0),
        "logit_cap": _scale_of(config, "final_logit_softcapping", None),
    }


def _written(config: ModelConfig) -> Json:
    read = config.features
    assert read is not None
    return {
        **rotary.write(config),
        "model_type": "qwen3",
        "attention_bias": "query" in config.biases,
        "target_hidden_size": read.size,
        "block_size": read.block_size,
        "dflash_config": {
            "target_layer_ids": [layer - 1 for layer in read.layers],
            "mask_token_id": read.mask_token,
            "input_embedding_scale": config.embedding_scale,
            "output_multiplier": config.logit_scale,
            "final_logit_softcapping": config.logit_cap,
        },
    }


DFLASH: Family = dataclasses.replace(
    QWEN3,
    model_type="dflash",
    architecture=_ARCHITECTURE,
    outer={
        "final_norm": "norm.weight",
        "feature_projection": "fc.weight",
        "feature_norm": "hidden_norm.weight",
    },
    layer_prefix="layers.{index}.",
    base="",
    renamed={"model.": ""},
    features=_features,
    written=_written,
    upgrade=_upgrade,
)
