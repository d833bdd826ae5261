"""Checkpoints in 8 and 4 bits: the tensors of each matrix found, checked and read as one.

How libraries store them is in `specjax.checkpoints.layouts`. Activations are never rounded, also
where a file says that its library would.
"""

import collections
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.base.notices import notice
from specjax.checkpoints import gguf
from specjax.checkpoints.files import CONFIG, CheckpointError, Extent, config_of, parsed
from specjax.checkpoints.layout_checks import Json, Parts, Unfit, object_of
from specjax.checkpoints.layouts import METHODS, Layout, specs_of
from specjax.models.quantized import FLOAT8, PackedWeight

Found = tuple[str, Path, "np.ndarray | PackedWeight"]

_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError,
            RecursionError)  # fmt: skip
"""What arithmetic with parts that do not fit each other ends in."""
_KEYS = ("quantization_config", "compression_config", "quantization")
"""What of a `config.json` may tell of quantization; the last is MLX's."""
_OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where AutoGPTQ and AutoAWQ wrote it before it was in `config.json`, and whose each is."""


def layouts_of(config: Mapping[str, Any], folder: Path) -> list[Layout]:
    """How the files of a `config.json` may hold matrices; none where nothing is quantized.

    Raises:
      CheckpointError: the quantization is of a kind that is not supported.
    """
    about = _about(config, folder)
    if about is None:
        return []
    try:
        return METHODS[about["quant_method"]](about)
    except Unfit as error:
        where = _where(config, folder)[2]
        raise CheckpointError(f"{where}: quantization_config: {error}") from error


def layouts_in(folder: Path) -> list[Layout]:
    """The same of a folder's configuration.

    Raises:
      CheckpointError: see `layouts_of`, or there is none.
    """
    return layouts_of(config_of(folder), folder)


def is_quantized(path: Path) -> bool:
    """Whether matrices of a folder or of a GGUF file are packed in memory.

    Raises:
      CheckpointError: see `layouts_of`, or there is no model.
    """
    if gguf.is_gguf(path):
        tensors = gguf.header_of(path).tensors.values()
        return any(gguf.is_packed(gguf.form_of(each)[0]) for each in tensors)
    return bool(layouts_in(path))


def bytes_of_blocks(tensor: Extent, itemsize: int) -> int:
    """Bytes in memory of a tensor of a GGUF file; where it is not packed, so many for a weight."""
    if gguf.is_packed(tensor.dtype) and not tensor.name.endswith(gguf.UNPACKED):
        return gguf.bytes_packed(tensor.dtype, math.prod(tensor.shape))
    return itemsize * gguf.weights_of(tensor.dtype, math.prod(tensor.shape))


def _about(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any] | None:
    """What a configuration says of quantization, of a method that is known.

    Raises:
      CheckpointError: the method is not.
    """
    config, key, where = _where(config, folder)
    if key is None:
        return None
    try:
        about = object_of(config, key)
        if (method := about.get("quant_method")) is None:
            whose = "; it is MLX's, which is not supported" if "quantization" in config else ""
            raise Unfit(f"it has no 'quant_method'{whose}.")
        if not isinstance(method, str) or method not in METHODS:
            raise Unfit(f"quantization {method!r} is not supported; {', '.join(METHODS)} are.")
        return about
    except Unfit as error:
        raise CheckpointError(f"{where}: {key}: {error}") from error


def _where(config: Mapping[str, Any], folder: Path) -> tuple[Mapping[str, Any], str | None, Path]:
    """A configuration that tells of quantization, the key with it, and the file that it is of.

    Raises:
      CheckpointError: a file is no JSON.
    """
    for key in _KEYS:
        if config.get(key) is not None:
            return config, key, folder / CONFIG
    for name, method in _OWN_FILES.items():
        if (folder / name).is_file():
            found = parsed(folder / name)
            about = {"quant_method": "awq" if "w_bit" in found else method} | found
            return {_KEYS[0]: about}, _KEYS[0], folder / name
    return config, None, folder / CONFIG


def read(found: Iterable[tuple[str, Path, np.ndarray]], layouts: list[Layout]) -> Iterator[Found]:
    """The tensors of files, those of each quantized matrix as one, called `….weight`.

    Those of GGUF files are what their blocks stand for.

    Raises:
      CheckpointError: one of them is missing, is there twice or is not of its layout.
    """
    if not layouts:
        for name, file, tensor in found:
            yield name, file, gguf.matrix_of(name, tensor)
        return
    held: dict[str, tuple[Path, np.ndarray]] = {}
    for name, file, tensor in found:
        if name in held:
            raise CheckpointError(f"{name} is there twice, in {held[name][0]} and in {file}.")
        held[name] = file, tensor
    taken: set[str] = set()
    packed: dict[str, tuple[str, Layout, Parts]] = {}
    for layout in layouts:
        for name in held:
            base = name.removesuffix(layout.joint + layout.main)
            if base == name or name in taken or not _is_main(layout, name, *held[name]):
                continue
            parts = _parts_of(layout, base, held)
            packed[name] = base, layout, parts
            taken |= {f"{base}{layout.joint}{part}" for part in parts}
    for name, (file, tensor) in held.items():
        if name in packed:
            base, layout, parts = packed[name]
            yield f"{base}{layout.end}", file, _matrix(layout, name, file, parts)
        elif name not in taken:
            yield name, file, tensor


def _is_main(layout: Layout, name: str, file: Path, tensor: np.ndarray) -> bool:
    """Whether a tensor of the main one's name holds codes; weights may be there in full.

    Raises:
      CheckpointError: it holds neither codes nor weights.
    """
    if tensor.dtype in layout.kinds:
        return True
    if layout.main == "weight":
        return False
    raise CheckpointError(_of_another_kind(name, file, tensor, layout.kinds))


def _of_another_kind(name: str, file: Path, tensor: np.ndarray, kinds: tuple[Any, ...]) -> str:
    wanted = " or ".join(map(str, kinds))
    return f"{name} in {file} is {tensor.dtype}; in this layout it is {wanted}."


def _parts_of(
    layout: Layout, base: str, held: Mapping[str, tuple[Path, np.ndarray]]
) -> dict[str, np.ndarray]:
    """The tensors of a matrix by their names in the layout.

    Raises:
      CheckpointError: one is missing or of another dtype.
    """
    main = f"{base}{layout.joint}{layout.main}"
    parts = {layout.main: held[main][1]}
    for part, kinds in {**layout.needed, **layout.may}.items():
        if (whole := f"{base}{layout.joint}{part}") in held:
            file, tensor = held[whole]
            if kinds and tensor.dtype not in kinds:
                raise CheckpointError(_of_another_kind(whole, file, tensor, kinds))
            parts[part] = tensor
        elif part in layout.needed:
            raise CheckpointError(f"{main} in {held[main][0]} lacks {whole}.")
    return parts


def _matrix(layout: Layout, name: str, file: Path, parts: Parts) -> PackedWeight:
    """The matrix that the tensors hold.

    Raises:
      CheckpointError: they do not fit each other.
    """
    try:
        with np.errstate(all="ignore"):  # of numbers that are then looked at
            return layout.read(parts)
    except Unfit as error:
        raise CheckpointError(f"{name} in {file}: {error}") from error
    except _DAMAGED as error:
        shapes = ", ".join(f"{part} {each.dtype}{list(each.shape)}" for part, each in parts.items())
        raise CheckpointError(
            f"{name} in {file}: its tensors do not fit each other: {shapes}."
        ) from error


class Contradictions:
    """Where a configuration says otherwise than the matrices of its files, and one line about it.

    Args:
      config: the parsed `config.json`.
      folder: that it is in.

    Raises:
      CheckpointError: see `layouts_of`.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        self._about, self._file = _about(config, folder), _where(config, folder)[2]
        self._said: collections.Counter[str] = collections.Counter()
        self._seen = 0

    def look(self, name: str, file: Path, packed: PackedWeight) -> None:
        """Compares a matrix with the configuration.

        Raises:
          CheckpointError: its numbers may be others than those that were meant.
        """
        if self._about is None:
            return
        self._seen += 1
        try:
            self._said.update(_contradictions(self._about, packed))
        except Unfit as error:
            raise CheckpointError(f"{name} in {file}: {error}") from error

    def tell(self) -> None:
        """Says in one line what the files decided."""
        if self._about is not None and not self._seen and _names_weights(self._about):
            method = self._about["quant_method"]
            config = self._file
            notice(f"{config} says that weights are quantized ({method}); none of the files' is.")
        if self._said:
            said = "; ".join(f"{what} ({count} matrices)" for what, count in self._said.items())
            config = self._file
            notice(
                f"{config} says otherwise than its weights, which are taken as they are: {said}."
            )


def _names_weights(about: Json) -> bool:
    """Whether it is weights that are quantized; it may be caches alone."""
    return about["quant_method"] != "compressed-tensors" or bool(specs_of(about))


def _contradictions(about: Json, packed: PackedWeight) -> Iterator[str]:
    """What a configuration says otherwise than a matrix, of which several tensors say the same.

    Raises:
      Unfit: only one says so, and its numbers may be others.
    """
    if about["quant_method"] == "compressed-tensors":
        _check_specs(specs_of(about), packed)
    if about["quant_method"] in ("gptq", "awq"):
        yield from _of_groups(about, packed)


def _of_groups(about: Json, packed: PackedWeight) -> Iterator[str]:
    """Of GPTQ and AWQ, whose zeros have the shape of their scales."""
    inputs = packed.shape[1]
    for key in ("group_size", "q_group_size"):
        size = about.get(key)
        if size is not None and (inputs if size == -1 else size) != packed.group:
            yield f"{key} is {size}, and scales are of {packed.group} inputs"
    if about["quant_method"] == "awq":
        return
    if about.get("desc_act") is False and packed.order is not None:
        yield "desc_act is false, and g_idx has groups in another order"
    if about.get("sym") is True and not _is_middle(packed):
        yield "sym is true, and qzeros are not the middle"


def _is_middle(packed: PackedWeight) -> bool:
    """Whether every zero is the middle code."""
    return packed.zero is None or bool((packed.zero == 1 << (packed.bits - 1)).all())


def _check_specs(specs: list[Json], packed: PackedWeight) -> None:
    """Checks a matrix of compressed-tensors against what is said of weights.

    Raises:
      Unfit: it is symmetric and should not be, or the reverse, or has groups of another size.
    """
    if not specs:
        return
    types = {spec.get("type", "int") for spec in specs}
    if types == {"int" if packed.form == FLOAT8 else "float"}:
        raise Unfit(f"the weights are {packed.form}; config_groups say {types.pop()}.")
    symmetric = {spec.get("symmetric") is not False for spec in specs}
    if symmetric == {False} and packed.zero is None:
        raise Unfit("symmetric is false, but there is no weight_zero_point.")
    if symmetric == {True} and not _is_middle(packed):
        raise Unfit("symmetric is true, but there is a weight_zero_point that is not the middle.")
    sizes = [_group_said(spec, packed.shape[1]) for spec in specs]
    if None not in sizes and packed.group not in sizes:
        said = " or ".join(str(size) for size in sizes)
        raise Unfit(f"scales are of {packed.group} inputs; config_groups say {said}.")


def _group_said(spec: Json, inputs: int) -> int | None:
    """How many inputs share a scale; None where nothing is said."""
    strategy, size = spec.get("strategy"), spec.get("group_size")
    if strategy == "block":
        return min(spec["block_structure"][1], inputs)
    if strategy in ("channel", "tensor"):
        return inputs
    return inputs if size == -1 else size
