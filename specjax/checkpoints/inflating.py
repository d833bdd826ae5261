"""Writes a folder's model grown to a size that nobody trained, a layer at a time."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.files import Files, config_of
from specjax.checkpoints.load import load_model
from specjax.checkpoints.writing import new_model
from specjax.models import families
from specjax.models.config import Experts, ModelConfig
from specjax.models.families.mixtures import MIXTRAL
from specjax.models.inflate import check_inflates, grown

_WIDTH_OF_LAYERS = 128
"""Features a layer at most: models that people train have 60 to 130."""

_QUIET, _WRITING = ("value", "up"), ("output", "down")
"""Matrices that give 0 at features that the small model has not, and those that write the stream
from them."""


class Inflated(NamedTuple):
    """What was written: parameters, layers, and bytes of weights."""

    parameters: int
    layers: int
    size: int


def inflate_folder(
    files: Files,
    out: Path,
    parameters: int,
    seed: int = 0,
    progress: Callable[[int, int], object] = lambda count, of: None,
    experts: tuple[int, int] | None = None,
) -> Inflated:
    """Writes a model of about `parameters` weights that has the logits of another, up to rounding.

    It is as `inflate` makes one, but as deep as models of its width are, and what the function does
    not depend on is noise, so that files of it are no easier to read or to quantize than others.
    Weights are bfloat16; the small model and one layer of the large one are in memory, and a file.

    With `experts` it is a Mixtral, whose layers have so many, of which a token takes so many. Each
    has the small model's features, so that it does not matter which are taken; a router of noise
    chooses by what the small model's layers read, and neighbours choose alike, as in real ones.

    Args:
      files: the small model.
      out: a folder that holds no model yet.
      parameters: how many weights, about.
      seed: of the noise.
      progress: is called with how many tensors of how many are done.
      experts: of a layer, and of a token; None for a model without any.

    Raises:
      CheckpointError: the model is missing or damaged, or `out` holds one.
      ValueError: it has more weights, is not of LLaMA's form, or quantized, or a token cannot take
        so many experts.
    """
    model = load_model(files, dtype="float32")
    check_inflates(model, parameters)
    config = model.config
    if experts is not None:
        own = Experts(*experts, config.intermediate_size)
        config = dataclasses.replace(config, family=MIXTRAL.model_type, experts=own)
        if config.num_parameters > parameters:
            raise ValueError(
                f"with {experts[0]} experts the model has {config.num_parameters} weights; it "
                f"cannot be inflated to {parameters}."
            )
    config = shape_of(config, parameters)
    if config.experts is not None:
        config = dataclasses.replace(config, intermediate_size=config.experts.intermediate_size)
    whole = (
        config_of(files.path)
        | families.write_config(config)
        | {
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
        }
    )
    every = list(families.stored(families.FAMILIES[config.family], config))
    noise, small = np.random.default_rng(seed), model.config.num_layers
    with new_model(files.path, out, whole) as shards:
        for number, stored in enumerate(every):
            inside, idle = stored.layer is not None, (stored.layer or 0) >= small
            source = model.layers[(stored.layer or 0) % small] if inside else model
            shapes = config.layer_shapes(stored.layer or 0) if inside else config.outer_shapes
            leaves = []
            for name in stored.leaves:
                own = name.removeprefix("expert_")
                shape = shapes[name] if own == name else shapes[name][1:]
                small_leaf = None if name == "router" else np.asarray(getattr(source, own))
                leaves.append(_grown(own, small_leaf, shape, idle, noise))
            shards.add(stored.name, dataclasses.replace(stored, expert=None).join(leaves))
            progress(number + 1, len(every))
    return Inflated(config.num_parameters, config.num_layers, shards.size)


def shape_of(config: ModelConfig, parameters: int) -> ModelConfig:
    """The widest model of about so many weights that is as deep as others of its width."""
    factor, found = 1, grown(config, 1, parameters)
    while True:
        wider = grown(config, factor + 1, parameters)
        if wider.num_layers * _WIDTH_OF_LAYERS < wider.hidden_size:
            return found
        if wider.num_layers == config.num_layers and wider.num_parameters > parameters:
            return found
        factor, found = factor + 1, wider


def _grown(
    name: str,
    small: np.ndarray | None,
    shape: tuple[int, ...],
    idle: bool,
    noise: np.random.Generator,
) -> np.ndarray:
    """A leaf of the large model; that of an idle layer adds nothing to the residual stream.

    The stream holds copies of the small one side by side, of which norms let the first pass. Where
    norms or quiet matrices give 0, what reads it may hold anything.
    """
    if small is None:  # a router
        return (noise.standard_normal(shape, np.float32) * shape[1] ** -0.5).astype(jnp.bfloat16)
    if len(shape) == 1:  # a norm
        made = np.zeros(shape, np.float32)
        made[: small.shape[0]] = small
        return made.astype(jnp.bfloat16)
    rows, columns = small.shape
    if name == "embedding":
        return np.tile(small, (1, shape[1] // columns)).astype(jnp.bfloat16)
    made = noise.standard_normal(shape, np.float32) * small.std()
    if name in _QUIET:
        made[:, :columns] = 0
    if name in _WRITING:
        small = np.tile(small, (shape[0] // rows, 1))
    if not (idle and name in (*_QUIET, *_WRITING)):
        made[: small.shape[0], :columns] = small
    return made.astype(jnp.bfloat16)
