"""LoRA adapters as peft writes them, merged into a model's tensors as these are read."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.base.notices import notice
from specjax.checkpoints.files import (
    ADAPTER,
    CheckpointError,
    Files,
    adapter_weights,
    is_finite,
    name_of,
    parsed,
    tensors,
)
from specjax.models.config import ModelConfig
from specjax.models.families import Family, Stored
from specjax.models.quantized import PackedWeight

_PREFIX = "base_model.model."
_PART = re.compile(
    r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.default)?(?:\.weight)?"
)
_MOST = 1e38
"""What alphas are below, as float32 ends there."""
_PLAIN = re.compile(r"\^?[\w.\\-]+")
_KNOWN = ("use_rslora", "use_dora")
_CHANGE_THE_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""What `init_lora_weights` begins with where the base's weights were changed too."""
_CHANGES = ("layer_replication", "target_parameters", "alora_invocation_tokens", "lora_bias",
            "trainable_token_indices", "megatron_config", "arrow_config")  # fmt: skip
"""What a configuration may ask for that is not merged here."""


class _Low(NamedTuple):
    """What is added to a matrix `[O, I]`: `scale` · B A; `norms` are DoRA's of its rows."""

    a: np.ndarray
    b: np.ndarray
    scale: float
    norms: np.ndarray | None

    def added_to(self, matrix: np.ndarray) -> np.ndarray:
        made = matrix.astype(np.float32) + np.float32(self.scale) * (self.b @ self.a)
        if self.norms is None:
            return made
        return made * (self.norms / np.linalg.norm(made, axis=1))[:, None]


class Adapter:
    """A LoRA adapter of a model.

    Args:
      folder: with `adapter_config.json` and its weights.
      base: the model's folder.
      config: of the model.
      family: of the model's files.
      expected: the model's tensors by name.
      tells: whether a line says that the adapter was made for another model.

    Raises:
      CheckpointError: a file is missing or damaged, it is of a kind that is not merged here, or
        does not fit the model.
    """

    def __init__(
        self,
        folder: Path,
        base: Path,
        config: ModelConfig,
        family: Family,
        expected: Mapping[str, Stored],
        *,
        tells: bool = True,
    ) -> None:
        self._folder, self._config, self._family, self._expected = folder, config, family, expected
        self._about = _described(folder)
        self._low: dict[str, _Low] = {}
        self._whole: dict[str, np.ndarray] = {}
        self._read()
        if tells:
            self._compare(base)

    def merged(
        self, stored: Stored, tensor: np.ndarray | PackedWeight
    ) -> np.ndarray | PackedWeight:
        """A tensor of the model with what the adapter changes, in float32.

        Raises:
          CheckpointError: it is quantized.
        """
        low, whole = self._low.get(stored.name), self._whole.get(stored.name)
        if low is None and whole is None:
            return tensor
        if isinstance(tensor, PackedWeight):
            raise CheckpointError(
                f"{stored.name} is quantized ({tensor.name}), and the adapter in {self._folder} "
                "cannot be merged into it; name the full model."
            )
        if low is None:
            return tensor if whole is None else whole
        with np.errstate(over="ignore", invalid="ignore"):
            made = low.added_to(tensor.T if stored.turned else tensor)
        if not is_finite(made):
            raise CheckpointError(
                f"{stored.name} with the adapter in {self._folder} holds NaN or infinity."
            )
        return made.T if stored.turned else made

    def _read(self) -> None:
        """Reads the adapter's tensors, those of each matrix together."""
        parts: dict[str, dict[str, np.ndarray]] = {}
        whole: list[str] = []
        for key, file, tensor in tensors(Files(self._folder, (adapter_weights(self._folder),))):
            if not key.startswith(_PREFIX):
                raise CheckpointError(f"{key} in {file} is no name of peft's: {_PREFIX}... .")
            if tensor.dtype.kind not in "fV" or tensor.itemsize == 1 or not is_finite(tensor):
                raise CheckpointError(f"{key} in {file} is not of finite floating-point numbers.")
            own = key.removeprefix(_PREFIX).removeprefix("_orig_mod.")
            whole.append(own)
            if found := _PART.fullmatch(own):
                if found[2] in parts.setdefault(found[1], {}):
                    raise CheckpointError(f"{key} in {file} is there twice.")
                parts[found[1]][found[2]] = tensor.astype(np.float32)
            elif not self._is_ignored(own) and ".original_module." not in own:
                name = re.sub(r"\.(base_layer|modules_to_save(\.default)?)(?=\.)", "", own)
                stored = self._stored(name, key, file)
                _check(key, file, tensor.shape, stored.shape)
                self._whole[stored.name] = tensor
        if not parts and not self._whole:
            raise CheckpointError(f"{self._folder} holds no tensor of an adapter.")
        for module in self._about.get("modules_to_save") or ():
            if not any(f".{module}." in f".{name}" for name in whole):
                raise CheckpointError(
                    f"{self._folder}: {ADAPTER} says modules_to_save {module!r}, and there is no "
                    "tensor of it."
                )
        for module, own in parts.items():
            if not self._is_ignored(module):
                stored = self._stored(f"{module}.weight", f"{module}.lora_A", self._folder)
                self._low[stored.name] = self._matrix(module, own, stored)

    def _is_ignored(self, name: str) -> bool:
        """Whether it is of a part that the family leaves out, such as a vision tower."""
        return bool(self._family.ignored) and name.startswith(self._family.ignored)

    def _stored(self, name: str, key: str, where: Path) -> Stored:
        """The model's tensor of a name.

        Raises:
          CheckpointError: there is none, or it serves two ends.
        """
        stored = self._expected.get(self._family.name_of(name, self._expected))
        if stored is None:
            raise CheckpointError(f"{key} in {where}: the model has no tensor {name}.")
        if self._config.tie_embeddings and stored.leaves == ("embedding",):
            raise CheckpointError(
                f"{key} in {where} changes the embedding, which the model's unembedding is too; "
                "that is not merged here."
            )
        return stored

    def _matrix(self, module: str, parts: Mapping[str, np.ndarray], stored: Stored) -> _Low:
        """What is added to the matrix of a module.

        Raises:
          CheckpointError: a part is missing or of another shape.
        """
        kind = "lora_embedding_" if "lora_embedding_A" in parts else "lora_"
        a, b = parts.get(f"{kind}A"), parts.get(f"{kind}B")
        if a is None or b is None or a.ndim != 2 or b.ndim != 2:
            raise CheckpointError(f"{self._folder}: {module} lacks a matrix lora_A or lora_B.")
        if kind == "lora_embedding_":
            a, b = b.T, a.T
        outputs, inputs = stored.shape[::-1] if stored.turned else stored.shape
        rank = len(a)
        if a.shape != (rank, inputs) or b.shape != (outputs, rank) or not rank:
            raise CheckpointError(
                f"{self._folder}: {module} has lora_A {a.shape} and lora_B {b.shape}; the model's "
                f"matrix is {outputs} × {inputs}."
            )
        if not self._about.get("rank_pattern") and rank != self._about["r"]:
            raise CheckpointError(
                f"{self._folder}: {module} has rank {rank}; {ADAPTER} says r {self._about['r']}."
            )
        norms = parts.get("lora_magnitude_vector")
        if (norms is None) is bool(self._about.get("use_dora")):
            raise CheckpointError(
                f"{self._folder}: {module} has {'no' if norms is None else 'a'} "
                f"lora_magnitude_vector; use_dora is {self._about.get('use_dora')!r}."
            )
        if norms is not None and norms.size != outputs:
            raise CheckpointError(
                f"{self._folder}: {module} has {norms.size} norms; there are {outputs} outputs."
            )
        norms = None if norms is None else norms.reshape(-1)
        return _Low(a, b, self._scale(module, rank), norms)

    def _scale(self, module: str, rank: int) -> float:
        alpha = self._about["lora_alpha"]
        for pattern, own in (self._about.get("alpha_pattern") or {}).items():
            name = pattern.replace("\\.", ".").removeprefix("^")
            whole = pattern.startswith("^")
            if module == name or (not whole and module.endswith("." + name)):
                alpha = own
                break
        return alpha / (math.sqrt(rank) if self._about.get("use_rslora") else rank)

    def _compare(self, base: Path) -> None:
        """Says so in a line if the adapter was made for a model of another name."""
        own, said = Path(name_of(base)).name, str(self._about.get("base_model_name_or_path") or "")
        if said and Path(said).name.lower() != own.lower():
            notice(f"{self._folder} is a LoRA adapter of {said}; it is merged into {own}.")


def tell_of_another(files: Files) -> None:
    """Says so in a line if a model's folder holds an adapter that is not asked for."""
    if files.lora is None and (files.path / ADAPTER).is_file():
        notice(
            f"{files.path} holds a LoRA adapter too, which is not merged; --lora (lora=... in "
            "Python) with the same folder merges it."
        )


def _check(key: str, file: Path, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if shape != wanted:
        raise CheckpointError(f"{key} in {file} has shape {shape}; the model's is {wanted}.")


def _described(folder: Path) -> dict[str, Any]:
    """The adapter's configuration, of a kind that is merged here.

    Raises:
      CheckpointError: it is of another, or damaged.
    """
    if not (folder / ADAPTER).is_file():
        raise CheckpointError(f"{folder} has no {ADAPTER}, so it is no LoRA adapter.")
    about = {"r": 8, "lora_alpha": 8} | parsed(folder / ADAPTER)
    where = folder / ADAPTER
    if (kind := about.get("peft_type", "LORA")) != "LORA":
        raise CheckpointError(f"{where}: peft_type {kind!r} is not merged here; LORA is.")
    for key, value in about.items():
        unknown = key.startswith("use_") and key not in _KNOWN and value is True
        if unknown or (key in _CHANGES and value):
            raise CheckpointError(f"{where}: {key} is {value!r}, which is not merged here.")
    for key in _KNOWN:
        if type(about.get(key)) not in (bool, type(None)):
            raise CheckpointError(f"{where}: {key} is {about[key]!r}; it must be true or false.")
    saved = about.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(name, str) for name in saved):
        raise CheckpointError(f"{where}: modules_to_save is {saved!r}; it must be names.")
    if str(init := about.get("init_lora_weights")).lower().startswith(_CHANGE_THE_MODEL):
        raise CheckpointError(
            f"{where}: init_lora_weights is {init!r}, where the base's weights are changed too; "
            "save it with path_initial_model_for_weight_conversion, or merge it with peft."
        )
    if type(about["r"]) is not int or about["r"] < 1:
        raise CheckpointError(f"{where}: r is {about['r']!r}; it must be a whole number from 1.")
    patterns = about.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{where}: alpha_pattern is {patterns!r}; it must be an object.")
    for key, alpha in {"lora_alpha": about["lora_alpha"], **patterns}.items():
        if type(alpha) not in (int, float) or not abs(alpha) < _MOST:
            raise CheckpointError(f"{where}: the alpha {key} is {alpha!r}; it must be a number.")
        if not _PLAIN.fullmatch(key) or "\\" in key.replace("\\.", ""):
            raise CheckpointError(
                f"{where}: alpha_pattern has the regular expression {key!r}; names alone are read."
            )
    return about
