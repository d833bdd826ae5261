"""What a family of models is: a table that maps its files to this project's names."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from specjax.models.config import ModelConfig

Json = Mapping[str, Any]
Windows = tuple[int | None, ...]


class Positions(NamedTuple):
    """How many positions a file names, and how many of them are used."""

    whole: int
    used: int


SLIDING, FULL = "sliding_attention", "full_attention"

ACTIVATION_KEYS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "squared_relu",
}
"""Activations by the names that Hugging Face's files give them; the first of each is written."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One model family: how its `config.json` and its tensors map to this project's.

    `fields` maps `ModelConfig` fields to configuration keys, `defaults` gives what an absent key
    stands for, `fixed` the values that are supported of keys whose other values would change the
    function. `features` reads the other fields of `ModelConfig`, of a file with so many positions
    and with every key of `fields`, and `written` gives the keys from which these read back.

    `outer` maps leaves of `Model` to tensor names, `layer` those of `LayerWeights` to names within
    `layer_prefix`; leaves that lie in one tensor stand side by side, packed as `packing` says:
    "rows" one after the other, "turned" so with every matrix [in, out], "heads" head by head, all
    leaves of each. Of leaves that are `interleaved`, the rows of a head's two halves take turns, as
    far as it is rotated, which its first rows are, or its last where `rotated_last`; those that are
    `lone` have an axis of 1 before their own; norms are stored with `norm_shift` added. Tensors of
    biases follow from those of their weights.
    `experts` are the names of layers with experts that others lack or have for other leaves; those
    with `{expert}` in them are of tensors that hold one expert each. Those of all experts are
    packed as `expert_packing` says: "rows", or "turned", "alternating" (the rows of their leaves
    take turns) or both.
    `ignored` are ends or beginnings of names of what files carry along; `renamed` are beginnings
    that files have, and what they stand for; `base` is a beginning that some files leave out.
    `upgrade` makes a configuration of before one of today.
    """

    model_type: str
    architecture: str
    fields: Mapping[str, str]
    defaults: Mapping[str, Callable[[Json], Any]]
    fixed: Mapping[str, tuple[Any, ...]]
    outer: Mapping[str, str]
    layer_prefix: str
    layer: Mapping[str, str]
    features: Callable[[Json, Positions], Json]
    written: Callable[[ModelConfig], Json]
    packing: str = "rows"
    interleaved: tuple[str, ...] = ()
    rotated_last: bool = False
    lone: tuple[str, ...] = ()
    norm_shift: float = 0.0
    experts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    expert_packing: str = "rows"
    ignored: tuple[str, ...] = ()
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    base: str = ""
    upgrade: Callable[[Json], Json] = lambda config: config

    def name_of(self, found: str, expected: Mapping[str, Any]) -> str:
        """The name of a file's tensor as this table has it."""
        for old, new in self.renamed.items():
            if found.startswith(old):
                found = new + found.removeprefix(old)
                break
        whole = self.base + found
        return whole if found not in expected and whole in expected else found


def first_of(*values: Any) -> Any:
    """The first value that is not None; a 0 is one."""
    return next((value for value in values if value is not None), None)


def value_of(family: Family, config: Json, key: str) -> Any:
    """What a configuration says of `key`, or what its absence stands for.

    Raises:
      ValueError: it must be there, and is not.
    """
    if config.get(key) is not None:
        return config[key]
    if key in family.defaults:
        return family.defaults[key](config)
    raise ValueError(f"the configuration has no {key!r}, which {family.model_type} models need.")


_OF_ALL = ("eos_token_id", "tie_word_embeddings")
"""What a multimodal configuration may say in place of its text model's."""


def text_of(config: Json) -> dict[str, Any]:
    """The text model of a multimodal configuration, whose own word on some keys counts.

    Raises:
      ValueError: there is none.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"text_config is {text!r}; it must be an object.")
    outer = {key: config[key] for key in _OF_ALL if config.get(key) is not None}
    return {**text, **outer}


_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.",
           "model.multi_modal_projector.")  # fmt: skip


def multimodal(text: Family, model_type: str) -> Family:
    """The table of multimodal files, of which the text model alone is read."""
    return dataclasses.replace(
        text,
        model_type=model_type,
        upgrade=lambda config: text.upgrade({**text_of(config), "model_type": text.model_type}),
        renamed={"language_model.": "", "model.language_model.": "model."},
        ignored=(*text.ignored, *_VISION),
    )


def whole_heads(config: Json) -> int:
    """The size of heads that share the hidden size."""
    return config["hidden_size"] // config["num_attention_heads"]


def windows_of(window: Any, kinds: Any, layers: int) -> Windows:
    """What each layer sees, by the kind of its attention.

    Raises:
      ValueError: not every layer has a kind that is known, or the window is no number above 0.
    """
    if not isinstance(kinds, list):
        raise ValueError(f"layer_types is {kinds!r}; it must be a list with a kind for each layer.")
    if len(kinds) != layers:
        raise ValueError(f"layer_types names {len(kinds)} layers; there are {layers}.")
    for kind in kinds:
        if kind not in (SLIDING, FULL):
            raise ValueError(f"layer_types has {kind!r}, which is not supported here.")
    if window is None or SLIDING not in kinds:
        return ()
    if type(window) is not int or window < 1:
        raise ValueError(f"sliding_window is {window!r}; it must be an integer above 0.")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def written_windows(config: ModelConfig) -> Json:
    """The window, and the layers that have it."""
    window = next((each for each in config.windows if each is not None), None)
    if window is None:
        return {"sliding_window": None}
    kinds = [FULL if each is None else SLIDING for each in config.windows]
    return {"sliding_window": window, "layer_types": kinds}
