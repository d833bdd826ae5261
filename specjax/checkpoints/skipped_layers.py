"""A model without some of its layers as the draft for it (SWIFT, arXiv 2410.06916).

Its layers are the model's own, so that it takes no memory but that of its KV cache.
"""

import contextlib
import dataclasses
import importlib.resources
import itertools
import json
import math
import re
import time
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specjax.base.pytree import replace
from specjax.base.store import Store
from specjax.decoding.streamed import hidden_by_layers, logits_by_layers
from specjax.models.config import ModelConfig
from specjax.models.transformer import Model
from specjax.parallel.mesh import mesh_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SKIP = "self:skip"
"""What `--draft` calls such a draft; `self:skip=10-14,17` names the layers that are left out."""
FOUND = Store("skipped.json")
"""Layers that were found for models."""
_RANGE = re.compile("([0-9]{1,6})(?:-([0-9]{1,6}))?")
_SHARES = (1 / 4, 1 / 8, 1 / 3, 1 / 5, 2 / 5, 1 / 2)
"""Of a model's layers that are left out at first, as far as time is left."""
_FEWEST = 3
_TOKENS, _SECONDS, _LONGEST = 512, 6.0, 7
"""Tokens of the bundled prompts along which layers are looked for, the seconds that it may take,
and the longest chain that is thought of."""


def layers_of(text: str, num_layers: int) -> tuple[int, ...]:
    """The layers that a text names, such as "10-14,17".

    Raises:
      ValueError: it names none, or one that there is not, or all.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"{SKIP}={text} names no layers; write numbers and ranges, such as 10-14,17."
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < num_layers:
            raise ValueError(
                f"{SKIP}={text} leaves out layers {first} to {last}; the model has 0 to "
                f"{num_layers - 1}."
            )
        found |= {*range(first, last + 1)}
    if len(found) == num_layers:
        raise ValueError(f"{SKIP}={text} leaves out all {num_layers} layers.")
    return tuple(sorted(found))


def config_without(config: ModelConfig, skipped: tuple[int, ...]) -> ModelConfig:
    """The configuration of a model without some of its layers."""
    kept = [each for each in range(config.num_layers) if each not in skipped]
    windows = tuple(config.windows[each] for each in kept if config.windows)
    experts = config.experts
    if experts is not None:
        dense = tuple(place for place, each in enumerate(kept) if each in experts.dense_layers)
        experts = dataclasses.replace(experts, dense_layers=dense)
    no_rope_layers = tuple(
        place for place, each in enumerate(kept) if each in config.no_rope_layers
    )
    return dataclasses.replace(
        config,
        num_layers=len(kept),
        windows=windows,
        no_rope_layers=no_rope_layers,
        experts=experts,
    )


def without(target: Model, skipped: tuple[int, ...]) -> Model:
    """The model without some of its layers; what is left is shared with it.

    Raises:
      ValueError: its layers are not all in memory on one device.
    """
    if target.is_offloaded or mesh_of(target) is not None:
        where = "on a mesh" if mesh_of(target) is not None else "not all in memory"
        raise ValueError(f"{SKIP} shares the model's layers, and these are {where}.")
    kept = [each for each in range(target.config.num_layers) if each not in skipped]
    config = config_without(target.config, skipped)
    stack = target.stack
    if stack is not None:  # a loop over layers has them side by side
        stack = jax.tree.map(lambda leaf: leaf[np.asarray(kept)], stack)
    layers = tuple(target.layers[each] for each in kept) if target.layers else ()
    return replace(target, layers=layers, stack=stack, config=config)


def found_for(target: Model, tokenizer: "PreTrainedTokenizerFast") -> tuple[int, ...]:
    """The layers that a model drafts best without, along the bundled prompts.

    They are looked for once, and kept by model.

    Raises:
      ValueError: it has none between the first and the last.
    """
    if target.config.num_layers < _FEWEST:
        raise ValueError(
            f"{SKIP} looks for layers between the first and the last; the model has "
            f"{target.config.num_layers} layers."
        )
    name = _name_of(target)
    kept = FOUND.read().get(name)
    if isinstance(kept, list) and all(type(each) is int for each in kept):
        return tuple(kept)
    lines = (importlib.resources.files("specjax") / "prompts.jsonl").read_text("utf-8")
    text = "\n".join(json.loads(line)["prompt"] for line in lines.splitlines())
    tokens = tokenizer(text).input_ids[: min(_TOKENS, target.config.max_positions)]
    best = search(target, tokens, _SECONDS)
    with contextlib.suppress(OSError):  # then it is looked for again
        FOUND.change(lambda values: {**values, name: list(best)})
    return best


def search(target: Model, tokens: list[int], seconds: float) -> tuple[int, ...]:
    """The layers without which a model is the best draft for itself along a text.

    Layers that change the hidden states least (by angle: ShortGPT's block influence, arXiv
    2403.03853) go first, several shares of them; then single layers are added to what is left out,
    or put back, as long as that is better and time is left.
    """
    count = target.config.num_layers
    text = jnp.asarray([tokens], jnp.int32)
    hidden = hidden_by_layers(target, text, tuple(range(count + 1)))[0]
    influence = np.asarray(_influence(jnp.split(hidden, count + 1, axis=1)))
    order = [int(each) for each in np.argsort(influence) if 0 < each < count - 1]
    wanted = _likeliest(target, text)
    known: dict[tuple[int, ...], float] = {}

    def worth(skipped: tuple[int, ...]) -> float:
        if skipped not in known:
            draft = without(target, skipped)
            agreement = float((_likeliest(draft, text) == wanted).mean())
            known[skipped] = speedup(agreement, share_of(target, draft))
        return known[skipped]

    began = time.monotonic()
    best = tuple(sorted(order[: max(1, round(_SHARES[0] * count))]))
    for share in _SHARES[1:]:
        if time.monotonic() > began + seconds:
            return best
        best = max(best, tuple(sorted(order[: max(1, round(share * count))])), key=worth)
    better = True
    while better:
        better = False
        for layer in order:
            if time.monotonic() > began + seconds:
                return best
            changed = tuple(sorted({*best} ^ {layer}))
            if changed and worth(changed) > worth(best):
                best, better = changed, True
    return best


def share_of(target: Model, draft: Model) -> float:
    """What a pass of a draft takes of one of the target: the share of the numbers that it reads."""
    read = (_read(model) for model in (draft, target))
    return next(read) / next(read)


def _read(model: Model) -> int:
    config = model.config
    inside = config.num_active_parameters - sum(map(math.prod, config.outer_shapes.values()))
    return inside + config.vocab_size * config.hidden_size


def speedup(agreement: float, share: float) -> float:
    """How many times as fast as plain decoding chains of the best length are, of a draft that
    agrees so often and takes such a `share` of the model's time.
    """
    lengths = range(1, _LONGEST + 1)
    gains = (sum(agreement**n for n in range(size + 1)) / (1 + size * share) for size in lengths)
    return max(gains)


@jax.jit
def _influence(hidden: list[Float[Array, "T E"]]) -> Float[Array, " L"]:
    def angle(one: Array, other: Array) -> Array:
        norms = jnp.linalg.norm(one, axis=1) * jnp.linalg.norm(other, axis=1)
        return 1 - ((one * other).sum(axis=1) / jnp.maximum(norms, 1e-30)).mean()

    return jnp.stack([angle(*pair) for pair in itertools.pairwise(hidden)])


def _likeliest(model: Model, text: Array) -> np.ndarray:
    every = jnp.arange(text.shape[1], dtype=jnp.int32)[None]
    return np.asarray(logits_by_layers(model, text, every)[0].argmax(axis=-1))


def _name_of(target: Model) -> str:
    """What tells models apart: their configuration and their last norm."""
    norm = np.asarray(target.final_norm, np.float32)
    return f"{target.config.num_parameters} parameters, norm {float(np.abs(norm).sum())!r}"
