"""Quantized folders, each damaged in one place: a value of its configuration, or one tensor.

Every one must be read as what it stands for, or be refused in one of our own sentences.
"""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from specjax.checkpoints.files import CheckpointError, find, tensors
from specjax.checkpoints.load import load_model
from specjax.models.quantized import PackedWeight
from tests.quantized_files import LAYOUTS, rewrite

DAMAGED = "model.layers.0.mlp.up_proj"
"""The matrix one of whose tensors is damaged; it is no square."""
WRONG = (0, -1, 10**9, 1e300, float("nan"), "4", "", None, True, False, [4], [], {"a": 1})
FOREIGN = re.compile(
    r"broadcast|modulo|indices|subscript|object has no|reshape|unhashable|between instances|"
    r"NoneType|out of bounds|invalid literal|operand|argument|iterable|KeyError|convert|"
    r"division|dimension mismatch|unpack|cast|'numpy|Traceback|required|float\(\)|int\(\)"
)
"""Words of Python's and numpy's own errors."""
LEAVES = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output",
          "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}  # fmt: skip
MEANT = {("gptq_v2", "checkpoint_format"), ("awq", "w_bit")}
"""Layouts and keys whose absence stands for something else."""


def places(about: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a configuration has a value."""
    items = about.items() if isinstance(about, dict) else enumerate(about)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def described(about: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The configuration with each of its values wrong or gone, and what was done."""
    for path in places(about):
        for wrong in (*WRONG, "gone"):
            made = copy.deepcopy(about)
            within: Any = made
            for key in path[:-1]:
                within = within[key]
            if wrong == "gone":
                del within[path[-1]]
            else:
                within[path[-1]] = wrong
            yield f"{'.'.join(map(str, path))}: {wrong}", made


def changed(tensor: np.ndarray) -> Iterator[tuple[str, np.ndarray | None]]:
    """The tensor in other dtypes and shapes, and what was done; None where it is missing."""
    yield "missing", None
    for kind in ("int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64",
                 ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "bool"):  # fmt: skip
        if tensor.dtype != np.dtype(kind):
            with np.errstate(all="ignore"):
                yield f"as {np.dtype(kind)}", tensor.astype(np.float32).astype(kind)
    yield "empty", tensor[..., :0] if tensor.ndim else np.zeros(0, tensor.dtype)
    yield "one more dimension", tensor[None]
    yield "flat", tensor.reshape(-1)
    yield "scalar", np.array(tensor.reshape(-1)[0])
    if tensor.ndim == 2 and tensor.shape[0] != tensor.shape[1]:
        yield "transposed", np.ascontiguousarray(tensor.T)
    for axis in range(tensor.ndim):
        yield f"doubled along {axis}", np.concatenate([tensor, tensor], axis)
        if tensor.shape[axis] > 1:
            yield f"cut along {axis}", np.take(tensor, range(tensor.shape[axis] // 2), axis)
    if tensor.dtype.kind == "i":
        yield "negative", np.full_like(tensor, -5)
        yield "huge", np.full_like(tensor, np.iinfo(tensor.dtype).max)
    elif tensor.dtype.kind in "fV" and tensor.itemsize > 1:
        yield "not finite", np.full_like(tensor, np.inf)


DECIDES = {"negative", "huge", "as bfloat16", "as float16"}
"""Changes to numbers of a right dtype and shape, which cannot be told from what was meant."""


def names(held: dict[str, np.ndarray]) -> list[str]:
    """The tensors of the matrix that is damaged."""
    return sorted(name for name in held if name.startswith(DAMAGED + "."))


def damaged(folder: Path, layout: str) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """The folder, rewritten in every damaged way: what was done, and what it still stands for."""
    expected = rewrite(folder, layout)
    file, config = folder / "model.safetensors", folder / "config.json"
    held = {name: tensor.copy() for name, _, tensor in tensors(find(folder))}
    whole = json.loads(config.read_text())
    for what, about in described(LAYOUTS[layout][1]):
        config.write_text(json.dumps(whole | {"quantization_config": about}))
        if not any(layout.startswith(start) and key in what for start, key in MEANT):
            yield what, expected
    config.write_text(json.dumps(whole))
    for name in names(held):
        for what, tensor in changed(held[name]):
            others = {key: each for key, each in held.items() if key != name}
            save_file(others if tensor is None else others | {name: tensor.copy()}, file)
            is_place = name.endswith(("weight_shape", "g_idx")) and what[:2] != "as"
            if what not in DECIDES or is_place:
                yield f"{name.removeprefix(DAMAGED + '.')} {what}", expected


def outcome(folder: Path, expected: dict[str, np.ndarray], what: str) -> str | None:
    """Reads a damaged folder: how it was refused; None where it was read as what it stands for.

    Raises:
      AssertionError: its numbers are others, or somebody else's sentence refused it.
    """
    try:
        model = load_model(folder)
    except CheckpointError as error:
        said = str(error).replace(str(folder), "")
        if FOREIGN.search(said):
            raise AssertionError(f"{what}: {said}") from error
        return said
    for name, wanted in expected.items():
        _, _, number, _, kind, _ = name.split(".")
        found = getattr(model.layers[int(number)], LEAVES[kind])
        assert isinstance(found, PackedWeight), f"{what}: {name} is not packed"
        np.testing.assert_array_equal(np.asarray(dequantized(found)), wanted, f"{what}: {name}")
    return None


@jax.jit
def dequantized(weight: PackedWeight) -> Any:
    """The matrix that a packed one stands for, inputs as they come."""
    whole = weight.unpacked()
    if weight.order is None:
        return whole
    return jnp.zeros_like(whole).at[:, weight.order].set(whole)
