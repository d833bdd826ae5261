"""Where a model's files are, and what they hold: folders, lists of files, and names of a hub."""

import contextlib
import functools
import importlib
import json
import math
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from specjax.base.notices import notice
from specjax.checkpoints import gguf, names
from specjax.checkpoints.errors import CheckpointError

BUNDLED = names.BUNDLED
"""The pair that comes with the package."""

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
"""What a folder of a LoRA adapter has."""
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_WANTED = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "*.txt"]
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}

Name = str | Path


class Files(NamedTuple):
    """A folder with a configuration, or a GGUF file, which is all of a model.

    Of a folder's weights `weights` are those that were named one by one.

    `lora` is the folder of an adapter that is merged into them as they are read.
    """

    path: Path
    weights: tuple[Path, ...] = ()
    lora: Path | None = None


def name_of(folder: Path) -> str:
    """What a model's folder is called: its name, or `org/name` in a hub's cache."""
    folder = folder.resolve()
    hub = folder.parent.parent.name
    if folder.parent.name == "snapshots" and hub.startswith("models--"):
        return hub.removeprefix("models--").replace("--", "/", 1)
    return folder.name


def find(name: Name | Sequence[Name], lora: Name | None = None) -> Files:
    """The files that a name means: a folder, safetensors files of one, a GGUF file, a hub's id.

    "bundled" is the target that comes with the package; other short names are in
    `specjax.checkpoints.names`, whose weights are taken from the cache folder, from a package that
    is installed, or from a hub, and a notice says which. An id is `org/name` or
    `org/name@revision`, with `:FILE.gguf` behind it where a GGUF file is meant; what it names is
    downloaded unless it is there already, with huggingface_hub, which must be installed and may be
    set to be offline. `lora` is the folder or the hub's id of a LoRA adapter for it.

    Raises:
      CheckpointError: there is nothing of that name.
    """
    if lora is not None:
        found = find(name)
        if gguf.is_gguf(found.path):
            raise CheckpointError(
                f"{found.path} is a GGUF file, into which no LoRA adapter is merged; name the "
                "folder of its full weights."
            )
        return found._replace(lora=_folder_of_adapter(lora))
    if not isinstance(name, str | Path):
        files = tuple(Path(each) for each in name)
        folders = {file.parent for file in files}
        if len(folders) != 1 or any(file.suffix != ".safetensors" for file in files):
            raise CheckpointError(
                f"a list of files must be of safetensors files in one folder, not "
                f"{', '.join(map(str, files)) or 'empty'}."
            )
        return Files(folders.pop(), files)
    if name == "bundled":
        return Files(BUNDLED / "target")
    path = Path(name)
    if str(name) in names.MODELS and not path.exists():
        return Files(_of_short_name(names.MODELS[str(name)]))
    if path.is_dir() or not _is_id(str(name)):
        return Files(path)
    repository, _, file = str(name).partition(":")
    return Files(_download_file(repository, file) if file else _download(repository))


def _of_short_name(known: names.Known) -> Path:
    """Where the weights of a short name are.

    Raises:
      CheckpointError: they are nowhere, and could not be had from the hub.
    """
    found = names.place_of(known)
    if found is not None:
        _tell(f"{known.name} is {found.path} ({found.what}).")
        return found.path
    try:
        path = _download(known.hub)
    except CheckpointError as error:
        raise CheckpointError(
            f"there are no weights of {known.name} here; {names.how_to_have(known)}. {error}"
        ) from error
    _tell(f"{known.name} is {known.hub} of the hub.")
    return path


@functools.cache
def _tell(sentence: str) -> None:
    """Says something once, however often a command looks for its model."""
    notice(sentence)


def _folder_of_adapter(name: Name) -> Path:
    folder = find(name).path
    if not folder.is_dir():
        raise CheckpointError(f"no LoRA adapter at {folder}; it must be a folder or a hub's id.")
    if not (folder / ADAPTER).is_file():
        raise CheckpointError(f"{folder} has no {ADAPTER}, so it is no LoRA adapter.")
    return folder


def adapter_weights(folder: Path) -> Path:
    """The file with the weights of a LoRA adapter.

    Raises:
      CheckpointError: there is none.
    """
    for name in _ADAPTER_WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    _check_not_of_mlx(folder)
    raise CheckpointError(f"{folder} has no {_ADAPTER_WEIGHTS[0]}.")


def _check_not_of_mlx(folder: Path) -> None:
    """Checks that a folder is no adapter of mlx-lm.

    Raises:
      CheckpointError: it is; the message says what to do.
    """
    if (folder / "adapters.safetensors").is_file():
        raise CheckpointError(
            f"{folder} is an adapter as mlx-lm writes it, not peft, and is not merged here; "
            "mlx_lm.fuse writes the whole model (--dequantize where its base is quantized)."
        )


def _is_id(name: str) -> bool:
    """Whether a name that is no folder can be one of a hub's."""
    repository, colon, file = name.partition(":")
    if gguf.is_gguf(Path(repository)) or (colon and not gguf.is_gguf(Path(file))):
        return False
    first, *rest = repository.partition("@")[0].split("/")
    local = first in ("", ".", "..", "~", "bundled") or Path(first).exists()
    return len(rest) == 1 and bool(rest[0]) and not local and "\\" not in name


def _download(name: str) -> Path:
    """The folder of a hub's id."""
    with _from_hub(name) as hub:
        repository, _, revision = name.partition("@")
        found = hub.snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=_WANTED,
            ignore_patterns=["consolidated*"],  # the same weights in another form
        )
        if not any(Path(found).glob("*.safetensors")):
            wanted = [*_WANTED, "pytorch_model*.bin", "adapter_model.bin"]
            found = hub.snapshot_download(
                repository, revision=revision or None, allow_patterns=wanted
            )
    return Path(found)


def _download_file(name: str, file: str) -> Path:
    """A GGUF file of a hub's id, and the others where it is the first of several."""
    with _from_hub(name) as hub:
        repository, _, revision = name.partition("@")
        parts = [file, *gguf.further_parts(file)]
        found = [hub.hf_hub_download(repository, each, revision=revision or None) for each in parts]
    return Path(found[0])


@contextlib.contextmanager
def _from_hub(name: str) -> Iterator[Any]:
    """What downloads from a hub, whose errors become one sentence.

    Raises:
      CheckpointError: it is not installed, or there is nothing of that name.
    """
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise CheckpointError(
            f"no model folder at {name}; to take it from a hub, install huggingface_hub."
        ) from error
    try:
        yield hub
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise CheckpointError(
            f"no model folder at {name}, and none of that name could be had from the hub"
            f"{offline}: {first}"
        ) from error


def described_by(path: Path) -> str:
    """What has a model's configuration, in sentences: `config.json`, or a file's metadata."""
    return "its metadata" if gguf.is_gguf(path) else CONFIG


def config_of(folder: Path) -> dict[str, Any]:
    """A folder's parsed `config.json`, or what a GGUF file says in its words.

    Raises:
      CheckpointError: there is none, or it cannot be read.
    """
    if gguf.is_gguf(folder):
        return gguf.config_of(folder)
    if not folder.is_dir():
        if BUNDLED in folder.parents:
            raise CheckpointError(f"this installation has no bundled pair: {folder} is missing.")
        raise CheckpointError(
            f"no model folder at {folder}; it must exist, or be 'bundled' or a hub's org/name."
        )
    if not (folder / CONFIG).is_file():
        _check_no_adapter(folder)
        there = sorted(each.name for each in folder.glob(f"*{gguf.SUFFIX}"))
        more = f"; of its GGUF files name one, such as {folder / there[0]}" if there else ""
        raise CheckpointError(f"{folder} has no {CONFIG}, so it is not a model folder{more}.")
    return parsed(folder / CONFIG)


def _check_no_adapter(folder: Path) -> None:
    """Checks that a folder that lacks a model's files is not a LoRA adapter.

    Raises:
      CheckpointError: it is; the message says what to do.
    """
    if (folder / ADAPTER).is_file():
        _check_not_of_mlx(folder)
        base = parsed(folder / ADAPTER).get("base_model_name_or_path")
        raise CheckpointError(
            f"{folder} is a LoRA adapter of {base}, not a whole model: name that model, and this "
            "folder with --lora (lora=... in Python). Or merge it with peft: "
            f'AutoPeftModelForCausalLM.from_pretrained("{folder.name}").merge_and_unload()'
            '.save_pretrained("merged").'
        )


def parsed(path: Path) -> dict[str, Any]:
    """The object of a JSON file.

    Raises:
      CheckpointError: it holds none.
    """
    _check_fetched(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not an object.")
    return found


_EXPONENTS = {2: 0x7F80, 4: 0x7F800000, 8: 0x7FF0000000000000}
"""Bits of positive infinity; past it are numbers that are none."""
_BLOCK = 1 << 20
_POINTER = b"version https://git-lfs"


def is_finite(tensor: np.ndarray) -> bool:
    """Whether a floating-point tensor holds neither infinities nor NaN.

    By the largest bits as signed and as unsigned numbers, which reads a file as fast as a disk
    gives it: of its numbers those are the largest, positive and negative, that are not finite.
    """
    size = tensor.dtype.itemsize
    infinity = 0x7C00 if tensor.dtype == np.float16 else _EXPONENTS[size]
    bits = tensor.reshape(-1).view(f"i{size}")
    for start in range(0, bits.size, _BLOCK):
        block = bits[start : start + _BLOCK]
        negative = int(block.view(f"u{size}").max()) - (1 << (8 * size - 1))
        if max(int(block.max()), negative) >= infinity:
            return False
    return True


def tensors(files: Files) -> Iterator[tuple[str, Path, np.ndarray]]:
    """Every tensor with its name and file, as a view of the file that is mapped, not read.

    Those of a GGUF file are blocks (see `specjax.checkpoints.gguf.blocks`).

    Raises:
      CheckpointError: a file is missing or damaged, or holds something that is no array.
    """
    if gguf.is_gguf(files.path):
        yield from _views(_extents_of_gguf(files.path))
        return
    for file in files.weights or _weight_files(files.path):
        yield from _mapped(file) if file.suffix == ".safetensors" else _pickled(file)


class Extent(NamedTuple):
    """Where a file holds a tensor: its first byte, and how many there are."""

    name: str
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    size: int


def extents(files: Files) -> Iterator[Extent]:
    """Where every tensor is.

    Raises:
      CheckpointError: a file is missing, damaged or of PyTorch's own format, or the tensors are
        not as many bytes as the index says.
    """
    if gguf.is_gguf(files.path):
        yield from _extents_of_gguf(files.path)
        return
    size = 0
    for file in files.weights or _weight_files(files.path):
        if file.suffix != ".safetensors":
            raise CheckpointError(
                f"{file} is of PyTorch's own format, which cannot be streamed; save it as "
                "safetensors (transformers' save_pretrained does)."
            )
        for each in _extents_in(file):
            size += each.size
            yield each
    index = files.path / INDEX
    if files.weights or (files.path / WEIGHTS).is_file() or not index.is_file():
        return
    metadata = parsed(index).get("metadata")
    said = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(said, int | float) and said != size:
        raise CheckpointError(
            f"{index} says that the tensors are {said:.0f} bytes; they are {size}. If the files "
            "are what you want, take total_size out of the index."
        )


def _mapped(file: Path) -> Iterator[tuple[str, Path, np.ndarray]]:
    yield from _views(_extents_in(file))


def _views(found: Iterable[Extent]) -> Iterator[tuple[str, Path, np.ndarray]]:
    """Tensors as views of their files, each of which is mapped once."""
    mapped: dict[Path, np.ndarray] = {}
    for each in found:
        if each.file not in mapped:
            mapped[each.file] = np.asarray(np.memmap(each.file, np.uint8, "r"))
        own = mapped[each.file][each.start : each.start + each.size]
        yield each.name, each.file, own.view(each.dtype).reshape(each.shape)


def _extents_of_gguf(file: Path) -> Iterator[Extent]:
    """Where a GGUF file holds its tensors.

    Raises:
      CheckpointError: it is damaged, or ends before.
    """
    for name, tensor in gguf.header_of(file).tensors.items():
        form, shape = gguf.form_of(tensor)
        size, held = form.itemsize * math.prod(shape), tensor.file.stat().st_size
        if tensor.start + size > held:
            raise CheckpointError(
                f"{tensor.file} is truncated: {name} goes on to byte {tensor.start + size}, and "
                f"it has {held}."
            )
        yield Extent(name, tensor.file, form, shape, tensor.start, size)


def _check_fetched(file: Path) -> None:
    """Checks that a file is not what Git LFS leaves in its place.

    Raises:
      CheckpointError: it is.
    """
    if file.is_file():
        with file.open("rb") as opened:
            if opened.read(len(_POINTER)) == _POINTER:
                raise CheckpointError(
                    f"{file} is a pointer of Git LFS, not the file; git lfs pull fetches that."
                )


def _extents_in(file: Path) -> Iterator[Extent]:
    _check_fetched(file)
    try:
        with safe_open(file, framework="np"):  # checks the header against the file's size
            pass
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing, though it is named.") from error
    except SafetensorError as error:
        raise CheckpointError(f"{file} is truncated or damaged: {error}.") from error
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    for name, about in header.items():
        if name == "__metadata__":
            continue
        kind = _DTYPES.get(about["dtype"])
        if kind is None:
            raise CheckpointError(f"{name} in {file} is {about['dtype']}, which is not supported.")
        start, stop = about["data_offsets"]
        at = 8 + size + start
        yield Extent(name, file, np.dtype(kind), tuple(about["shape"]), at, stop - start)


def _pickled(file: Path) -> Iterator[tuple[str, Path, np.ndarray]]:
    """Tensors of PyTorch's own format, mapped; its reader of weights alone runs nothing."""
    _check_fetched(file)
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise CheckpointError(
            f"{file} is of PyTorch's own format; install torch to read it (weights only, nothing "
            "in it is run), or save it as safetensors (transformers' save_pretrained does)."
        ) from error
    try:
        mapped = zipfile.is_zipfile(file)  # before torch 1.6 they were not
        held = torch.load(file, map_location="cpu", mmap=mapped, weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing, though it is named.") from error
    except Exception as error:
        raise CheckpointError(
            f"{file} cannot be read as weights alone; it is damaged, or holds more than tensors."
        ) from error
    if not isinstance(held, dict):
        raise CheckpointError(f"{file} holds a {type(held).__name__}, not tensors by name.")
    for name, tensor in held.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"{name!r} in {file} is a {type(tensor).__name__}, not a tensor of a name."
            )
        tensor = tensor.detach()
        try:
            if tensor.dtype == torch.bfloat16:  # which numpy has from elsewhere
                found = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
            else:
                found = tensor.numpy()
        except (TypeError, RuntimeError) as error:
            kind = f"{tensor.dtype}, {tensor.layout} on {tensor.device}"
            raise CheckpointError(f"{name} in {file} is {kind}, which is not supported.") from error
        yield name, file, found


def _weight_files(folder: Path) -> list[Path]:
    """The files of a folder that hold weights, safetensors before others."""
    for whole, index in ((WEIGHTS, INDEX), (PICKLE, PICKLE_INDEX)):
        if (folder / whole).is_file():
            return [folder / whole]
        if (folder / index).is_file():
            weight_map = parsed(folder / index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(
                isinstance(name, str) for name in weight_map.values()
            ):
                raise CheckpointError(f"{folder / index} has no weight_map of file names.")
            for name in weight_map.values():
                if Path(name).name != name or "\\" in name or not name.endswith(whole[-4:]):
                    raise CheckpointError(
                        f"{folder / index} names {name!r}; it must be a {Path(whole).suffix} file "
                        "in the same folder."
                    )
            return [folder / name for name in sorted(set(weight_map.values()))]
    _check_no_adapter(folder)
    kinds = (".safetensors", ".bin", ".pth", ".gguf")
    there = sorted(each.name for each in folder.iterdir() if each.suffix in kinds)
    more = f"; it has {', '.join(there[:3])}" if there else ""
    if any(name.startswith("consolidated") for name in there):
        more += ", of a format that is not read: take the model as transformers has it"
    raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}{more}.")
