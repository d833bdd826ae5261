"""A drafter is shown the hidden states that it asks for, wherever the target's pass is made.

`HiddenDrafter` drafts the target's own greedy tokens while all that it was shown is right, so that
the number of steps says whether it was.
"""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.base.pytree import pytree
from specjax.checkpoints.pair import Pair
from specjax.decoding import conversation as conversations
from specjax.decoding import request
from specjax.decoding.conversation import Conversation
from specjax.decoding.generate import stream
from specjax.decoding.request import prepare
from specjax.draft import Wants
from specjax.engine import engine as engines
from specjax.engine.request import Request
from specjax.measure import certificate
from specjax.measure.prompts import Prompt
from specjax.measure.timing import phases
from specjax.methods.method import METHODS, Method, Setting
from specjax.methods.registry import setting_of
from specjax.models import transformer
from specjax.models.stacking import stacked
from specjax.models.streamed import by_layers
from specjax.models.transformer import embed, layer_of_pass, trunk
from tests.cases import slow_but
from tests.conftest import tiny_model
from tests.engines import ids_of, running, served
from tests.hidden import DEPTH, HiddenDrafter
from tests.pairs import KEY, NEW, PROMPTS, generate, varied_model

STEPS = -(-NEW // (DEPTH + 1))
TARGETS = {
    "in memory": lambda model: model,
    "stacked": stacked,
    "streamed": by_layers,
}


@pytest.fixture(scope="module")
def model():
    return varied_model(num_layers=3)


@pytest.mark.parametrize("kind", slow_but(TARGETS, "in memory"))
def test_every_pass_shows_what_was_asked_for(kind, model):
    """States of three layers: of prompts of unequal lengths, and of every step's nodes."""
    target = TARGETS[kind](model)
    made = generate(target, HiddenDrafter(model))
    np.testing.assert_array_equal(made.tokens, generate(model, None).tokens)
    assert made.steps.tolist() == [STEPS] * len(PROMPTS)
    given = list(stream(KEY, target, HiddenDrafter(model), PROMPTS, max_new_tokens=NEW))
    assert len(given) == STEPS
    assert given[0].seen.hidden_states.shape[-1] == 0  # they stay on the device


@pytest.mark.parametrize("kind", slow_but(TARGETS, "stacked"))
def test_any_layers_in_any_order(kind, model):
    made = generate(TARGETS[kind](model), HiddenDrafter(model, (3, 0, 3)))
    assert made.steps.tolist() == [STEPS] * len(PROMPTS)


@pytest.mark.parametrize("stack", [False, True])
def test_they_are_what_leaves_each_layer(stack):
    """The embeddings as they enter the first; the last ones before the last norm."""
    model = varied_model(num_layers=3, embedding_scale=2.0)
    tokens = jnp.asarray(PROMPTS[1], jnp.int32)[None]
    at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    states = [embed(model, tokens, at)]
    for index, weights in enumerate(model.layers):
        kind = model.config.kind_of(index)
        states.append(layer_of_pass(model, weights, kind, states[-1], at, None, None)[0])
    target = stacked(model) if stack else model
    made = trunk(target, tokens, at, None, None, hidden_layers=(0, 1, 2, 3))
    assert [state.dtype for state in made.hidden] == [jnp.float32] * 4
    np.testing.assert_allclose(jnp.stack(made.hidden), jnp.stack(states), rtol=1e-5, atol=1e-5)


def test_other_states_are_noticed(model):
    """So that the number of steps says something: one layer's states are those of another."""

    @pytree
    class Misled(HiddenDrafter):
        @property
        def wants(self) -> Wants:
            return Wants(hidden_layers=(0, 1, 3))

    made = generate(model, Misled(model, (0, 1, 2)))
    np.testing.assert_array_equal(made.tokens, generate(model, None).tokens)
    expected = [NEW if len(prompt) > 1 else NEW - DEPTH for prompt in PROMPTS]
    assert made.steps.tolist() == expected  # before a lone token there is nothing to be wrong


def test_what_there_is_not_is_refused(model):
    layers = model.config.num_layers
    for layer in (-1, layers + 1):
        with pytest.raises(ValueError, match=rf"after {layer} layers .*, which has {layers}\."):
            generate(model, HiddenDrafter(model, (0, layer)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HiddenDrafter, "wants", Wants(top_tokens=65))
        with pytest.raises(ValueError, match=r"65 likeliest tokens of 64\."):
            generate(model, HiddenDrafter(model))


def test_long_prompts_are_read_in_blocks(monkeypatch):
    model = tiny_model(max_positions=512, num_layers=2)
    monkeypatch.setattr(transformer, "_LONG_PROMPT", 32)
    prompts = [np.random.default_rng(n).integers(0, 64, 150 + 40 * n).tolist() for n in range(2)]
    made = generate(model, HiddenDrafter(model), prompts)
    assert made.steps.tolist() == [STEPS] * 2


def test_nodes_that_a_rule_visits_alone(model, monkeypatch):
    """Of a large tree over streamed layers the logits of other nodes are never made."""
    monkeypatch.setattr(request, "VISITED_FROM", 2)
    made = generate(by_layers(model), HiddenDrafter(model))
    assert made.steps.tolist() == [STEPS] * len(PROMPTS)


def test_an_engine_shows_chunks_of_prompts_and_rows_that_were_copied(model, monkeypatch):
    monkeypatch.setattr(engines, "CHUNKS", (8,))
    drawn = np.random.default_rng(0)
    begun = drawn.integers(0, 64, 21).tolist()
    prompts = [begun, *([*begun[:n], *drawn.integers(0, 64, 3).tolist()] for n in (19, 12, 2))]
    asked = [Request(prompt=prompt, max_new_tokens=NEW, ignore_eos=True) for prompt in prompts]
    with running(model, HiddenDrafter(model), rows=2) as engine:
        found = [served(engine, [each])[0] for each in asked] + served(engine, asked)
        assert engine.statistics().cached_tokens > 19 + 12
        assert engine.statistics().steps == STEPS * len(found)
    plain = generate(model, None, prompts).tokens.tolist()
    assert list(map(ids_of, found)) == plain * 2


def test_a_conversation_shows_what_is_read_anew(model, monkeypatch):
    monkeypatch.setattr(conversations, "CHUNK", 8)
    conversation = Conversation(model, HiddenDrafter(model), max_model_len=100)
    first = np.random.default_rng(1).integers(0, 64, 13).tolist()
    for prompt in (first, [*first, 7, 9], [*first[:6], 1, 2, 3]):
        said = list(conversation.reply(KEY, prompt, max_new_tokens=NEW, stop_at_eos=False))
        assert len(said) == STEPS


def test_steps_are_timed(model):
    asked = prepare(KEY, model, HiddenDrafter(model), PROMPTS, max_new_tokens=NEW)
    assert phases(asked, steps=2).target > 0


@pytest.mark.slow
def test_the_certificate_holds(model, monkeypatch):
    """As for any method that is registered."""
    method = Method(
        name="hidden",
        summary="the target's own tokens",
        setting=lambda size: Setting("hidden", widths=(1,) * DEPTH),
        build=lambda setting, pair, verify: HiddenDrafter(model),
        takes_widths=False,
    )
    monkeypatch.setitem(METHODS, "hidden", method)
    pair = Pair(model, lambda text, **_: SimpleNamespace(input_ids=[ord(c) % 64 for c in text]), ())
    chosen = [Prompt(str(number), prompt) for number, prompt in enumerate(PROMPTS)]
    checks = certificate.Checks(max_new_tokens=NEW, samples=512)
    found = certificate.certificate(pair, [setting_of("hidden")], chosen, checks)
    assert found.passed
    assert found.greedy.comparisons[0].tokens_per_step == pytest.approx(DEPTH + 1)
