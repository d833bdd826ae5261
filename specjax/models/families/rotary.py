"""Rotary embeddings as `config.json` files of either generation of transformers spell them."""

import math
from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families.family import FULL, SLIDING, Json, Positions, first_of
from specjax.models.rope import Stretch, check_kind

_LOGARITHM = 0.1
"""Of YaRN's magnitudes."""

_NEEDED = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor",
               "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}  # fmt: skip


def used(config: Json, whole: int, asked: int | None) -> Positions:
    """The positions of a file of `whole`: those asked for, or all that one set of factors serves.

    LongRoPE has factors for texts within the original length and others for longer ones. Where a
    file names the context that it stretches, and counts no more (Qwen's with YaRN), all that is
    stretched may be asked for.

    Raises:
      ValueError: more are asked for than there are.
    """
    rope = _given(config)
    named, most = rope.get("original_max_position_embeddings"), whole
    if _kind(rope) in ("linear", "yarn") and named and rope.get("factor"):
        most = max(whole, int(named * rope["factor"]))
    if asked is not None and not 1 <= asked <= most:
        raise ValueError(f"{asked} positions are asked for; the model has {most}.")
    if asked is None and _kind(rope) == "longrope":
        asked = min(_original(rope, config, whole), whole)
    return Positions(whole, asked or whole)


def read(
    config: Json, positions: Positions, theta: float = 10_000.0, turned: float | None = None
) -> Json:
    """The rotary fields of a model: of transformers 5, or with the base beside it (before).

    `theta` and `turned` are what the absence of a base and of a share of features stand for; where
    `turned` is None, the family turns all of them.

    Raises:
      ValueError: a value is missing, not supported, or given twice.
    """
    rope = _given(config)
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError("rope_parameters that differ between layers are not supported here.")
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if turned is None and share not in (1, None):
        raise ValueError(f"partial_rotary_factor is {share}; this family turns all features.")
    share = (turned or 1.0) if share is None else float(share)
    theta = float(first_of(rope.get("rope_theta"), config.get("rope_theta"), theta))
    features = int(config["head_dim"] * share)
    return {
        "rope_theta": theta,
        "rope_stretch": _stretch(rope, config, positions, features),
        "rotary_dim": None if share == 1 else features,
    }


def read_by_layer(config: Json, positions: Positions, local_theta: float = 10_000.0) -> Json:
    """Gemma 3's: layers with a window have a base of their own, and no stretch.

    `local_theta` is that base where none is named.

    Raises:
      ValueError: a value is missing or not supported.
    """
    rope = config.get("rope_parameters") or {}
    if any(kind in rope for kind in (FULL, SLIDING)):
        full, local = rope.get(FULL) or {}, rope.get(SLIDING) or {}
    else:
        full, local = dict(rope), {}
        if not full:
            full = dict(config.get("rope_scaling") or {})
        full.setdefault("rope_theta", first_of(config.get("rope_theta"), 1_000_000.0))
    local_theta = first_of(local.get("rope_theta"), config.get("rope_local_base_freq"), local_theta)
    if local.get("rope_type", "default") != "default":
        raise ValueError(
            f"rope scaling {local['rope_type']!r} of layers with a window is not supported."
        )
    whole = {key: config[key] for key in config if not key.startswith("rope_")}
    found = read(whole | {"rope_parameters": dict(full)}, positions, 1_000_000.0)
    return dict(found) | {"window_theta": float(local_theta)}


def all_dims_scale(config: Json) -> float:
    """What DeepSeek's code multiplies scores by where rotary embeddings are stretched."""
    rope = _given(config)
    every, factor = rope.get("mscale_all_dim"), float(first_of(rope.get("factor"), 1))
    if _kind(rope) == "default" or not every or factor <= 1:
        return 1.0
    return (_LOGARITHM * float(every) * math.log(factor) + 1) ** 2


def write_all_dims(config: ModelConfig, scale: float) -> Json:
    """The key from which `all_dims_scale` reads back."""
    factor = 1.0 if config.rope_stretch is None else config.rope_stretch.factor
    if factor <= 1:
        return {}
    return {"mscale_all_dim": round((math.sqrt(scale) - 1) / (_LOGARITHM * math.log(factor)), 6)}


def write(config: ModelConfig, more: Json | None = None) -> dict[str, Any]:
    """The keys from which the rotary fields read back, in old and new spelling; `more` are further
    rotary parameters.
    """
    rope = _written(config) | dict(more or {})
    if config.window_theta is not None:
        local = {"rope_theta": config.window_theta, "rope_type": "default"}
        return {"rope_parameters": {FULL: rope, SLIDING: local}}
    if config.rotary_dim is not None and config.latent is None:
        rope["partial_rotary_factor"] = config.rotary_dim / config.head_dim
    made = {"rope_theta": config.rope_theta, "rope_parameters": rope}
    return made if config.rope_stretch is None else made | {"rope_scaling": rope}


def _given(config: Json) -> dict[str, Any]:
    """The rotary parameters of a file, of whichever generation."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{name} is {value!r}; it must be an object.")
    if new and old and old != new:
        raise ValueError(f"rope_parameters are {new} and rope_scaling is {old}; give one of them.")
    return dict(new or old or {})


def _kind(rope: Json) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def _stretch(rope: Json, config: Json, positions: Positions, features: int) -> Stretch | None:
    kind = _kind(rope)
    if kind == "default":
        return None
    if kind == "dynamic":
        raise ValueError(
            "rope scaling 'dynamic' turns earlier tokens by how long a text has become; that is "
            "no function of the tokens alone, and is not supported."
        )
    check_kind(kind)
    for name in _NEEDED[kind]:
        if name not in rope:
            raise ValueError(f"rope scaling {kind!r} has no {name!r}, which it needs.")
    original = _original(rope, config, positions.whole)
    if kind == "longrope":
        for name in _NEEDED[kind]:
            if len(rope[name]) != features // 2:
                raise ValueError(
                    f"{name} has {len(rope[name])} factors for {features // 2} frequencies."
                )
        return _longrope(rope, original, positions)
    factor = rope["factor"]
    if kind == "yarn" and factor is None:
        factor = positions.whole / original
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        return Stretch(kind, float(factor), original, low, high)
    if kind == "linear":
        return Stretch(kind, float(factor), original)
    return Stretch(
        kind,
        float(factor),
        original,
        float(first_of(rope.get("beta_slow"), 1)),
        float(first_of(rope.get("beta_fast"), 32)),
        _magnitude(rope, float(factor)),
        rope.get("truncate", True),
    )


def _original(rope: Json, config: Json, whole: int) -> int:
    beside = config.get("original_max_position_embeddings")
    original = first_of(rope.get("original_max_position_embeddings"), beside, whole)
    if type(original) is not int or original < 1:
        raise ValueError(
            f"original_max_position_embeddings is {original!r}; it must be an integer above 0."
        )
    if beside not in (None, original):
        raise ValueError(
            f"original_max_position_embeddings is {beside}, and {original} in the rope "
            "parameters; give one of them."
        )
    return original


def _longrope(rope: Json, original: int, positions: Positions) -> Stretch:
    """The long factors where more than the original positions are used, else the short ones.

    Cosines and sines grow by the file's own length, whatever part of it is used.
    """
    factor = float(first_of(rope.get("factor"), positions.whole / original))
    magnitude = rope.get("attention_factor")
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = rope["long_factor" if positions.used > original else "short_factor"]
    return Stretch(
        "longrope",
        max(factor, 1.0),
        positions.used,
        magnitude=float(magnitude),
        factors=tuple(float(each) for each in factors),
    )


def _magnitude(rope: Json, factor: float) -> float:
    """What YaRN multiplies cosines and sines by (arXiv 2309.00071, section 3.4)."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def of(scale: float) -> float:
        return 1.0 if factor <= 1 else _LOGARITHM * scale * math.log(factor) + 1.0

    own, every = rope.get("mscale"), rope.get("mscale_all_dim")
    return of(float(own)) / of(float(every)) if own and every else of(1.0)


def _written(config: ModelConfig) -> dict[str, Any]:
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
    if stretch.kind == "longrope":
        factors = list(stretch.factors)
        rope |= {"short_factor": factors, "long_factor": factors}
        return rope | {"attention_factor": stretch.magnitude}
    return rope
