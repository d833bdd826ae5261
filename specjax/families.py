"""Model families as tables: Hugging Face configuration keys and tensor names."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from specjax.config import ModelConfig

Shape = tuple[int, ...]
Json = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Family:
    """One model family: how its `config.json` and its tensor names map to this project's.

    `fields` maps `ModelConfig` fields to configuration keys, `defaults` gives what an absent key
    stands for, `fixed` the values that are supported of keys whose other values would change the
    function, `layer` the tensor names of `LayerWeights`' leaves inside `layer_prefix`. Tensors
    whose name ends in one of `ignored` are constants that old files carry along.
    """

    model_type: str
    architecture: str
    fields: Mapping[str, str]
    defaults: Mapping[str, Callable[[Json], Any]]
    fixed: Mapping[str, tuple[Any, ...]]
    embedding: str
    final_norm: str
    unembedding: str
    layer_prefix: str
    layer: Mapping[str, str]
    ignored: tuple[str, ...] = ()


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "norm_eps": "rms_norm_eps",
        "tie_embeddings": "tie_word_embeddings",
        "max_positions": "max_position_embeddings",
    },
    defaults={
        "num_key_value_heads": lambda config: config["num_attention_heads"],
        "head_dim": lambda config: config["hidden_size"] // config["num_attention_heads"],
        "rms_norm_eps": lambda config: 1e-6,
        "tie_word_embeddings": lambda config: False,
        "max_position_embeddings": lambda config: 2048,
    },
    fixed={
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "hidden_act": ("silu",),
        "sliding_window": (None,),
        "use_sliding_window": (False,),
        "partial_rotary_factor": (1, None),
        "quantization_config": (None,),
    },
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    unembedding="lm_head.weight",
    layer_prefix="model.layers.{index}.",
    layer={
        "attention_norm": "input_layernorm.weight",
        "query": "self_attn.q_proj.weight",
        "key": "self_attn.k_proj.weight",
        "value": "self_attn.v_proj.weight",
        "output": "self_attn.o_proj.weight",
        "mlp_norm": "post_attention_layernorm.weight",
        "gate": "mlp.gate_proj.weight",
        "up": "mlp.up_proj.weight",
        "down": "mlp.down_proj.weight",
    },
    ignored=("rotary_emb.inv_freq",),
)

FAMILIES = {family.model_type: family for family in (LLAMA,)}


def family_of(config: Json) -> Family:
    """The table for a parsed `config.json`.

    Raises:
      ValueError: its `model_type` has no table.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}."
        )
    return FAMILIES[model_type]


def read_config(config: Json) -> ModelConfig:
    """The `ModelConfig` a parsed `config.json` describes.

    Raises:
      ValueError: a key that is needed is missing, or a value is not supported.
    """
    family = family_of(config)
    for key, supported in family.fixed.items():
        if key in config and config[key] not in supported:
            raise ValueError(
                f"{key} is {config[key]!r}, which {family.model_type} models do not support "
                f"here; supported: {supported[0]!r}."
            )
    values = {field: _value(family, config, key) for field, key in family.fields.items()}
    whole = {field.name for field in dataclasses.fields(ModelConfig) if field.type is int}
    for field, value in values.items():
        if field in whole and type(value) is not int:
            raise ValueError(f"{family.fields[field]} is {value!r}; it must be a whole number.")
    return ModelConfig(**values, rope_theta=_rope_theta(config), eos_ids=_eos_ids(config))


def write_config(config: ModelConfig, family: Family = LLAMA) -> dict[str, Any]:
    """A `config.json` of `family` that reads back as `config`, in old and new spelling."""
    eos = config.eos_ids
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{key: getattr(config, field) for field, key in family.fields.items()},
        **{key: supported[0] for key, supported in family.fixed.items() if key in _WRITTEN},
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "bos_token_id": None,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
    }


_WRITTEN = ("attention_bias", "mlp_bias", "hidden_act")


def tensor_shapes(config: ModelConfig, family: Family = LLAMA) -> dict[str, Shape]:
    """Name and shape of every tensor that a checkpoint of `config` must hold."""
    d, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    q, kv = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    layer = {
        "attention_norm": (d,),
        "query": (q, d),
        "key": (kv, d),
        "value": (kv, d),
        "output": (d, q),
        "mlp_norm": (d,),
        "gate": (f, d),
        "up": (f, d),
        "down": (d, f),
    }
    shapes: dict[str, Shape] = {family.embedding: (v, d), family.final_norm: (d,)}
    if not config.tie_embeddings:
        shapes[family.unembedding] = (v, d)
    for index in range(config.num_layers):
        names = layer_names(index, family)
        shapes |= {names[leaf]: shape for leaf, shape in layer.items()}
    return shapes


def layer_names(index: int, family: Family = LLAMA) -> dict[str, str]:
    """Tensor name of each `LayerWeights` leaf of layer `index`."""
    prefix = family.layer_prefix.format(index=index)
    return {leaf: prefix + name for leaf, name in family.layer.items()}


def _value(family: Family, config: Json, key: str) -> Any:
    if config.get(key) is not None:
        return config[key]
    if key in family.defaults:
        return family.defaults[key](config)
    raise ValueError(f"the configuration has no {key!r}, which {family.model_type} models need.")


def _rope_theta(config: Json) -> float:
    """The rotary base, from `rope_parameters` (transformers 5) or beside it (before)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope scaling {kind!r} is not supported; supported: 'default'.")
    return float(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))


def _eos_ids(config: Json) -> tuple[int, ...]:
    eos = config.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)
