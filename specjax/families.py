"""Model families as tables: Hugging Face configuration keys and tensor names."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specjax.config import MATRICES, ModelConfig
from specjax.rope import Stretch, check_kind

Shape = tuple[int, ...]
Json = Mapping[str, Any]
Windows = tuple[int | None, ...]
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True)
class Family:
    """One model family: how its `config.json` and its tensor names map to this project's.

    `fields` maps `ModelConfig` fields to configuration keys, `defaults` gives what an absent key
    stands for, `fixed` the values that are supported of keys whose other values would change the
    function, `layer` the tensor names of `LayerWeights`' leaves inside `layer_prefix` (those of
    biases follow from their matrices'). Tensors whose name ends in one of `ignored` are constants
    that old files carry along. `biases` says which matrices have a bias, `windows` which layers a
    sliding window; `written` gives the keys from which both read back.
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
    head_norms: bool = False
    biases: Callable[[Json], tuple[str, ...]] = lambda config: ()
    windows: Callable[[Json], Windows] = lambda config: ()
    written: Callable[[ModelConfig], Json] = lambda config: {}


_ATTENTION, _MLP = MATRICES[:4], MATRICES[4:]


def _whole_heads(config: Json) -> int:
    return config["hidden_size"] // config["num_attention_heads"]


def _window_everywhere(config: Json) -> Windows:
    """Mistral's: in every layer, or in those that are named (Ministral)."""
    window, layers = config.get("sliding_window", 4096), config["num_hidden_layers"]
    return _windows(window, config.get("layer_types") or [_SLIDING] * layers, layers)


def _window_by_layer(config: Json) -> Windows:
    """Qwen's: off unless `use_sliding_window`, and then in the layers that are named or last."""
    window, layers = config.get("sliding_window", 4096), config["num_hidden_layers"]
    if not config.get("use_sliding_window"):
        return ()
    first = min(config.get("max_window_layers", 28), layers)
    kinds = config.get("layer_types") or [_FULL] * first + [_SLIDING] * (layers - first)
    return _windows(window, kinds, layers)


def _windows(window: Any, kinds: Sequence[str], layers: int) -> Windows:
    if len(kinds) != layers:
        raise ValueError(f"layer_types names {len(kinds)} layers; there are {layers}.")
    for kind in kinds:
        if kind not in (_SLIDING, _FULL):
            raise ValueError(f"layer_types has {kind!r}, which is not supported here.")
    if window is None or _SLIDING not in kinds:
        return ()
    if type(window) is not int:
        raise ValueError(f"sliding_window is {window!r}; it must be a whole number.")
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _kinds(config: ModelConfig) -> Json:
    """The window and the layers that have it."""
    window = next((each for each in config.windows if each is not None), None)
    if window is None:
        return {"sliding_window": None}
    kinds = [_FULL if each is None else _SLIDING for each in config.windows]
    return {"sliding_window": window, "layer_types": kinds}


def _written_by_layer(config: ModelConfig) -> Json:
    return {"use_sliding_window": bool(config.windows), **_kinds(config)}


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
        "head_dim": _whole_heads,
        "rms_norm_eps": lambda config: 1e-6,
        "tie_word_embeddings": lambda config: False,
        "max_position_embeddings": lambda config: 2048,
    },
    fixed={
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
    biases=lambda config: (
        _ATTENTION * bool(config.get("attention_bias")) + _MLP * bool(config.get("mlp_bias"))
    ),
    written=lambda config: {
        "attention_bias": "query" in config.biases,
        "mlp_bias": "gate" in config.biases,
    },
)

_WINDOWED = {key: LLAMA.fixed[key] for key in LLAMA.fixed if "sliding" not in key}

MISTRAL = dataclasses.replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": lambda config: (
            config["num_attention_heads"] if "num_key_value_heads" in config else 8
        ),
        "max_position_embeddings": lambda config: 4096 * 32,
    },
    fixed={**_WINDOWED, "attention_bias": (False,), "mlp_bias": (False,)},
    biases=lambda config: (),
    windows=_window_everywhere,
    written=_kinds,
)

MINISTRAL = dataclasses.replace(
    MISTRAL, model_type="ministral", architecture="MinistralForCausalLM"
)

QWEN2 = dataclasses.replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults={**LLAMA.defaults, "max_position_embeddings": lambda config: 32768},
    fixed={**_WINDOWED, "mlp_bias": (False,)},
    biases=lambda config: ("query", "key", "value"),
    windows=_window_by_layer,
    written=_written_by_layer,
)

QWEN3 = dataclasses.replace(
    QWEN2,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults={**QWEN2.defaults, "head_dim": lambda config: 128},
    layer={
        **LLAMA.layer,
        "query_norm": "self_attn.q_norm.weight",
        "key_norm": "self_attn.k_norm.weight",
    },
    head_norms=True,
    biases=lambda config: _ATTENTION * bool(config.get("attention_bias")),
    written=lambda config: {
        **_written_by_layer(config),
        "attention_bias": "query" in config.biases,
    },
)

FAMILIES = {family.model_type: family for family in (LLAMA, MISTRAL, MINISTRAL, QWEN2, QWEN3)}


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
    theta, stretch = _rope(config, values["max_positions"])
    return ModelConfig(
        **values,
        rope_theta=theta,
        rope_stretch=stretch,
        eos_ids=_eos_ids(config),
        biases=family.biases(config),
        head_norms=family.head_norms,
        windows=family.windows(config),
        family=family.model_type,
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """A `config.json` of its family that reads back as `config`, in old and new spelling.

    Raises:
      ValueError: the family has no keys for some of it.
    """
    eos, family = config.eos_ids, FAMILIES[config.family]
    rope = _written_rope(config)
    made = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{key: getattr(config, field) for field, key in family.fields.items()},
        "hidden_act": "silu",
        **family.written(config),
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        **({} if config.rope_stretch is None else {"rope_scaling": rope}),
        "bos_token_id": None,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
    }
    if read_config(made) != config:
        raise ValueError(f"a {config.family} model cannot say what this one is: {config}.")
    return made


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name and shape of every tensor that a checkpoint of `config` must hold."""
    family, d, v = FAMILIES[config.family], config.hidden_size, config.vocab_size
    inputs = {"output": config.num_heads * config.head_dim, "down": config.intermediate_size}
    layer: dict[str, Shape] = {"attention_norm": (d,), "mlp_norm": (d,)}
    for name in MATRICES:
        layer[name] = config.rows_of(name), inputs.get(name, d)
    layer |= {f"{name}_bias": (config.rows_of(name),) for name in config.biases}
    layer |= {f"{name}_norm": (config.head_dim,) for name in ("query", "key")}
    shapes: dict[str, Shape] = {family.embedding: (v, d), family.final_norm: (d,)}
    if not config.tie_embeddings:
        shapes[family.unembedding] = (v, d)
    for index in range(config.num_layers):
        shapes |= {name: layer[leaf] for leaf, name in layer_names(index, config).items()}
    return shapes


def layer_names(index: int, config: ModelConfig) -> dict[str, str]:
    """Tensor name of each `LayerWeights` leaf of layer `index`."""
    family = FAMILIES[config.family]
    prefix = family.layer_prefix.format(index=index)
    names = {leaf: prefix + name for leaf, name in family.layer.items()}
    for matrix in config.biases:
        names[f"{matrix}_bias"] = names[matrix].removesuffix("weight") + "bias"
    return names


def _value(family: Family, config: Json, key: str) -> Any:
    if config.get(key) is not None:
        return config[key]
    if key in family.defaults:
        return family.defaults[key](config)
    raise ValueError(f"the configuration has no {key!r}, which {family.model_type} models need.")


def _rope(config: Json, positions: int) -> tuple[float, Stretch | None]:
    """The rotary base and its stretch: of transformers 5, or with the base beside it (before)."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if new and old and dict(old) != dict(new):
        raise ValueError(f"rope_parameters are {new} and rope_scaling is {old}; give one of them.")
    rope = new or old or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError("rope_parameters that differ between layers are not supported here.")
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if rope.get("partial_rotary_factor") not in (1, None):
        raise ValueError("rope_parameters with a partial_rotary_factor are not supported here.")
    check_kind(kind)
    for name in _NEEDED[kind]:
        if name not in rope:
            raise ValueError(f"rope scaling {kind!r} has no {name!r}, which it needs.")
    original = rope.get("original_max_position_embeddings") or positions
    if config.get("original_max_position_embeddings", original) != original:
        raise ValueError(
            f"original_max_position_embeddings is {config['original_max_position_embeddings']}, "
            f"and {original} in the rope parameters; give one of them."
        )
    factor = positions / original if kind == "yarn" and rope["factor"] is None else rope["factor"]
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        return theta, Stretch(kind, float(factor), original, low, high)
    if kind == "linear":
        return theta, Stretch(kind, float(factor), original)
    return theta, Stretch(
        kind,
        float(factor),
        original,
        float(rope.get("beta_slow") or 1),
        float(rope.get("beta_fast") or 32),
        _magnitude(rope, float(factor)),
        rope.get("truncate", True),
    )


_NEEDED = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor",
               "original_max_position_embeddings"),
}  # fmt: skip


def _magnitude(rope: Json, factor: float) -> float:
    """What YaRN multiplies cosines and sines by (arXiv 2309.00071, section 3.4)."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def of(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    own, every = rope.get("mscale"), rope.get("mscale_all_dim")
    return of(float(own)) / of(float(every)) if own and every else of(1.0)


def _written_rope(config: ModelConfig) -> dict[str, Any]:
    """The rotary embedding as transformers 5 writes it."""
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    stretch = config.rope_stretch
    if stretch is None:
        return rope
    rope |= {"rope_type": stretch.kind, "factor": stretch.factor}
    rope["original_max_position_embeddings"] = stretch.original
    if stretch.kind == "llama3":
        return rope | {"low_freq_factor": stretch.low, "high_freq_factor": stretch.high}
    if stretch.kind == "yarn":
        rope |= {"beta_slow": stretch.low, "beta_fast": stretch.high}
        return rope | {"attention_factor": stretch.magnitude, "truncate": stretch.whole}
    return rope


def _eos_ids(config: Json) -> tuple[int, ...]:
    eos = config.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)
