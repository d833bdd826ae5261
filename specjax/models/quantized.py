"""Weights in 8 and 4 bits: a packed matrix, and the numbers that it stands for."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Array, BFloat16, Float, Int32, Num, UInt8

from pallas_kernels.cpu import multiplies_bfloat16
from pallas_kernels.platform import platform
from specjax.base.pytree import pytree, replace, static, unchecked

_FLOAT32 = np.dtype("float32")
INTEGER, FLOAT8, BFLOAT16 = "int", "fp8", "bfloat16"
"""What a code is: an integer, an 8-bit float (e4m3fn), or a whole weight in 16 bits. Others are
places in a table."""
FLOAT, INT8 = "float", "int8"
"""What activations are as they multiply packed weights (see `with_activations`), and `BFLOAT16`."""
_NAMED = {FLOAT: "", BFLOAT16: ", activations in bfloat16", INT8: ", activations in 8 bits"}
OF_GROUPS = ("scale", "zero", "offset")
"""Parts of a packed matrix that have a number for each group of a row's inputs."""
TABLES = ("embedding", "unembedding")
"""Leaves of a model that have a row for each token, and may be packed as matrices of layers are."""


@pytree
class PackedWeight:
    """A matrix `[O, I]` of codes of 8 or 4 bits, each group of a row's inputs with a scale.

    Or of bfloat16 numbers as they are (`kept`), which is not quantized: products with it are
    computed in float32, and lose nothing.

    It stands for `scale · (code - zero)`, of floats and of tables for `scale · number(code)`, and
    where groups have an offset for `scale · code + offset`. Of two codes in a byte the input that
    comes first has the lower bits, as in files of compressed-tensors.

    Attributes:
      values: the codes, unsigned; or the numbers.
      scale: of each of the `G` groups, which are equally long; in 16 bits or float32.
      zero: the code of 0 of each group; None for the middle one, 8 or 128.
      order: which input stands at each place, where groups are not of neighbours.
      table: the numbers that codes stand for, where they are none themselves.
      offset: of each group of integers, what a code of 0 stands for, in place of `zero`.
      bits: of a code, 8 or 4; or 16 of a number.
      form: what a code is: `INTEGER`, `FLOAT8`, `BFLOAT16`, or a table's name, such as `nf4`.
      dtype: what products with it are computed in.
      activations: `FLOAT`, or what they are rounded to first, whatever `dtype` is: `BFLOAT16`, and
        the numbers that codes stand for too, or `INT8`, in groups.
    """

    values: UInt8[Array, "*lead O B"] | BFloat16[Array, "*lead O B"]
    scale: Float[Array, "*lead O G"]
    zero: UInt8[Array, "*lead O G"] | None = None
    order: Int32[Array, " I"] | None = None
    table: Float[Array, " N"] | None = None
    offset: Float[Array, "*lead O G"] | None = None
    bits: int = static(default=8)
    form: str = static(default=INTEGER)
    dtype: np.dtype = static(default=np.dtype("float32"))
    activations: str = static(default=FLOAT)

    @property
    def shape(self) -> tuple[int, ...]:
        """Outputs and inputs, after the axes of several matrices where they are stacked."""
        held = self.values.shape[-1]
        return *self.values.shape[:-1], held * self.values.dtype.itemsize * 8 // self.bits

    @property
    def nbytes(self) -> int:
        """Bytes of all its parts."""
        return sum(part.nbytes for part in jax.tree.leaves(self))

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[-1] // self.scale.shape[-1]

    @property
    def name(self) -> str:
        """Its bits and groups, as people name them."""
        kind = f"int{self.bits}" if self.form == INTEGER else self.form
        each = "row" if self.group == self.shape[-1] else f"{self.group} inputs"
        scales = "a scale" if self.offset is None else "a scale and an offset"
        return f"{kind}, {scales} for each {each}{_NAMED[self.activations]}"

    def changed(self, **parts: Any) -> "PackedWeight":
        """The same with other parts, which numpy may hold: their types are not checked."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return unchecked(PackedWeight, **(own | parts))

    @property
    def rows(self) -> dict[str, Any]:
        """The parts that have a row for each output."""
        parts = {name: getattr(self, name) for name in ("values", *OF_GROUPS)}
        return {name: part for name, part in parts.items() if part is not None}

    def of_rows(self, change: Callable[[Any], Any]) -> "PackedWeight":
        """With what `change` makes of the parts that have a row for each output."""
        return self.changed(**{name: change(part) for name, part in self.rows.items()})

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers of which the middle one is 0, or that have an offset."""
        return self.form == INTEGER and self.zero is None

    @property
    def is_looked_up(self) -> bool:
        """Whether codes are of 4 bits, and places in a table."""
        return self.table is not None and self.bits == 4 and self.zero is None

    @property
    def is_scaled_after(self) -> bool:
        """Whether it is products that are scaled and not the matrix: in 8 bits with a scale a row.

        The codes' own numbers are exact in 16 bits, which scaled ones are not.
        """
        return self.bits == 8 and self.scale.shape[-1] == 1 and self.offset is None

    @property
    def strides(self) -> int:
        """In how many parts `columns_from` gives the matrix: a byte's codes each in another."""
        return 2 if self.bits == 4 and self.group % 2 == 0 else 1

    def columns_from(self, first: int, dtype: jnp.dtype = _FLOAT32) -> Float[Array, "O J"]:
        """The columns `first`, `first + strides`, ... of the matrix, in float32.

        Where products are scaled (`is_scaled_after`) these are not, and integers and floats are
        cast to `dtype` at once: 16 bits hold them exactly. XLA makes a cast from
        signed integers while a GPU multiplies, and writes anything else in 16 bits first: 124 us
        for 14,336 x 4,096 and 16 columns, where a matrix in 16 bits takes 48 (H100, 2026-11-26).
        """
        if self.is_scaled_after:
            return self._numbers(self.values[:, None], dtype).reshape(self.values.shape)
        if self.strides == 1:
            return self.unpacked()
        return self._scaled(self.values & 15 if first == 0 else self.values >> 4)

    def unpacked(self) -> Float[Array, "O I"]:
        """The matrix that it stands for, in float32, its inputs in the order of `order`."""
        codes = self.values
        if self.bits == 4:
            codes = jnp.stack([codes & 15, codes >> 4], axis=-1)
        return self._scaled(codes)

    def _scaled(self, codes: Num[Array, "O *rest"]) -> Float[Array, "O J"]:
        codes = codes.reshape(*self.scale.shape, -1)
        numbers = self._numbers(codes) * _wide(self.scale)
        numbers = numbers if self.offset is None else numbers + _wide(self.offset)
        return numbers.reshape(codes.shape[0], -1)

    def _numbers(
        self, codes: Num[Array, "O G J"], dtype: jnp.dtype = _FLOAT32
    ) -> Float[Array, "O G J"]:
        if self.form == FLOAT8:
            return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(dtype)
        if self.form == BFLOAT16:
            return codes.astype(dtype)
        if self.table is not None:
            return self.table.astype(jnp.float32)[codes]
        if self.offset is not None:
            return codes.astype(dtype)
        if self.zero is None and self.bits == 8:
            signed = lax.bitcast_convert_type(codes, jnp.int8) + jnp.int8(-128)  # wraps around
            return signed.astype(dtype)
        zero = 8.0 if self.zero is None else _wide(self.zero)
        return codes.astype(jnp.float32) - zero


def _wide(of_groups: Array) -> Float[Array, "O G 1"]:
    return of_groups.astype(jnp.float32)[:, :, None]


def packed_weight(values: np.ndarray, scale: np.ndarray, bits: int, **parts: Any) -> PackedWeight:
    """A packed matrix that numpy holds; what is not given is as in `PackedWeight`."""
    absent = {"zero": None, "order": None, "table": None, "offset": None, "form": INTEGER}
    absent |= {"dtype": np.dtype("float32"), "activations": FLOAT}
    return unchecked(PackedWeight, values=values, scale=scale, bits=bits, **(absent | parts))


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of MXFP4's codes without a sign (OCP Microscaling formats, 2023)."""


def mxfp4_weight(values: np.ndarray, exponents: np.ndarray) -> PackedWeight:
    """Matrices in MXFP4: 4-bit floats, and a power of two for each 32 of a row's inputs.

    Scales become bfloat16, which holds all of them exactly.

    Args:
      values: bytes of two codes (`bytes_of`), `[..., I / 2]`.
      exponents: of the scales, 127 more than they are, `[..., I / 32]` in uint8.

    Raises:
      ValueError: a scale is NaN.
    """
    if (exponents == 255).any():
        raise ValueError("a scale is NaN.")
    bits = np.where(exponents == 0, 64, exponents.astype(np.uint16) << 7).astype(np.uint16)
    table = np.asarray([*_E2M1, *(-each for each in _E2M1)], np.float32)
    scale = bits.view(ml_dtypes.bfloat16)
    return packed_weight(values, scale, 4, table=table, form="mxfp4")


def kept(matrix: np.ndarray) -> PackedWeight:
    """A matrix of bfloat16 numbers that stay so, where products are computed in float32."""
    ones = np.ones((*matrix.shape[:-1], 1), matrix.dtype)
    return packed_weight(matrix, ones, 16, form=BFLOAT16)


def widened(model: Any) -> Any:
    """A model whose matrices that were kept in bfloat16 are plain ones, in what they compute in."""

    def change(leaf: Any) -> Any:
        is_kept = isinstance(leaf, PackedWeight) and leaf.form == BFLOAT16
        return leaf.values.astype(leaf.dtype) if is_kept else leaf

    return jax.tree.map(change, model, is_leaf=_is_packed)


def holds_packed(model: Any) -> bool:
    """Whether a model has matrices that are not held in what they compute in."""
    return any(map(_is_packed, jax.tree.leaves(model, is_leaf=_is_packed)))


def bytes_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes along the last axis as a `PackedWeight` holds them: of 4 bits two in a byte."""
    return codes if bits == 8 else codes[..., 0::2] | codes[..., 1::2] << 4


def quantized_as(model: Any) -> str | None:
    """How the matrices of a model are quantized; None if none is."""
    if (told := getattr(model, "quantization", None)) is not None:
        return told  # of one whose layers are elsewhere
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_packed)
    packed = [
        (path, leaf)
        for path, leaf in leaves
        if isinstance(leaf, PackedWeight) and leaf.form != BFLOAT16
    ]
    return quantization_of((path[-1].name, leaf.name) for path, leaf in packed)


def quantization_of(packed: Iterable[tuple[str, str]]) -> str | None:
    """The same of packed leaves, each with the name of its form; tables are named by themselves."""
    of_tables: dict[str, set[str]] = {}
    of_layers: set[str] = set()
    for leaf, form in packed:
        if leaf in TABLES:
            of_tables.setdefault(form, set()).add(leaf)
        else:
            of_layers.add(form)
    said = [" and ".join(sorted(of_layers))] if of_layers else []
    said += [f"{' and '.join(sorted(of_tables[form]))} in {form}" for form in sorted(of_tables)]
    return "; ".join(said) or None


def in_dtype(model: Any, dtype: Any) -> Any:
    """A model whose floating-point weights are in `dtype`, and whose packed ones compute in it."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, PackedWeight):
            made = replace(leaf, dtype=np.dtype(dtype))
            return widened(made) if dtype == jnp.bfloat16 else made
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, model, is_leaf=_is_packed)


def check_activations(activations: str | None) -> None:
    """Checks that activations can be so where this runs.

    Raises:
      ValueError: there is no such choice, or they cannot.
    """
    if activations is not None and activations not in _NAMED:
        raise ValueError(f"no activations {activations!r}; there are {', '.join(_NAMED)}.")
    if activations in (BFLOAT16, INT8) and platform() != "cpu":
        raise ValueError(
            f"activations in {activations} are computed on a CPU, and this is {platform()}."
        )


def with_activations(model: Any, activations: str | None) -> Any:
    """A model whose packed integers multiply activations that are float or rounded.

    In 8 bits each 32 inputs of a token have a scale, the largest of them over 127 (as llama.cpp
    computes its quantized products). A token's product depends on nothing but the token. What is
    not packed in integers multiplies floats, whatever is chosen.

    Args:
      model: the model.
      activations: `FLOAT`, `BFLOAT16` or `INT8`; None is `BFLOAT16` where the processor multiplies
        such numbers itself, which is nearly as exact and faster (docs/models.md), else `FLOAT`.

    Raises:
      ValueError: see `check_activations`; or nothing of it is packed so.
    """
    check_activations(activations)
    taken = activations or (BFLOAT16 if multiplies_bfloat16() else FLOAT)

    def change(leaf: Any) -> Any:
        is_one = isinstance(leaf, PackedWeight) and (
            leaf.is_integer or (leaf.is_looked_up and taken != INT8)
        )
        return replace(leaf, activations=taken) if is_one else leaf

    made = jax.tree.map(change, model, is_leaf=_is_packed)
    if activations in (BFLOAT16, INT8) and activations_of(made) != activations:
        raise ValueError(
            f"activations in {activations} multiply weights that are integers of 8 or 4 bits, and "
            "this model has none."
        )
    return made


def activations_of(model: Any) -> str:
    """What activations are as they multiply a model's packed weights."""
    leaves = jax.tree.leaves(model, is_leaf=_is_packed)
    rounded = {leaf.activations for leaf in leaves if isinstance(leaf, PackedWeight)} - {FLOAT}
    return next(iter(rounded), FLOAT)


def _is_packed(node: Any) -> bool:
    return isinstance(node, PackedWeight)


GROUP_OF_4_BITS = 64
"""Inputs that share a scale where nothing else is named."""
_SHRUNK = tuple(sign * (1 - 0.025 * n) for sign in (1, -1) for n in range(13))
"""Scales that are tried, as shares of the one that no weight exceeds.

The lowest code is farther from 0 than the highest, so a sign says which end has more room.
"""
_FITTED = 2
"""How often the best of them is fitted to the weights by least squares."""
_AT_A_TIME = 1 << 22
"""Weights that are quantized together."""
_LEAST = 1e-30


def packed(
    matrix: np.ndarray, bits: int, group: int | None = None, importance: np.ndarray | None = None
) -> PackedWeight:
    """A matrix in symmetric integers of 8 or 4 bits.

    In 4 bits each group has the scale of the least squared error, of 26 and of what least squares
    make of the best: large weights may be cut, and scales may be negative. Scales are bfloat16
    numbers, as in files.

    Args:
      matrix: `[..., O, I]`, floating-point numbers.
      bits: of a weight.
      group: inputs that share a scale; None for a scale for each row.
      importance: what the squared errors of each input's weights are multiplied by; None for 1.

    Returns:
      The packed matrix, which numpy holds.

    Raises:
      ValueError: groups do not divide the inputs, or two codes do not fill a byte.
    """
    *first, inputs = matrix.shape
    matrix, outputs = matrix.reshape(-1, inputs), math.prod(first)
    each = check_groups(inputs, bits, group)
    weights = np.ones(inputs, np.float32) if importance is None else importance
    weights = jnp.asarray(weights, jnp.float32).reshape(-1, each)
    rows = min(outputs, max(1, _AT_A_TIME // inputs))
    codes = np.empty((outputs, inputs), np.uint8)
    scale = np.empty((outputs, inputs // each), jnp.bfloat16)
    for start in range(0, outputs, rows):
        part = np.zeros((rows, inputs), np.float32)
        own = matrix[start : start + rows]
        part[: len(own)] = own
        made, scales = _rounded(part.reshape(rows, -1, each), weights, bits)
        codes[start : start + rows] = np.asarray(made).reshape(rows, -1)[: len(own)]
        scale[start : start + rows] = np.asarray(scales)[: len(own)]
    values, scale = (each.reshape(*first, -1) for each in (bytes_of(codes, bits), scale))
    return packed_weight(values, scale, bits)


def check_groups(inputs: int, bits: int, group: int | None) -> int:
    """How many inputs share a scale, where None is all of a row.

    Raises:
      ValueError: groups do not divide the inputs, or two codes do not fill a byte.
    """
    each = inputs if group is None else group
    if inputs % each or inputs * bits % 8:
        raise ValueError(f"groups of {each} inputs in {bits} bits do not divide {inputs} inputs.")
    return each


@partial(jax.jit, static_argnames="bits")
def _rounded(
    numbers: Float[Array, "O G J"], weights: Float[Array, "G J"], bits: int
) -> tuple[UInt8[Array, "O G J"], BFloat16[Array, "O G"]]:
    """The codes of numbers, and the scale of each group."""
    most = 1 << (bits - 1)
    whole = jnp.maximum(jnp.abs(numbers).max(axis=2) / (most - 1), _LEAST)

    def codes_of(scale: Array) -> Array:
        return jnp.clip(jnp.rint(numbers / scale[:, :, None]), -most, most - 1)

    def better(found: tuple[Array, Array], tried: Array) -> tuple[Array, Array]:
        best, scale = found
        tried = lax.reduce_precision(tried, 8, 7)
        off = codes_of(tried) * tried[:, :, None] - numbers
        error = (weights * jnp.square(off)).sum(axis=2)
        return jnp.minimum(error, best), jnp.where(error < best, tried, scale)

    shares = jnp.asarray(_SHRUNK if bits == 4 else _SHRUNK[:1], jnp.float32)
    found = jnp.full(whole.shape, jnp.inf), whole
    found = lax.fori_loop(0, len(shares), lambda n, found: better(found, shares[n] * whole), found)
    for _ in range(_FITTED if bits == 4 else 0):
        codes = codes_of(found[1])
        fitted = (weights * codes * numbers).sum(axis=2) / jnp.maximum(
            (weights * jnp.square(codes)).sum(axis=2), _LEAST
        )
        found = better(found, jnp.where(jnp.abs(fitted) < _LEAST, found[1], fitted))
    scale = found[1]
    return (codes_of(scale) + most).astype(jnp.uint8), scale.astype(jnp.bfloat16)
