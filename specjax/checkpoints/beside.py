"""Tensors of files that a model has no place for: those that change no text, and all others."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.base.notices import notice
from specjax.checkpoints.files import CheckpointError, described_by
from specjax.models import families
from specjax.models.config import ModelConfig
from specjax.models.families import Family
from specjax.models.quantized import PackedWeight


class _Kind(NamedTuple):
    """What tensors of some names are."""

    what: str
    names: re.Pattern[str]


def _ends(*names: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({'|'.join(names)})")


def _begins(*names: str) -> re.Pattern[str]:
    return re.compile(rf"(model\.)?({'|'.join(names)})(\..*)?")


_KINDS = (
    _Kind("scales of an 8-bit KV cache",
          _ends(r"(k|v|q|kv|qkv|prob|p)_scale", "kv_cache_scale", "(k|v|q)_zero_point",
                r"(k|v|q)_cache_(scale|zero_point)", "kv_cache_scaling_factor",
                r"attn\.(k|v|kv)\.scale")),
    _Kind("scales of activations",
          _ends(r"(input|output|activation)_(scale|zero_point|min|max)", "input_global_scale")),
    _Kind("rotary constants",
          _ends(r"(rotary_emb|rotary_pos_emb|rotary|rope)\."
                "(inv_freq|freqs|cos_cached|sin_cached|cos_sin_cache|original_inv_freq)")),
    _Kind("numbers of positions", _ends("position_ids", r"embed_positions\._float_tensor")),
    _Kind("marks of other programs", _ends("_extra_state", r"(decoder|model)\.version")),
    _Kind("heads for other uses than text",
          _begins("score", "classifier", "classification_head", "v_head", "value_head",
                  "reward_head", "regression_head", "qa_outputs", "summary", "pooler",
                  r"medusa_heads?", r"(transformer\.)?(score|v_head)")),
    _Kind("layers that predict further tokens", _begins("mtp", "mtp_layers", "mtp_block")),
    _Kind("towers of other inputs",
          _begins("vision_tower", "vision_model", "vision_encoder", "visual", "image_newline",
                  "multi_modal_projector", "mm_projector", "audio_tower", "audio_encoder",
                  "embed_vision", "embed_audio")),
)  # fmt: skip
"""Names of tensors that transformers leaves out of the pass over text, whatever they hold."""
_MASK, _MASKED = _ends(r"(attn|attention|self_attn)\.bias"), _ends("masked_bias")

_OF_QUANTIZED = ("qweight", "qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "SCB",
                 "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx", "absmax",
                 "quant_map", "weight_global_scale")  # fmt: skip
"""Last parts of names of what belongs to a quantized matrix."""
_SHOWN = 3
"""How many names a kind is told with."""

_WRAPPED = {
    "_orig_mod.": "torch.compile's",
    "module.": "torch's DataParallel's",
    "base_model.model.": "peft's",
    "_fsdp_wrapped_module.": "torch's FSDP's",
    "pretrained_model.": "TRL's",
    "language_model.": "a multimodal model's",
}
"""Beginnings of all names in files that were saved with what was around the model."""
_WITHIN = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What torch puts into the midst of names."""
_OF_PEFT = re.compile(r"lora_|\.(base_layer|original_module|modules_to_save)\.")


class Beside:
    """Which tensors of a folder's files are left out, and one line about them.

    Args:
      folder: with the files.
      config: of the model.
      family: of the files.
      described: the parsed `config.json`.
    """

    def __init__(
        self, folder: Path, config: ModelConfig, family: Family, described: Mapping[str, Any]
    ) -> None:
        self._folder, self._family, self._layers = folder, family, config.num_layers
        self._said = described_by(folder)
        self._further = family.upgrade(described).get("num_nextn_predict_layers")
        self._expected = {stored.name for stored in families.stored(family, config)}
        self._expected |= {name for leaf, name in family.outer.items() if leaf == "unembedding"}
        self._found: dict[str, list[str]] = {}

    def leaves_out(
        self, name: str, found: str, file: Path, tensor: np.ndarray | PackedWeight
    ) -> None:
        """Takes note of a tensor that the model has no place for.

        Args:
          name: of it, as the family has it.
          found: as the file has it.
          file: that it is in.
          tensor: what it holds.

        Raises:
          CheckpointError: it may change what the model computes.
        """
        kind = self._kind_of(name, found, file, tensor)
        if kind is None:
            raise CheckpointError(
                f"unexpected tensor {found} in {file}; the model has none of that name"
                f"{self._reason(name, found)}."
            )
        self._found.setdefault(kind, []).append(found)

    def tell(self) -> None:
        """Says in one line what was left out."""
        if not self._found:
            return
        parts = []
        for kind, names in self._found.items():
            more = ", ..." * (len(names) > _SHOWN)
            parts.append(f"{len(names)} {kind} ({', '.join(names[:_SHOWN])}{more})")
        what = "; ".join(parts)
        notice(f"{self._folder} holds tensors that change no text and are not used: {what}.")

    def _kind_of(
        self, name: str, found: str, file: Path, tensor: np.ndarray | PackedWeight
    ) -> str | None:
        for kind in _KINDS:
            if kind.names.fullmatch(name) or kind.names.fullmatch(found):
                return kind.what
        layer = self._layer_of(name)
        if layer is not None and type(self._further) is int:
            further = layer < self._layers + self._further
            return "tensors of layers that predict further tokens" if further else None
        if isinstance(tensor, PackedWeight):
            return None
        mask = _MASK.fullmatch(name) and tensor.ndim == 4
        if mask or (_MASKED.fullmatch(name) and tensor.size == 1):
            return "attention masks"
        if name.endswith(".bias") and name.removesuffix("bias") + "weight" in self._expected:
            if tensor.astype(np.float32).any():
                raise CheckpointError(
                    f"{found} in {file} is a bias that is not zero; {self._family.model_type} "
                    f"models of this {self._said} have none there."
                )
            return "biases of zeros"
        return None

    def _layer_of(self, name: str) -> int | None:
        """The number of a tensor's layer, where the model has so many no more."""
        before, _, after = map(re.escape, self._family.layer_prefix.partition("{index}"))
        found = re.match(rf"{before}(\d{{1,9}}){after}", name)
        return int(found[1]) if found and int(found[1]) >= self._layers else None

    def _reason(self, name: str, found: str) -> str:
        """Why there is such a tensor, where that can be told."""
        if _OF_PEFT.search(found):
            return "; it is of a LoRA adapter, which must be merged first"
        for start, whose in _WRAPPED.items():
            if found.startswith(start):
                return (
                    f": {start!r} at the beginning of names is {whose}; save the model that is "
                    "within"
                )
        if part := next((part for part in _WITHIN if part in found), None):
            return f": {part!r} in names is torch's; save the model that is within"
        if (layer := self._layer_of(name)) is not None:
            return (
                f": it is of layer {layer}, and {self._said} says {self._layers} layers, from 0 on"
            )
        if found.rpartition(".")[2] in _OF_QUANTIZED:
            own = self._folder / "hf_quant_config.json"
            more = f", and {own.name} is not read" if own.is_file() else ""
            return f": it is of a quantized matrix that {self._said} does not describe so{more}"
        return ""
