"""The families, and their configurations read and written."""

import dataclasses
from typing import Any

from specjax.models.config import ModelConfig, check_size
from specjax.models.families import rotary
from specjax.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2
from specjax.models.families.dflash import DFLASH, is_dflash
from specjax.models.families.eagle import EAGLE3, is_eagle3
from specjax.models.families.family import (
    ACTIVATION_KEYS,
    Family,
    Json,
    multimodal,
    text_of,
    value_of,
)
from specjax.models.families.gemma import GEMMA2, GEMMA3
from specjax.models.families.glm import GLM, GLM4, GLM4_FLASH, GLM4_MOE
from specjax.models.families.gpt import GPT2, NEOX, OPT
from specjax.models.families.gpt_oss import GPT_OSS
from specjax.models.families.granite import GRANITE, MINICPM
from specjax.models.families.llama import LLAMA, MINISTRAL, MISTRAL, OLMO2, PHI3, QWEN2, QWEN3
from specjax.models.families.mimo import MIMO
from specjax.models.families.ministral3 import MINISTRAL3
from specjax.models.families.mixtures import (
    DOTS1,
    ERNIE45_MOE,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    MINIMAX_M2,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
)
from specjax.models.families.ranges import check_values
from specjax.models.families.relatives import DENSE

FAMILIES = {
    family.model_type: family
    for family in (
        *(LLAMA, MISTRAL, MINISTRAL, QWEN2, QWEN3, PHI3, OLMO2, GEMMA2, GEMMA3),
        *(GPT2, OPT, NEOX),
        *(MINISTRAL3, GRANITE, MINICPM, GLM, GLM4, *DENSE),
        *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITE_MOE, GRANITE_MOE_SHARED, GPT_OSS),
        *(GLM4_MOE, MINIMAX_M2, DOTS1, ERNIE45_MOE),
        *(DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2, GLM4_FLASH),
        MIMO,
        *(EAGLE3, DFLASH),
    )
}

_MULTIMODAL = {
    name: {text.model_type: multimodal(text, name) for text in texts}
    for name, texts in {"gemma3": (GEMMA3,), "mistral3": (MISTRAL, MINISTRAL3)}.items()
}
"""The tables of multimodal files, by the `model_type` of their text; the first where it has none.
"""

_STATEFUL = frozenset((
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
    "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5",
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv",
    "xlstm", "zamba", "zamba2",
))  # fmt: skip
"""Models with layers of a state space or of linear attention."""

_MOST_ENDS = 256
"""End tokens of a model; each is compared with every token of a text."""


def family_of(config: Json) -> Family:
    """The table for a parsed `config.json`.

    Raises:
      ValueError: its `model_type` has no table.
    """
    if is_eagle3(config):
        return EAGLE3
    if is_dflash(config):
        return DFLASH
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in _STATEFUL:
        raise ValueError(
            f"model_type {model_type!r} has layers that keep a state of the text instead of its "
            "keys and values; a tree would need a state for each of its branches, which is not "
            "supported."
        )
    if isinstance(model_type, str) and model_type in _MULTIMODAL:
        kinds = _MULTIMODAL[model_type]
        kind = text_of(config).get("model_type", next(iter(kinds)))
        if kind not in kinds:
            raise ValueError(
                f"text_config.model_type is {kind!r}; of {model_type} models "
                f"{' and '.join(kinds)} are supported."
            )
        return kinds[kind]
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join((*FAMILIES, *_MULTIMODAL))
        raise ValueError(f"model_type {model_type!r} is not supported; supported: {known}.")
    return FAMILIES[model_type]


def read_config(config: Json, positions: int | None = None) -> ModelConfig:
    """The `ModelConfig` a parsed `config.json` describes, of `positions` (None: see `rotary`).

    Raises:
      ValueError: a key that is needed is missing, or a value is not supported.
    """
    family = family_of(config)
    config = family.upgrade(config)
    check_values(config)
    for key, supported in family.fixed.items():
        if key in config and config[key] not in supported:
            raise ValueError(
                f"{key} is {config[key]!r}, which {family.model_type} models do not support "
                f"here; supported: {supported[0]!r}."
            )
    values: dict[str, Any] = {}
    kinds = {field.name: field.type for field in dataclasses.fields(ModelConfig)}
    for field, key in family.fields.items():
        values[field] = value_of(family, config, key)
        config = {**config, key: values[field]}
        _check(field, key, values[field], kinds[field])
    values.setdefault("num_kv_heads", values["num_heads"])
    values.setdefault("head_dim", values["hidden_size"] // values["num_heads"])
    length = rotary.used(config, values["max_positions"], positions)
    values["max_positions"] = length.used
    values["activation"] = _activation(family, values["activation"])
    features = dict(family.features(config, length))
    seen = (window is None or window >= length.used for window in features.get("windows", ()))
    if features.get("window_theta") is None and all(seen):
        features["windows"] = ()  # nobody is ever outside
    ends, own = _eos_ids(config, values["vocab_size"]), config.get("draft_vocab_size")
    return ModelConfig(
        **{**values, **features}, eos_ids=ends, family=config["model_type"],
        draft_vocab_size=None if own == values["vocab_size"] else own,
    )  # fmt: skip


def write_config(config: ModelConfig) -> dict[str, Any]:
    """A `config.json` of its family that reads back as `config`, in old and new spelling.

    Raises:
      ValueError: the family has no keys for some of it.
    """
    eos, family = config.eos_ids, FAMILIES[config.family]
    names = {ours: theirs for theirs, ours in reversed(ACTIVATION_KEYS.items())}
    values = {key: getattr(config, field) for field, key in family.fields.items()}
    made = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **values,
        family.fields["activation"]: names[config.activation],
        **family.written(config),
        "bos_token_id": None,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
    }
    if config.draft_vocab_size is not None:
        made["draft_vocab_size"] = config.draft_vocab_size
    if read_config(made) != config:
        raise ValueError(f"a {config.family} model cannot say what this one is: {config}.")
    return made


def _check(field: str, key: str, value: Any, kind: Any) -> None:
    """Checks a value against the type of the field that it fills."""
    if kind is int:
        check_size(field, key, value)
    if kind is float and (type(value) not in (int, float) or value <= 0):
        raise ValueError(f"{key} is {value!r}; it must be a number above 0.")
    if kind is bool and type(value) is not bool:
        raise ValueError(f"{key} is {value!r}; it must be true or false.")


def _activation(family: Family, named: Any) -> str:
    if not isinstance(named, str) or named not in ACTIVATION_KEYS:
        raise ValueError(
            f"{family.fields['activation']} is {named!r}, which is not supported; "
            f"supported: {', '.join(ACTIVATION_KEYS)}."
        )
    return ACTIVATION_KEYS[named]


def end_ids_of(config: Json) -> tuple[int, ...]:
    """The end tokens that a parsed `config.json` or `generation_config.json` names.

    Raises:
      ValueError: they are no numbers, or too many.
    """
    eos = config.get("eos_token_id")
    if eos is None:
        return ()
    ends = eos if isinstance(eos, list) else [eos]
    for end in ends:
        if type(end) is not int or abs(end) >= 2**31:
            raise ValueError(f"eos_token_id is {eos!r}; it must be a token's number, or several.")
    found = tuple(dict.fromkeys(ends))
    if len(found) > _MOST_ENDS:
        raise ValueError(f"eos_token_id names {len(found)} tokens; it may name {_MOST_ENDS}.")
    return found


def _eos_ids(config: Json, vocab_size: int) -> tuple[int, ...]:
    ends = end_ids_of(config)
    for end in ends:
        if not 0 <= end < vocab_size:
            raise ValueError(
                f"eos_token_id is {config['eos_token_id']!r}; tokens are 0 to {vocab_size - 1}, as "
                f"vocab_size is {vocab_size}. Where nothing ends a text, it is null."
            )
    return ends
