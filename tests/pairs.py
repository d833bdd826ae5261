"""A tiny target whose texts vary, drafts of every quality, and a shorter way to generate."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import specjax
from specjax.base.pytree import replace
from specjax.decoding.stepping import by_token
from specjax.draft import ExpansionDrafter, Seen, Wants
from specjax.draft.levels import logits_by_level
from specjax.models import transformer
from specjax.models.config import CONTEXT, INPUT, MATRICES, Features
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


def head(
    target: Model,
    seed: int,
    known: int | None = None,
    steps: int = 200,
    layers: tuple[int, ...] = (),
) -> Model:
    """An EAGLE-3 head fitted to a target; perhaps of few tokens."""
    layers = layers or (0, target.config.num_layers)
    read = Features(layers, target.config.hidden_size, shares_embedding=False)
    own = varied_like(target, seed, features=read, draft_vocab_size=known)
    return _fitted(target, own, seed, steps)


def mtp_layer(target: Model, seed: int, steps: int = 200) -> Model:
    """A layer of multi-token prediction fitted to a target, with tables of its own."""
    size, last = target.config.hidden_size, target.config.num_layers
    read = Features(
        (last,), size, norms="whole", normed_output=True, shares_embedding=False, way=INPUT
    )
    return _fitted(target, varied_like(target, seed, features=read), seed, steps)


def block_draft(target: Model, seed: int, steps: int = 600, size: int = 4) -> Model:
    """A draft that predicts blocks, fitted to a target, with tables of its own."""
    read = Features(
        (0, target.config.num_layers), target.config.hidden_size, shares_embedding=False,
        way=CONTEXT, block_size=size, mask_token=0,
    )  # fmt: skip
    return _fitted(target, varied_like(target, seed, features=read), seed, steps, size - 1)


def varied_like(target: Model, seed: int, **changes) -> Model:
    """A random draft for a target."""
    size, vocabulary = target.config.hidden_size, target.config.vocab_size
    own = {"hidden_size": size, "vocab_size": vocabulary, "eos_ids": ()}
    return varied_model(seed, **(own | changes))


def _fitted(target: Model, own: Model, seed: int, steps: int, levels: int = 1) -> Model:
    """A draft that reads hidden states, fitted to what a target says along random texts."""
    optimizer, read = optax.adam(0.01), own.config.features
    assert read is not None

    def of_tokens(model: Model, tokens: jax.Array) -> jax.Array:
        at = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        made = transformer.trunk(target, tokens, at, None, None, hidden_layers=read.layers)
        p = jax.nn.softmax(transformer.unembed(target, made.x).T).reshape(*tokens.shape, -1)
        total = jnp.zeros(())
        hidden = by_token(made.hidden, tokens.shape)
        for level, logits in enumerate(logits_by_level(model, tokens, hidden, levels)):
            log_q = jnp.maximum(jax.nn.log_softmax(logits.T), -30.0).reshape(p.shape)
            total -= (p * log_q)[:, level + 1 :].sum(axis=-1).mean()
        return total

    rows = own.row_of
    floats = replace(own, row_of=None)

    @jax.jit
    def step(floats, state, key):
        tokens = jax.random.randint(key, (32, 8), 0, target.config.vocab_size)
        grads = jax.grad(lambda held: of_tokens(replace(held, row_of=rows), tokens))(floats)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(floats, updates), state

    state = optimizer.init(floats)
    for key in jax.random.split(jax.random.key(seed), steps):
        floats, state = step(floats, state, key)
    return replace(floats, row_of=rows)


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
