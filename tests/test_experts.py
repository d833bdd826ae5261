"""Experts: their products in every form, and routers against their definition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.cpu import cpu_experts, cpu_matmul
from pallas_kernels.grouped_matmul import grouped_matmul
from specjax.base.pytree import unchecked
from specjax.models import expert_products
from specjax.models.config import Experts
from specjax.models.expert_products import OfLayer, expert_linears
from specjax.models.experts import route
from specjax.models.layer_weights import LayerWeights
from specjax.models.quantized import packed, with_activations
from tests.test_cpu_matmul import KINDS, form, needs_it, operands

__all__ = ["form"]
CHOSEN = np.asarray([[4, 0, 2, 2, 9, 4], [1, 3, 0, 4, 2, -1]], np.int32)
"""The experts of six columns, two each: of more than four, and two that are none."""


def experts_of(kind, count, outputs, inputs, columns):
    """Matrices of experts, and columns."""
    own = [operands(kind, outputs, inputs, columns, seed=3 * n) for n in range(count)]
    weights, _, scale, offset = (
        None if each[0] is None else jnp.stack(each) for each in list(zip(*own, strict=True))[:4]
    )
    return weights, own[0][1], scale, offset, own[0][4]


@needs_it
@pytest.mark.parametrize("kind", KINDS)
def test_a_column_is_multiplied_with_its_experts(form, kind):
    """To the bit what the matrix of each gives by itself, with columns for all or for each."""
    inputs = 2 * (KINDS[kind][2] or 33)
    weights, x, scale, offset, rounded = experts_of(kind, 6, 37, inputs, CHOSEN.shape[1])
    several = [None if part is None else (part, part[:, ::-1]) for part in (weights, scale, offset)]
    chosen = jnp.asarray(CHOSEN)
    found = cpu_experts(several[0], x, chosen, *several[1:], rounded=rounded)
    apart = cpu_experts(
        several[0], jnp.concatenate([x, x], axis=1), chosen, *several[1:], rounded=rounded
    )
    for number, each in enumerate(found):
        np.testing.assert_array_equal(np.asarray(each), np.asarray(apart[number]))
    for slot, column in np.ndindex(CHOSEN.shape):
        expert = CHOSEN[slot, column]
        own = np.asarray(found[0][:, slot, column])
        if not 0 <= expert < len(weights):
            assert not own.any()
            continue
        parts = [None if part is None else part[expert] for part in (scale, offset)]
        wanted = cpu_matmul(weights[expert], x[:, column : column + 1], *parts, rounded=rounded)
        np.testing.assert_array_equal(own, np.asarray(wanted)[:, 0])
        np.testing.assert_array_equal(np.asarray(found[1][::-1, slot, column]), own)


@needs_it
def test_more_columns_than_a_product_takes_give_the_same(form):
    """An expert that many columns chose, in blocks; on two threads."""
    drawn = np.random.default_rng(0)
    weights = jnp.asarray(drawn.normal(size=(3, 300, 512)), jnp.bfloat16)
    x = jnp.asarray(drawn.normal(size=(512, 150)), jnp.float32)
    chosen = jnp.asarray(drawn.integers(0, 2, (2, 150)), jnp.int32)
    whole = np.asarray(cpu_experts([weights], x, chosen, rounded=True)[0])
    for column in (0, 77, 149):
        own = cpu_experts(
            [weights], x[:, column : column + 1], chosen[:, column : column + 1], rounded=True
        )
        np.testing.assert_array_equal(whole[:, :, column : column + 1], np.asarray(own[0]))


@needs_it
def test_what_does_not_fit_is_refused():
    weights, x, *_ = experts_of("float32", 2, 8, 6, 3)
    chosen = jnp.zeros((2, 3), jnp.int32)
    with pytest.raises(ValueError, match="cpu_matmul rounds no weights of float32"):
        cpu_experts([weights], x, chosen, rounded=True)
    with pytest.raises(ValueError, match="matrices of one dtype"):
        cpu_experts([weights, weights[:1]], x, chosen)
    with pytest.raises(Exception, match="columns have as many experts each"):
        jax.block_until_ready(cpu_experts([weights], x[:, :2], jnp.zeros((1, 3), jnp.int32)))


def dense(weights, x, chosen):
    """Products by the matrices of all experts, of which the chosen ones are taken."""
    chosen = np.asarray(chosen)
    every = np.einsum("xoi,in->xon", np.asarray(weights, np.float64), np.asarray(x, np.float64))
    columns = chosen.shape[1]
    made = np.zeros((weights.shape[1], *chosen.shape))
    for slot, column in np.ndindex(chosen.shape):
        if 0 <= chosen[slot, column] < len(weights):
            at = column if x.shape[1] == columns else slot * columns + column
            made[:, slot, column] = every[chosen[slot, column], :, at]
    return made


def squares(weights, x, chosen):
    return (expert_linears([weights], x, chosen)[0] ** 2).sum()


@pytest.mark.parametrize("product", ["auto", "xla"])
def test_products_of_experts_and_their_gradients(product):
    drawn = np.random.default_rng(1)
    weights = jnp.asarray(drawn.normal(size=(5, 7, 12)), jnp.float32)
    x = jnp.asarray(drawn.normal(size=(12, 6)), jnp.float32)
    chosen = jnp.asarray(CHOSEN)
    try:
        pallas_kernels.use(product)
        (found,) = expert_linears([weights], x, chosen)
        together = jax.vmap(lambda x: expert_linears([weights], x, chosen)[0])(jnp.stack([x, -x]))
        of_weights, of_x = jax.grad(squares, (0, 1))(weights, x, chosen)
    finally:
        pallas_kernels.use("auto")
    expected = dense(weights, x, CHOSEN)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(together[1]), -expected, rtol=1e-5, atol=1e-5)
    wanted, wanted_x = np.zeros((5, 7, 12)), np.zeros((12, 6))
    for slot, column in np.ndindex(CHOSEN.shape):
        expert = CHOSEN[slot, column]
        if 0 <= expert < 5:
            grad = 2 * expected[:, slot, column]
            wanted[expert] += np.outer(grad, np.asarray(x[:, column]))
            wanted_x[:, column] += np.asarray(weights[expert]).T @ grad
    np.testing.assert_allclose(np.asarray(of_weights), wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.asarray(of_x), wanted_x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("columns", ["for all", "for each", "one"])
def test_every_form_without_our_kernels_is_the_product(platform, columns, monkeypatch):
    """Those of other platforms run here too, as XLA has them."""
    drawn = np.random.default_rng(4)
    chosen = jnp.asarray(CHOSEN[:, :1] if columns == "one" else CHOSEN)
    weights = tuple(jnp.asarray(drawn.normal(size=(5, 7, 12)), jnp.float32) for _ in range(2))
    count = chosen.size if columns == "for each" else chosen.shape[1]
    x = jnp.asarray(drawn.normal(size=(12, count)), jnp.float32)
    monkeypatch.setattr(expert_products, "platform", lambda: platform)
    monkeypatch.setattr(expert_products, "unable", lambda *_: "the library is left out")

    @jax.jit
    def product(x):
        found = expert_linears(weights, x, chosen)
        return sum(each.sum() for each in found), found

    (_, made), of_x = jax.value_and_grad(product, has_aux=True)(x)
    for found, weight in zip(made, weights, strict=True):
        np.testing.assert_allclose(found, dense(weight, x, chosen), rtol=1e-5, atol=1e-5)
    wanted = np.zeros((12, chosen.size))
    for number, expert in enumerate(np.asarray(chosen).reshape(-1)):
        if 0 <= expert < 5:
            wanted[:, number] = sum(np.asarray(weight)[expert].sum(axis=0) for weight in weights)
    wanted = wanted.reshape(12, -1, count).sum(axis=1)
    np.testing.assert_allclose(np.asarray(of_x), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("columns", [1, 6])
@pytest.mark.parametrize("implementation", [None, "triton", "tpu"])
def test_experts_of_a_layer_in_a_stack_are_those_of_the_layer(implementation, columns, monkeypatch):
    """A kernel reads them in the stack of all layers, which it is told the place in."""
    drawn = np.random.default_rng(5)
    stacks = tuple(jnp.asarray(drawn.normal(size=(3, 5, 7, 12)), jnp.float32) for _ in range(2))
    x = jnp.asarray(drawn.normal(size=(12, columns)), jnp.float32)
    chosen = jnp.asarray(CHOSEN[:, :columns])

    def kernel(*operands, layer, implementation=implementation):
        interpret = implementation in ("triton", "tpu")
        return grouped_matmul(
            *operands, layer=layer, implementation=implementation, interpret=interpret
        )

    @jax.jit
    def of(stacks, x, layer):
        found = expert_linears([OfLayer(stack, layer) for stack in stacks], x, chosen)
        return sum(each.sum() for each in found), found

    monkeypatch.setattr(expert_products, "platform", lambda: "gpu")
    monkeypatch.setattr(expert_products, "grouped_matmul", kernel)
    gradients = jax.value_and_grad(of, (0, 1), has_aux=True)
    (_, found), (of_stacks, of_x) = gradients(stacks, x, jnp.int32(1))
    for stack, each in zip(stacks, found, strict=True):
        np.testing.assert_allclose(each, dense(stack[1], x, chosen), rtol=1e-5, atol=1e-5)
    wanted, wanted_x = np.zeros((3, 5, 7, 12)), np.zeros((12, columns))
    for slot, column in np.ndindex(chosen.shape):
        if 0 <= (expert := CHOSEN[slot, column]) < 5:
            wanted[1, expert] += np.asarray(x)[:, column]
            wanted_x[:, column] += sum(np.asarray(stack)[1, expert].sum(axis=0) for stack in stacks)
    np.testing.assert_allclose(np.asarray(of_x), wanted_x, rtol=1e-4, atol=1e-4)
    for each in of_stacks:
        np.testing.assert_allclose(np.asarray(each), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("product", ["auto", "xla"])
@pytest.mark.parametrize("activations", ["float", "bfloat16", "int8"])
def test_packed_experts_are_multiplied_as_packed_matrices_are(activations, product):
    drawn = np.random.default_rng(2)
    matrix = drawn.normal(size=(5, 16, 64))
    weight = with_activations(jax.tree.map(jnp.asarray, packed(matrix, 4, 32)), activations)
    for expert in range(5):
        own = packed(matrix[expert], 4, 32)
        np.testing.assert_array_equal(np.asarray(weight.values[expert]), own.values)
    x = jnp.asarray(drawn.normal(size=(64, 6)), jnp.float32)
    try:
        pallas_kernels.use(product)
        (found,) = expert_linears([weight], x, jnp.asarray(CHOSEN), jnp.dtype("float32"))
        few = jnp.asarray(CHOSEN[:, 1:2])
        (one,) = expert_linears([weight], x[:, 1:2], few, jnp.dtype("float32"))
    finally:
        pallas_kernels.use("auto")
    numbers = jax.vmap(lambda own: own.unpacked())(weight)
    expected = dense(numbers, x, CHOSEN)
    rough = {"float": 1e-4, "bfloat16": 0.2, "int8": 0.3}[activations]
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=rough)
    np.testing.assert_allclose(np.asarray(one), expected[:, :, 1:2], rtol=0, atol=rough)


def routed(experts, logits, bias=None):
    """What a router gives whose columns have such logits `[X, C]`."""
    leaves = dict.fromkeys(field.name for field in dataclasses.fields(LayerWeights))
    leaves["router"] = jnp.asarray(logits, jnp.float32)
    if bias is not None:
        leaves["correction_bias"] = jnp.asarray(bias, jnp.float32)
    found = route(experts, unchecked(LayerWeights, **leaves), jnp.eye(logits.shape[1]))
    return np.asarray(found.chosen), np.asarray(found.shares, np.float64)


def softmax(x):
    made = np.exp(x - x.max(axis=0))
    return made / made.sum(axis=0)


def test_of_equal_experts_the_first_ones_are_taken():
    logits = np.asarray([[1.0, 0.0], [2.0, 0.0], [1.0, 0.0], [0.5, 0.0]])
    chosen, shares = routed(Experts(4, 2, 1), logits)
    assert chosen.tolist() == [[1, 0], [0, 1]]
    np.testing.assert_allclose(shares[:, 1], [0.5, 0.5], rtol=1e-6)


@pytest.mark.parametrize("normalized", [True, False])
def test_softmax_shares(normalized):
    logits = np.random.default_rng(0).normal(size=(7, 5)) * 3
    chosen, shares = routed(Experts(7, 3, 1, norm_topk=normalized, routed_scale=2.5), logits)
    p = softmax(logits)
    for column in range(5):
        best = np.argsort(-p[:, column], kind="stable")[:3]
        assert chosen[:, column].tolist() == best.tolist()
        wanted = p[best, column] / (p[best, column].sum() if normalized else 1)
        np.testing.assert_allclose(shares[:, column], 2.5 * wanted, rtol=1e-5)


def test_groups_and_a_bias_decide_who_is_taken_and_not_how_much():
    """As DeepSeek-V3 has it: the bias is added to what the choice goes by alone."""
    drawn = np.random.default_rng(3)
    logits, bias = drawn.normal(size=(12, 9)), drawn.normal(size=12)
    own = Experts(12, 3, 1, scores="sigmoid", correction_bias=True, num_groups=4, topk_groups=2,
                  group_best=2, routed_scale=1.5)  # fmt: skip
    chosen, shares = routed(own, logits, bias)
    scores = 1 / (1 + np.exp(-logits))
    for column in range(9):
        choice = scores[:, column] + bias
        best_two = np.sort(choice.reshape(4, 3), axis=1)[:, 1:].sum(axis=1)
        kept = np.argsort(-best_two)[:2]
        allowed = [n for n in range(12) if n // 3 in kept]
        best = sorted(allowed, key=lambda n: -choice[n])[:3]
        assert chosen[:, column].tolist() == best
        wanted = scores[best, column] / scores[best, column].sum()
        np.testing.assert_allclose(shares[:, column], 1.5 * wanted, rtol=1e-5)


def test_a_bias_decides_who_is_taken_by_softmax_too():
    """As ERNIE has it: the bias is added to probabilities, not to logits."""
    drawn = np.random.default_rng(4)
    logits, bias = drawn.normal(size=(6, 40)) * 2, drawn.normal(size=6) * 0.3
    chosen, shares = routed(Experts(6, 2, 1, correction_bias=True), logits, bias)
    p = softmax(logits)
    by_probability = np.argsort(-(p + bias[:, None]), axis=0)[:2]
    np.testing.assert_array_equal(chosen, by_probability)
    assert (by_probability != np.argsort(-(logits + bias[:, None]), axis=0)[:2]).any()
    taken = np.take_along_axis(p, chosen, axis=0)
    np.testing.assert_allclose(shares, taken / taken.sum(axis=0), rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"experts_per_token": 5}, "experts_per_token is 5; it must be an integer from 1 to 4"),
        ({"num_experts": 0}, "num_experts is 0; it must be an integer from 1 to 4096"),
        ({"num_groups": 3}, "3 groups do not divide 4 experts"),
        ({"num_groups": 4}, "a token takes 2 experts; 1 groups of 1 have fewer"),
        ({"scores": "tanh"}, "there are no scores 'tanh'"),
        ({"shared_size": -1}, "the shared expert has -1 features"),
    ],
)
def test_experts_that_cannot_be_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        Experts(**({"num_experts": 4, "experts_per_token": 2, "intermediate_size": 8} | changes))
