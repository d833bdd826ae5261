"""On a CPU with products in C++ a tree's nodes have the logits of plain decoding, to the bit.

So its texts are plain decoding's, also where weights or activations are rounded to few bits, which
would make the last bit of a sum a change of hundredths in logits.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import library
from specjax import Sampling
from specjax.decoding.generate import generate
from specjax.models.kv_cache import KVCache, cache_dtype, empty_cache
from specjax.models.quantized import in_dtype
from specjax.models.transformer import Model, forward
from tests.cases import slow_but
from tests.conftest import tiny_model
from tests.pairs import alone, near, with_activations_of
from tests.test_cpu_matmul import here, needs_it

WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
FAMILIES = {
    "llama": {},
    "heads with norms": {"head_norms": "head"},
    "windows": {"windows": (7, None)},
    "layer norms": {"norm": "layer", "activation": "gelu_tanh"},
    "features that fill no vector": {"hidden_size": 40, "intermediate_size": 56},
}
KINDS = ("float32", "bfloat16", "float", "bfloat16 activations", "int8 activations")
PROMPT, TEXT, SLOTS = 11, 24, 64


def model_of(family: str, kind: str) -> Model:
    made = tiny_model(**(WIDE | FAMILIES[family]))
    if kind in ("float32", "bfloat16"):
        return in_dtype(made, jnp.dtype(kind))
    return with_activations_of(made, kind.split()[0])


def passed(model: Model, cache: KVCache, tokens, positions, mask):
    logits, new = _forward(
        model, jnp.asarray([tokens]), jnp.asarray([positions]), cache, jnp.asarray(mask)[None]
    )
    return np.asarray(logits[0]), new


_forward = jax.jit(forward)
_keep = jax.jit(KVCache.keep)


def kept(cache: KVCache, new, path: list[int]) -> KVCache:
    return _keep(cache, new, jnp.asarray([path]), jnp.asarray([len(path)], jnp.int32))


def along(model: Model, begun: KVCache, text: list[int], nodes: int, decoys: int) -> np.ndarray:
    """Logits after each token of a text that is read by trees of which it is a path."""
    cache, found, at = begun, [], 0
    while at < len(text):
        own = text[at : at + nodes]
        tokens, parents, path = [], [], []
        for token in own:
            for _ in range(decoys if path else 0):  # siblings, before the token itself
                tokens.append((7 * len(tokens) + token) % model.config.vocab_size)
                parents.append(path[-1])
            parents.append(path[-1] if path else -1)
            path.append(len(tokens))
            tokens.append(token)
        mask = np.zeros((len(tokens), len(tokens)), bool)
        depth = np.zeros(len(tokens), np.int32)
        for node, parent in enumerate(parents):
            mask[node] = mask[parent] if parent >= 0 else False
            depth[node] = depth[parent] + 1 if parent >= 0 else 0
            mask[node, node] = True
        logits, new = passed(model, cache, tokens, PROMPT + at + depth, mask)
        found += list(logits[path])
        cache = kept(cache, new, path)
        at += len(own)
    return np.stack(found)


CASES = [  # norms and windows are float32 whatever weights are
    *(("llama", kind) for kind in KINDS),
    *(("features that fill no vector", kind) for kind in KINDS[:-1]),  # 32 inputs a scale
    *itertools.product(("heads with norms", "windows", "layer norms"), (KINDS[0], KINDS[-1])),
]
QUICK = [
    *(("llama", kind) for kind in ("float32", "bfloat16 activations", "int8 activations")),
    ("features that fill no vector", "bfloat16"),
    ("windows", "int8 activations"),
]


@needs_it
@pytest.mark.parametrize(
    ("family", "kind"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in CASES],
)
def test_nodes_have_the_logits_of_plain_decoding(family, kind):
    model = model_of(family, kind)
    drawn = np.random.default_rng(0).integers(0, model.config.vocab_size, PROMPT + TEXT).tolist()
    empty = empty_cache(model.config, 1, SLOTS, cache_dtype(model.embedding.dtype))
    mask = np.tri(PROMPT, dtype=bool)
    _, new = passed(model, empty, drawn[:PROMPT], np.arange(PROMPT), mask)
    begun = kept(empty, new, list(range(PROMPT)))
    plain = along(model, begun, drawn[PROMPT:], 1, 0)
    assert len(np.unique(plain.argmax(1))) > 3
    for nodes, decoys in ((2, 0), (3, 1), (8, 0), (8, 2), (TEXT, 0)):  # no part is left over
        np.testing.assert_array_equal(
            along(model, begun, drawn[PROMPT:], nodes, decoys), plain, f"{nodes} nodes"
        )


@needs_it
@pytest.mark.parametrize("form", here())
def test_they_have_them_in_every_form_of_the_products(form):
    """That of this processor and those of older ones."""
    try:
        library.select(form)
        for kind in ("float32", "int8 activations"):
            test_nodes_have_the_logits_of_plain_decoding("windows", kind)
    finally:
        library.select(None)


@needs_it
@pytest.mark.parametrize("kind", slow_but(KINDS, "bfloat16"))
def test_with_one_key_the_naive_rule_draws_the_texts_of_plain_decoding(kind):
    """All of them, with every kind of weights: no token is lost to rounding."""
    model = model_of("llama", kind)
    drafter, prompts = alone(near(tiny_model(**WIDE), 1), (2, 1, 1)), [[1, 2, 3], [9, 8, 7, 6]]
    plain, made = (
        generate(
            jax.random.key(3), model, each, prompts,
            max_new_tokens=40, sampling=Sampling(0.8), verify="naive", stop_at_eos=False,
        )
        for each in (None, drafter)
    )  # fmt: skip
    np.testing.assert_array_equal(made.tokens, plain.tokens)
    assert made.steps.max() < 40
