"""Writes a folder's model with its layers' matrices packed, as compressed-tensors lays them out."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints import gptq_rounding, pruned_vocabulary, quantized
from specjax.checkpoints.calibration import OF_MATRIX, Calibration, Gram, rows_of
from specjax.checkpoints.experts import Tensor, gathered
from specjax.checkpoints.feature_drafts import described_in
from specjax.checkpoints.files import CONFIG, CheckpointError, Files, config_of, tensors
from specjax.checkpoints.huggingface import check_numbers, check_tied, leaves_of
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.checkpoints.writing import Shards, new_model
from specjax.models import families
from specjax.models.config import PACKABLE, ROUTERS, ModelConfig
from specjax.models.families import Family, Stored
from specjax.models.layer_weights import LayerWeights, layer_of
from specjax.models.placement import placement
from specjax.models.quantized import TABLES, PackedWeight, check_groups, packed
from specjax.models.transformer import assemble

_GROUP = 32
"""Inputs that share a scale in 4 bits where nothing else is named."""
KEPT = 0.4
"""The share of the layers' weights in 8 bits where 4 are asked for and no share is named."""
_PRODUCTS = ("unembedding", "feature_projection")
"""What products outside the layers multiply, which is not packed with them."""
_SENSITIVE = ("query", "down", "up", "output")
"""Which matrices are kept in 8 bits, the first of all layers before the next, as their inputs are
named: what 4 bits of each cost SmolLM2-135M a weight."""


Texts = Callable[[], Sequence[str]]
"""Gives texts, once it is sure that nothing else is wrong: to make them may take long."""


class Quantized(NamedTuple):
    """What was written.

    Attributes:
      matrices: how many were quantized.
      name: how.
      size: bytes of weights.
      before: the same of the model that was read.
      plain: the same of that model in bfloat16.
      outside: bytes of what lies outside the layers in that model, most of it embeddings.
      packed_outside: the same with the tables of tokens in 8 bits.
      table: whether they are.
      kept: how many matrices of each kind are in 8 bits where 4 were asked for.
      tokens: with which it was calibrated.
    """

    matrices: int
    name: str
    size: int
    before: int
    plain: int
    outside: int
    packed_outside: int
    table: bool
    kept: Mapping[str, int]
    tokens: int


class Way(NamedTuple):
    """How matrices are quantized.

    Attributes:
      bits: of a weight, 8 or 4.
      group: inputs that share a scale; by default 32 in 4 bits, and all of a row in 8.
      kept: the share of the layers' weights that are in 8 bits though `bits` are 4: those that
        suffer most. None is 0.4, and none of them where `group` is named.
      texts: gives what the model is calibrated with (GPTQ); None to round each weight by itself.
      table: the bits of the embedding, and of an unembedding of its own: 8, with a scale for each
        row. None leaves them as they are.
    """

    bits: int = 4
    group: int | None = None
    kept: float | None = None
    texts: Texts | None = None
    table: int | None = None

    @property
    def share(self) -> float:
        """Of the layers' weights in 8 bits."""
        named = KEPT if self.group is None else 0.0
        return 1.0 if self.bits == 8 else named if self.kept is None else self.kept

    @property
    def of_group(self) -> int | None:
        """Inputs that share a scale."""
        return _GROUP if self.group is None and self.bits == 4 else self.group

    def check(self) -> None:
        """Checks that it is one.

        Raises:
          ValueError: it is not.
        """
        if self.bits not in (8, 4):
            raise ValueError(f"--bits is {self.bits}; it must be 8 or 4.")
        if self.group is not None and self.group < 1:
            raise ValueError(f"--group is {self.group}; it must be at least 1.")
        if self.kept is not None and not 0 <= self.kept <= 1:
            raise ValueError(f"--kept is {self.kept}; it must be from 0 to 1.")
        if self.bits == 8 and (self.kept is not None or self.texts is not None):
            raise ValueError("--kept and --calibration are for 4 bits; --bits is 8.")
        if self.table not in (None, 8):
            raise ValueError(f"--table is {self.table}; it must be 8.")


def quantize_folder(
    files: Files,
    out: Path,
    bits: int = 4,
    group: int | None = None,
    progress: Callable[[int, int], object] = lambda count, of: None,
    kept: float | None = None,
    texts: Texts | None = None,
    table: int | None = None,
) -> Quantized:
    """Writes a model with symmetric integers for its layers' matrices; the rest stays as it is.

    `load` and transformers (with compressed-tensors installed) read the folder. One matrix at a
    time is in memory, with texts one layer and what lies outside of the layers, and a file of at
    most 2 GiB. Nothing is left where it fails.

    Args:
      files: the model.
      out: a folder that holds no model yet.
      bits: see `Way`.
      group: see `Way`.
      progress: is called with how many tensors of how many are done.
      kept: see `Way`.
      texts: see `Way`.
      table: see `Way`.

    Raises:
      CheckpointError: the model is missing, damaged, not finite, quantized already or of a family
        whose matrices cannot be, or `out` holds one.
      ValueError: there are no such bits, groups or shares, or groups do not divide a matrix.
    """
    way = Way(bits, group, kept, texts, table)
    way.check()
    described = config_of(files.path)
    if quantized.layouts_of(described, files.path):
        raise CheckpointError(f"{files.path} is quantized already.")
    config, family = described_in(files)
    if texts is not None and config.features is not None:
        raise ValueError(
            f"{files.path} reads hidden states of a target, and without it nothing is calibrated."
        )
    matrices = _matrices_of(files, config, family)
    eight = _in_8_bits(matrices.values(), way.share)
    for name, stored in matrices.items():
        if way.bits == 8 or name not in eight:
            _check_groups(name, stored.shape[1], way)
    writing = _Writing(files, config, family, way, matrices, eight)
    others = [family.outer[leaf].split(".")[-2] for leaf in _PRODUCTS if leaf in family.outer]
    routers = [family.experts[leaf] for leaf in ROUTERS if leaf in family.experts]
    others += [rf"re:.*{re.escape(name.removesuffix('.weight'))}$" for name in routers]
    about = _described(way, matrices, eight, writing.packed_tables, others)
    with new_model(files.path, out, described | {"quantization_config": about}) as shards:
        return writing.write(shards, progress)


def _check_groups(name: str, inputs: int, way: Way) -> None:
    """Checks that a matrix can be of the groups asked for, before anything is made."""
    try:
        check_groups(inputs, way.bits, way.of_group)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _in_8_bits(matrices: Collection[Stored], share: float) -> frozenset[str]:
    """Which matrices are in 8 bits: no more than a share of all weights, by `_SENSITIVE`.

    Matrices of a layer with the same inputs go together, as servers multiply them as one. Of a
    kind that does not fit whole, the first and the last layers are taken.
    """
    units: dict[tuple[int, int], list[Stored]] = {}
    last = max(stored.layer or 0 for stored in matrices)
    for stored in matrices:
        layer = stored.layer or 0
        rank = _SENSITIVE.index(OF_MATRIX.get(stored.leaves[0], "down"))
        edge = 2 * min(layer, last - layer) + (layer > last - layer)
        units.setdefault((rank, edge), []).append(stored)
    room = share * sum(int(np.prod(stored.shape)) for stored in matrices)
    found: set[str] = set()
    for _, unit in sorted(units.items()):
        room -= sum(int(np.prod(stored.shape)) for stored in unit)
        if room < 0:
            break
        found |= {stored.name for stored in unit}
    return frozenset(found)


def _matrices_of(files: Files, config: ModelConfig, family: Family) -> dict[str, Stored]:
    """The tensors that hold matrices of layers, by their names.

    Raises:
      CheckpointError: they are of a kind that readers of packed ones do not know.
    """
    found = {
        stored.name: stored
        for stored in families.stored(family, config)
        if stored.layer is not None and stored.leaves[0] in PACKABLE
    }
    if any(len(stored.shape) > 2 for stored in found.values()):
        raise CheckpointError(
            f"{files.path}: experts of {family.model_type} models are stored together, which has "
            "no packed form."
        )
    if any(stored.turned for stored in found.values()):
        raise CheckpointError(
            f"{files.path}: matrices of {family.model_type} models are stored [in, out], which "
            "has no packed form."
        )
    return found


class _Writing:
    """The tensors of a model on their way into files."""

    def __init__(
        self, files: Files, config: ModelConfig, family: Family, way: Way,
        matrices: Mapping[str, Stored], eight: Collection[str],
    ) -> None:  # fmt: skip
        self._files, self._config, self._family = files, config, family
        self._way, self._matrices, self._eight = way, matrices, eight
        expected = {stored.name: stored for stored in families.stored(family, config)}
        self._expected = expected
        self._found = {
            family.name_of(name, expected): (name, file, tensor)
            for name, file, tensor in tensors(files)
        }
        self._placed = placement(config, None)
        self._tie()
        self._tables = {
            stored.name: stored for stored in expected.values()
            if stored.layer is None and stored.leaves[0] in TABLES and stored.name in self._found
        }  # fmt: skip

    def _tie(self) -> None:
        """Leaves a tied model one table, under either name."""
        if not self._config.tie_embeddings:
            return
        first, second = (self._family.outer[leaf] for leaf in TABLES)
        if second not in self._found:
            return
        found = self._found.pop(second)
        own = self._found.setdefault(first, found)
        check_numbers(*own)  # those that are none differ from themselves
        check_tied(own[2], found[2], self._family, self._files.path)

    @property
    def packed_tables(self) -> list[str]:
        """The modules of the tables that are in 8 bits."""
        names = [] if self._way.table is None else list(self._tables)
        return [self._found[name][0].split(".")[-2] for name in names]

    def write(self, shards: Shards, progress: Callable[[int, int], object]) -> Quantized:
        """Writes all tensors, matrices a layer after the other."""
        missing = sorted(self._matrices.keys() - self._found.keys())
        if missing:
            raise CheckpointError(f"{self._files.path} has no tensor {', '.join(missing)}.")
        others = [each for each in self._found.items() if each[0] not in self._matrices]
        for number, (name, found) in enumerate(others):
            if not pruned_vocabulary.is_map(name, self._config):
                check_numbers(*found)
            if self._way.table is not None and name in self._tables:
                self._add(shards, found[0], self._quantized(self._tables[name], None))
            else:
                shards.add(found[0], found[2])
            progress(number + 1, len(self._found))
        calibration = self._calibration()
        names: dict[str, None] = {}
        done = len(others)
        for layer in range(self._config.num_layers):
            for stored, weight in self._layer(layer, calibration):
                self._add(shards, self._found[stored.name][0], weight)
                names[weight.name] = None
                done += 1
                progress(done, len(self._found))
        every = [tensor for _, _, tensor in self._found.values()]
        kept = [re.sub(r".*\.", "", name.removesuffix(".weight")) for name in sorted(self._eight)]
        return Quantized(
            len(self._matrices), " and ".join(sorted(names)), shards.size,
            sum(each.nbytes for each in every), sum(2 * each.size for each in every),
            *self._outside(), self._way.table is not None,
            {name: kept.count(name) for name in kept} if self._way.bits == 4 else {},
            0 if calibration is None else calibration.tokens,
        )  # fmt: skip

    def _outside(self) -> tuple[int, int]:
        """Bytes of what lies outside the layers, as it is and with tables in 8 bits."""
        held = {
            name: found[2] for name, found in self._found.items()
            if name in self._expected and self._expected[name].layer is None
        }  # fmt: skip
        whole = sum(each.nbytes for each in held.values())
        tables = [held[name] for name in self._tables]
        return whole, whole - sum(each.nbytes - each.size - 2 * len(each) for each in tables)

    @staticmethod
    def _add(shards: Shards, found: str, weight: PackedWeight) -> None:
        for name, part in _parts(found.removesuffix("weight"), weight):
            shards.add(name, part)

    def _leaves(self, stored: Stored, tensor: Tensor) -> dict[str, Any]:
        return leaves_of(stored, tensor, self._placed, jnp.dtype("float32"), self._files.path)

    def _calibration(self) -> Calibration | None:
        """The texts before the first layer, if there are some."""
        if self._way.texts is None:
            return None
        outer: dict[str, Any] = {}
        for name, stored in self._expected.items():
            if stored.layer is None and name in self._found:
                outer |= self._leaves(stored, self._found[name][2])
        tokenizer = tokenizer_of(self._files.path)
        rows = rows_of(self._way.texts(), tokenizer, self._config.max_positions)
        return Calibration(assemble(self._config, outer, []), rows)

    def _layer(
        self, layer: int, calibration: Calibration | None
    ) -> Iterator[tuple[Stored, PackedWeight]]:
        """The matrices of a layer, quantized; takes the texts through it."""
        grams: Mapping[str, Gram] = {}
        own = [stored for stored in self._expected.values() if stored.layer == layer]
        named = [stored.name for stored in own if stored.name in self._found]
        tensors_of = {name: self._found[name][2] for name in named}
        if calibration is not None:
            grams = calibration.grams(self._assembled(own, tensors_of), layer)
        for stored in own:
            if stored.name in self._matrices:
                gram = grams.get(OF_MATRIX.get(stored.leaves[0], ""))
                weight = self._quantized(stored, gram)
                if calibration is not None:
                    whole = jax.tree.map(jnp.asarray, weight).unpacked()
                    tensors_of[stored.name] = np.asarray(whole)
                yield stored, weight
        if calibration is not None:
            calibration.advance(self._assembled(own, tensors_of), layer)

    def _assembled(
        self, own: Sequence[Stored], tensors_of: Mapping[str, np.ndarray]
    ) -> LayerWeights:
        """A layer of such tensors."""
        leaves: dict[str, Any] = {}
        pairs = ((stored, tensors_of[stored.name]) for stored in own)
        for stored, tensor in gathered(pairs, self._config, self._files.path):
            leaves |= self._leaves(stored, tensor)
        return layer_of(leaves)

    def _quantized(self, stored: Stored, gram: Gram | None) -> PackedWeight:
        """A matrix in its bits."""
        found, file, tensor = self._found[stored.name]
        check_numbers(found, file, tensor)
        if tensor.shape != stored.shape:
            raise CheckpointError(
                f"{found} in {file} has shape {tensor.shape}; {CONFIG} asks for {stored.shape}."
            )
        try:
            if stored.name in self._tables:
                return packed(tensor, 8)
            if stored.name in self._eight:
                return packed(tensor, 8, self._way.group if self._way.bits == 8 else None)
            if gram is None:
                return packed(tensor, 4, self._way.of_group)
            return gptq_rounding.calibrated(tensor, gram, 4, self._way.of_group)
        except ValueError as error:
            raise ValueError(f"{found}: {error}") from error


def _parts(base: str, weight: Any) -> Iterator[tuple[str, np.ndarray]]:
    values = np.ascontiguousarray(weight.values)
    if values.shape[1] % 4:
        raise ValueError(f"{weight.shape[1]} inputs do not fill words of 32 bits.")
    yield f"{base}weight_packed", values.view(np.int32)
    yield f"{base}weight_scale", weight.scale
    yield f"{base}weight_shape", np.asarray(weight.shape, np.int64)


def _described(
    way: Way, matrices: Mapping[str, Stored], eight: Collection[str], tables: Collection[str],
    others: Collection[str],
) -> dict[str, Any]:  # fmt: skip
    """The `quantization_config` of compressed-tensors; where bits differ, matrices by name.

    `tables` are the modules of tables in 8 bits; `others` those of products outside the layers.
    """
    rest = [name for name in matrices if name not in eight]
    groups = [(8, None if way.bits == 4 else way.group, _targets(sorted(eight))),
              (4, way.of_group, _targets(rest))]  # fmt: skip
    groups = [each for each in groups if each[2]]
    if len(groups) == 1:
        groups = [(*groups[0][:2], ["Linear"])]
    if tables:
        groups.append((8, None, [rf"re:.*{re.escape(module)}$" for module in tables]))
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{number}": {
                "targets": targets,
                "weights": _weights(bits, group),
                "input_activations": None,
                "output_activations": None,
            }
            for number, (bits, group, targets) in enumerate(groups)
        },
        "ignore": [module for module in others if module not in tables],
    }


def _weights(bits: int, group: int | None) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if group is None else {"strategy": "group"}
    return {"num_bits": bits, "type": "int", "symmetric": True, "group_size": group} | strategy


def _targets(names: Collection[str]) -> list[str]:
    """Regular expressions of matrices: a kind, and its layers."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for name in names:
        parts = re.split(r"\.(\d+)\.", name.removesuffix(".weight"), maxsplit=1)
        before, layer, kind = parts if len(parts) > 1 else ("", "", parts[0])
        kinds.setdefault((before.rpartition(".")[2], kind), []).append(layer)
    return [
        rf"re:.*{before}\.({'|'.join(layers)})\.{re.escape(kind)}$" if before
        else rf"re:.*{re.escape(kind)}$"
        for (before, kind), layers in kinds.items()
    ]  # fmt: skip
