"""Ministral 3 (Mistral), whose queries grow with their position."""

import dataclasses

from specjax.models.config import ModelConfig
from specjax.models.families import rotary
from specjax.models.families.family import Json, Positions, written_windows
from specjax.models.families.llama import LLAMA, MISTRAL, window_everywhere

_GROWTH = "llama_4_scaling_beta"
_POSITIONS = 262_144
_STRETCHED = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _GROWTH: 0.1,
}
"""What a file without rotary parameters means."""


def _growth(config: Json) -> tuple[float, int] | None:
    """By how much queries grow, and every how many positions.

    Raises:
      ValueError: one is named without the other, or is out of its range.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rate, length = rope.get(_GROWTH), rope.get("original_max_position_embeddings")
    if rate is None:
        return None
    if type(rate) not in (int, float) or type(length) is not int:
        raise ValueError(
            f"{_GROWTH} is {rate!r} and original_max_position_embeddings {length!r}; they must be "
            "a number and an integer above 0."
        )
    return float(rate), length


def _of_ministral(config: Json, positions: Positions) -> Json:
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config = {**config, "rope_parameters": _STRETCHED}
    return {
        **rotary.read(config, positions, 1_000_000.0),
        "windows": window_everywhere(config, None),
        "query_growth": _growth(config),
    }


def _written(config: ModelConfig) -> Json:
    grown: Json = {}
    if config.query_growth is not None:
        rate, length = config.query_growth
        grown = {_GROWTH: rate, "original_max_position_embeddings": length}
    return {**rotary.write(config, grown), **written_windows(config)}


MINISTRAL3 = dataclasses.replace(
    MISTRAL,
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": MISTRAL.defaults["num_key_value_heads"],
        "head_dim": lambda config: 128,
        "rms_norm_eps": lambda config: 1e-5,
        "max_position_embeddings": lambda config: _POSITIONS,
    },
    features=_of_ministral,
    written=_written,
)
