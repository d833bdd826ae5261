"""Checkpoints as Hugging Face folders: `config.json`, `*.safetensors`, tokenizer files.

N-gram models lie in folders of the same look.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from tokenizers import Tokenizer

from specjax import families
from specjax.config import ModelConfig
from specjax.draft import ngram
from specjax.model import LayerWeights, Model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BUNDLED = Path(__file__).parent / "bundled"
"""The pair that comes with the package."""

BUNDLED_STAGES = (BUNDLED / "ngram", BUNDLED / "stage2")
"""What drafts for its first draft."""

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_NGRAM, _PER_NAT, _DEAREST = "ngram", 16, 255


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or not what its configuration says."""


def load(
    name: str | Path = "bundled", dtype: str | None = None
) -> "tuple[Model, PreTrainedTokenizerFast]":
    """The model and the tokenizer of a folder, or of the bundled target.

    `dtype` is "float32" or "bfloat16"; None takes float32 on a CPU and bfloat16 elsewhere.

    Raises:
      CheckpointError: the folder, a file or a tensor is missing or not supported.
    """
    folder = BUNDLED / "target" if name == "bundled" else Path(name)
    return load_model(folder, dtype), tokenizer_of(folder)


def load_drafts(
    names: str | Path | Sequence[str | Path] = "bundled", dtype: str | None = None
) -> list[Model]:
    """The models of a folder or of several, or the whole bundled pool in numeric order.

    "bundled/0" names the first draft of the bundled pool alone.

    Raises:
      CheckpointError: a folder, a file or a tensor is missing or not supported.
    """
    if names == "bundled":
        return load_pool(BUNDLED / "drafts", dtype)
    several = [names] if isinstance(names, str | Path) else names
    return [load_model(folder_of(name, "drafts"), dtype) for name in several]


def load_pool(folder: Path, dtype: str | None = None) -> list[Model]:
    """The models of the folders 0, 1, ... in `folder`, in numeric order.

    Raises:
      CheckpointError: there is none, or one is not supported.
    """
    found = [each for each in folder.glob("*") if each.name.isdigit()]
    if not found:
        raise CheckpointError(f"there are no drafts in {folder}: it needs folders 0, 1, ...")
    return [load_model(each, dtype) for each in sorted(found, key=lambda each: int(each.name))]


def load_model(folder: str | Path, dtype: str | None = "float32") -> Model:
    """The weights in `folder`, rounded to `dtype` (None: as `load` does).

    Raises:
      CheckpointError: a file is missing or damaged, a tensor is unused, a parameter unfilled, a
        shape differs from what the configuration says, or the configuration is not supported.
    """
    folder = Path(folder)
    config = _read_config(folder)
    family = families.FAMILIES[config.family]
    kind = jnp.dtype(dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    missing = families.tensor_shapes(config)
    found: dict[str, np.ndarray] = {}
    for name, file, tensor in _tensors(folder, family.ignored):
        expected = missing.pop(name, None)
        if expected is None:
            if name in found or not (config.tie_embeddings and name == family.unembedding):
                raise CheckpointError(f"{file} holds {name}, which the model has no place for.")
            expected = (config.vocab_size, config.hidden_size)
        if tensor.shape != expected:
            raise CheckpointError(
                f"{name} in {file} has shape {tensor.shape}; {_CONFIG} asks for {expected}."
            )
        found[name] = tensor.astype(kind)
    if missing:
        raise CheckpointError(f"{folder} has no tensor {', '.join(sorted(missing))}.")
    if config.tie_embeddings:
        _drop_tied(found, family, folder)
    return _assemble(found, config)


def save_model(
    model: Model,
    folder: str | Path,
    tokenizer: "Tokenizer | PreTrainedTokenizerFast | None" = None,
    dtype: str = "bfloat16",
    **extras: Any,
) -> None:
    """Writes `model` as a folder that `load` and transformers' `from_pretrained` read.

    Weights are rounded to `dtype`; `extras` are added to `config.json`. A bare
    `tokenizers.Tokenizer` is wrapped so that it adds no special tokens and decodes byte for byte.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = families.write_config(model.config) | {"dtype": dtype, "torch_dtype": dtype} | extras
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    kind = jnp.dtype(dtype)
    tensors = {name: np.asarray(leaf).astype(kind) for name, leaf in named_leaves(model)}
    (folder / _WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
    if tokenizer is not None:
        _save_tokenizer(tokenizer, folder, model.config)


def folder_of(name: str | Path, *within: str) -> Path:
    """The folder that a name means: `bundled/...` comes with the package, there under `within`."""
    first, *rest = Path(name).parts
    return BUNDLED.joinpath(*within, *rest) if first == "bundled" and rest else Path(name)


def is_ngram(folder: str | Path) -> bool:
    """Whether a folder holds an n-gram model.

    Raises:
      CheckpointError: it holds no configuration.
    """
    return _config_of(Path(folder)).get("kind") == _NGRAM


def load_ngram(name: str | Path = "bundled", vocab_size: int | None = None) -> ngram.NGram:
    """The n-gram model of a folder, or the bundled one.

    Raises:
      CheckpointError: a file or a tensor is missing, damaged, or not what the configuration says,
        or the model is not one of `vocab_size` tokens.
    """
    folder = BUNDLED / _NGRAM if name == "bundled" else Path(name)
    config = _config_of(folder)
    size, width, contexts = _ngram_sizes(config, folder / _CONFIG)
    if vocab_size not in (None, size):
        raise CheckpointError(
            f"the n-gram model in {folder} is one of {size} tokens; {vocab_size} are asked for."
        )
    rows = size + contexts, width
    found = _ngram_tensors(folder, {"contexts": (contexts, 2), "tokens": rows, "costs": rows})
    largest = max(int(found[each].max(initial=0)) for each in ("contexts", "tokens"))
    if largest >= size:
        raise CheckpointError(f"{folder} names token {largest}; {_CONFIG} says {size} tokens.")
    wide = {name: tensor.astype(np.int32) for name, tensor in found.items()}
    log_q = wide["costs"].astype(np.float32) / -_PER_NAT
    return ngram.pack(wide["contexts"], wide["tokens"], log_q)


def save_ngram(table: ngram.NGram, folder: str | Path, **extras: Any) -> None:
    """Writes `table` as a folder that `load_ngram` reads; `extras` are added to `config.json`.

    Log probabilities are kept as `costs`, in sixteenths of a nat in a byte (at most 15.9 nats);
    the hash table is made anew when the folder is read.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "kind": _NGRAM,
        "order": ngram.ORDER,
        "vocab_size": table.vocab_size,
        "width": table.width,
        "contexts": table.num_contexts,
    }
    (folder / _CONFIG).write_text(json.dumps(config | extras, indent=2) + "\n", encoding="utf-8")
    small = np.min_scalar_type(table.vocab_size - 1)
    costs = np.round(-_PER_NAT * np.asarray(table.log_q))
    tensors = {
        "contexts": ngram.contexts_of(table).astype(small),
        "tokens": np.asarray(table.tokens).astype(small),
        "costs": np.minimum(costs, _DEAREST).astype(np.uint8),
    }
    (folder / _WEIGHTS).write_bytes(save(tensors))


def tokenizer_of(folder: str | Path) -> "PreTrainedTokenizerFast":
    """The transformers tokenizer stored in `folder`.

    Raises:
      CheckpointError: the folder holds no tokenizer, or one that cannot be read.
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise CheckpointError(f"no tokenizer in {folder}; it needs a {_TOKENIZER_FILES[0]}.")
    _quieten()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise CheckpointError(f"the tokenizer in {folder} cannot be read: {error}") from error


def _read_config(folder: Path) -> ModelConfig:
    parsed = _config_of(folder)
    generation = folder / "generation_config.json"
    if generation.is_file() and (eos := _json(generation).get("eos_token_id")) is not None:
        parsed = parsed | {"eos_token_id": eos}
    try:
        return families.read_config(parsed)
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{folder / _CONFIG}: {error}") from error


def _config_of(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        if BUNDLED in folder.parents:
            raise CheckpointError(f"this installation has no bundled pair: {folder} is missing.")
        raise CheckpointError(f"no model folder at {folder}; it must exist, or be 'bundled'.")
    if not (folder / _CONFIG).is_file():
        raise CheckpointError(f"{folder} has no {_CONFIG}, so it is not a model folder.")
    return _json(folder / _CONFIG)


def _ngram_sizes(config: dict[str, Any], file: Path) -> tuple[int, int, int]:
    """Vocabulary, width and contexts of an n-gram model."""
    for name, expected in (("kind", _NGRAM), ("order", ngram.ORDER)):
        if config.get(name) != expected:
            raise CheckpointError(
                f"{file} says {name} {config.get(name)!r}; an n-gram model has {expected!r}."
            )
    for name, least in (("vocab_size", 1), ("width", 1), ("contexts", 0)):
        if type(config.get(name)) is not int or config[name] < least:
            raise CheckpointError(
                f"{file} says {name} {config.get(name)!r}; it must be at least {least}."
            )
    return config["vocab_size"], config["width"], config["contexts"]


def _ngram_tensors(folder: Path, missing: dict[str, tuple[int, int]]) -> dict[str, np.ndarray]:
    """The tensors of an n-gram model, of the shapes given."""
    found = {}
    for name, file, tensor in _tensors(folder):
        expected = missing.pop(name, None)
        if expected is None:
            raise CheckpointError(f"{file} holds {name}, which an n-gram model has no place for.")
        if tensor.shape != expected:
            raise CheckpointError(
                f"{name} in {file} has shape {tensor.shape}; {_CONFIG} asks for {expected}."
            )
        found[name] = tensor
    if missing:
        raise CheckpointError(f"{folder} has no tensor {', '.join(sorted(missing))}.")
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path} holds a {type(parsed).__name__}, not an object.")
    return parsed


def _tensors(
    folder: Path, ignored: str | tuple[str, ...] = ()
) -> Iterator[tuple[str, Path, np.ndarray]]:
    """Every tensor of the folder's safetensors files, with its name and file."""
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118
                    if not name.endswith(ignored):
                        yield name, file, opened.get_tensor(name)
        except FileNotFoundError as error:
            raise CheckpointError(f"{file} is missing, though {_INDEX} names it.") from error
        except SafetensorError as error:
            raise CheckpointError(f"{file} is truncated or damaged: {error}.") from error


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).is_file():
        raise CheckpointError(f"{folder} has neither {_WEIGHTS} nor {_INDEX}.")
    weight_map = _json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{folder / _INDEX} has no weight_map.")
    return [folder / name for name in sorted(set(weight_map.values()))]


def _drop_tied(found: dict[str, np.ndarray], family: families.Family, folder: Path) -> None:
    """Takes out an unembedding that a tied model's file repeats; it must equal the embedding."""
    repeated = found.pop(family.unembedding, None)
    if repeated is not None and not np.array_equal(repeated, found[family.embedding]):
        raise CheckpointError(
            f"{folder} says tie_word_embeddings, but its {family.unembedding} differs from "
            f"its {family.embedding}."
        )


def _assemble(tensors: dict[str, np.ndarray], config: ModelConfig) -> Model:
    family = families.FAMILIES[config.family]

    def layer(index: int) -> LayerWeights:
        names = families.layer_names(index, config)
        return LayerWeights(**{leaf: jnp.asarray(tensors[name]) for leaf, name in names.items()})

    tied = config.tie_embeddings
    return Model(
        embedding=jnp.asarray(tensors[family.embedding]),
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=jnp.asarray(tensors[family.final_norm]),
        unembedding=None if tied else jnp.asarray(tensors[family.unembedding]),
        config=config,
    )


def named_leaves(model: Model) -> Iterator[tuple[str, Array]]:
    """The weights under the names that Hugging Face's files give them."""
    family = families.FAMILIES[model.config.family]
    yield family.embedding, model.embedding
    yield family.final_norm, model.final_norm
    if model.unembedding is not None:
        yield family.unembedding, model.unembedding
    for index, weights in enumerate(model.layers):
        for leaf, name in families.layer_names(index, model.config).items():
            yield name, getattr(weights, leaf)


def _save_tokenizer(
    tokenizer: "Tokenizer | PreTrainedTokenizerFast", folder: Path, config: ModelConfig
) -> None:
    _quieten()
    from transformers import PreTrainedTokenizerFast

    if isinstance(tokenizer, Tokenizer):
        eos = tokenizer.id_to_token(config.eos_ids[0]) if config.eos_ids else None
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=eos,
            clean_up_tokenization_spaces=False,
            model_max_length=config.max_positions,
        )
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    saved = _json(path)
    if saved.get("tokenizer_class") == "TokenizersBackend":  # transformers 4 knows the old name
        saved["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")


def _quieten() -> None:
    """Keeps transformers from advising, at import, to install PyTorch."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
