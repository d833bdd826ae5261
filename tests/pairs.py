"""A tiny target whose texts vary, drafts of every quality, and a shorter way to generate."""

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.base.pytree import replace
from specjax.draft import ExpansionDrafter, Seen, Wants
from specjax.models import transformer
from specjax.models.config import MATRICES
from specjax.models.quantized import packed, with_activations
from specjax.models.transformer import Model
from tests.conftest import tiny_model

KEY = jax.random.key(5)
forward = jax.jit(transformer.forward)
"""A pass as one program; operation by operation it is 200, each compiled for every new shape."""
PROMPTS = [[5, 9, 2], list(range(3, 15)), [63], [7] * 20]
NEW = 21
END = 54


def varied_model(seed: int = 0, **changes) -> Model:
    """A tiny random model whose texts vary and whose distributions are neither flat nor sure."""
    own = {"tie_embeddings": False, "num_layers": 1, "eos_ids": (END,)}
    return tiny_model(seed, scale=12.0, **(own | changes))


def near(target: Model, seed: int, noise: float = 0.15) -> Model:
    """A model that often agrees with `target`: its weights, each with noise of its own scale."""
    drawn = np.random.default_rng(seed)

    def changed(leaf: jax.Array) -> jax.Array:  # NumPy compiles nothing for each new shape
        own = np.asarray(leaf)
        return jnp.asarray(own + noise * own.std() * drawn.standard_normal(own.shape, own.dtype))

    return jax.tree.map(changed, target)


def broken(target: Model, value: float) -> Model:
    """A model whose logits are all of `value`'s making."""
    return replace(target, final_norm=jnp.full_like(target.final_norm, value))


def with_activations_of(model: Model, activations: str, bits: int = 8) -> Model:
    """A model whose layers' matrices are packed, and what they multiply."""

    def changed(layer):
        matrices = {name: getattr(layer, name) for name in MATRICES}
        held = {name: each for name, each in matrices.items() if each is not None}
        made = {name: packed(np.asarray(each), bits) for name, each in held.items()}
        return replace(layer, **jax.tree.map(jnp.asarray, made))

    made = replace(model, layers=tuple(map(changed, model.layers)))
    return with_activations(made, activations)


def alone(model: Model, widths=(2, 1), **options) -> ExpansionDrafter:
    return ExpansionDrafter.of([model], widths, **options)


def nothing_seen(shape) -> Seen:
    """What a drafter that asks to see nothing of the target is shown."""
    return Wants().zeros(shape, 1)


def generate(target, drafter, prompts=PROMPTS, key=KEY, **options):
    options = {"max_new_tokens": NEW, "stop_at_eos": False} | options
    return specjax.generate(key, target, drafter, prompts, **options)
