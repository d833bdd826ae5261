"""Settings over one state: whichever a step takes, texts are distributed as the target's."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.base.pytree import replace
from specjax.base.sampling import Sampling, sampled_probs
from specjax.draft.best_first import BestFirstDrafter
from specjax.draft.drafter import Seen, Step, Wants
from specjax.draft.growth import Growth
from specjax.draft.plain import PlainDrafter
from specjax.draft.reading import ModelState, prefill
from specjax.draft.switching import UNKNOWN, SwitchingDrafter
from specjax.engine import engine as engines
from specjax.engine import scheduler
from specjax.engine.engine import Engine
from specjax.engine.request import Request
from specjax.engine.speculation import Speculation
from specjax.goodput.controller import Controller
from specjax.goodput.policy import Decision, StepShape
from specjax.models.transformer import Model, trunk
from specjax.trees.accepted import Accepted
from specjax.trees.budget import likeliest, log_acceptance
from specjax.trees.tree import NO_PARENT, chosen, root_only
from tests.engines import alone as plain_texts
from tests.engines import ids_of, random_request, running, served
from tests.pairs import alone, block_draft, broken, forward, head, near, nothing_seen, varied_model
from tests.scripted_engine import until
from tests.switched import (
    TurnsPolicy,
    every_kind,
    running_at_random,
    switching_of,
    switching_of_head,
)

VOCABULARY = 64


@pytest.fixture(scope="module")
def target():
    return varied_model()


@pytest.fixture(scope="module")
def engine(target):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "CHUNKS", (16,))
        with running_at_random(target, switching_of(near(target, 1)), 2) as found:
            yield found


def test_texts_are_those_of_plain_decoding_whatever_each_step_drafts_with(engine, target):
    drawn = np.random.default_rng(1)
    requests = [random_request(drawn, VOCABULARY, 40) for _ in range(64)]
    texts = plain_texts(target, requests)
    pairs = (range(at, at + 2) for at in range(32, 48, 2))
    groups = [range(32), *pairs, *([at] for at in range(48, 64))]  # many, then few at once
    for group in groups:
        found = served(engine, [requests[at] for at in group])
        for at, events in zip(group, found, strict=True):
            assert ids_of(events) == texts[at]
    policy = engine.speculation.policy
    assert set(policy.taken) == set(policy.shapes), "every program was run"
    assert engine.statistics().accepted_tokens > 0
    assert 0.3 < np.mean(policy.chances) < 1


@pytest.mark.slow
def test_texts_are_those_of_plain_decoding_whatever_method_each_step_drafts_with(
    target, monkeypatch
):
    monkeypatch.setattr(engines, "CHUNKS", (16,))
    drawn = np.random.default_rng(3)
    requests = [random_request(drawn, VOCABULARY, 40) for _ in range(32)]
    drafter = every_kind(near(target, 1), near(target, 2))
    with running_at_random(target, drafter, 2, 48) as engine:
        found = [ids_of(events) for events in served(engine, requests)]
        policy, report = engine.speculation.policy, engine.report()
        assert set(policy.taken) == set(policy.shapes), "every program was run"
        assert {shape.setting for shape in policy.shapes} == set(drafter.settings)
        assert engine.statistics().accepted_tokens > 0
        assert report["settings"] == list(drafter.settings)
    assert found == plain_texts(target, requests)


@pytest.mark.slow
def test_states_of_their_own_follow_what_other_settings_committed(target):
    """Then they are as if their drafters had read the text."""
    switch = every_kind(near(target, 1), near(target, 2))
    text, start = texts_of(2, 16), jnp.asarray([3, 5], jnp.int32)
    own = jax.vmap(lambda row, at: jax.lax.dynamic_slice(row, (at,), (4,)))(text, start)
    made = jnp.asarray([4, 2], jnp.int32)

    def seen(shape):
        return switch.wants.zeros(shape, 1)

    step = replace(given(own, made, None), seen=seen((2, 1)))
    state = switch.init(text, start, 32, seen((2, 16)))
    keys, sampling = jax.random.split(jax.random.key(0), 2), Sampling().rows(2)
    for name in ("chain:2", "none"):
        used = switch.of_setting(name)
        if used.runs_draft:
            state, _ = used.catch_up(state, sampling, 8)
        _, within = used.propose(keys, start, state, text[:, 0], sampling)
        after = used.commit(within, step)
        for place, (drafter, shares) in enumerate(zip(switch.drafters, switch.share, strict=True)):
            if shares:
                assert after.own[place] == ()
                continue
            whole = drafter.init(text, start + made, 32, drafter.wants.zeros((2, 16), 1))
            models = [
                (found, wanted)
                for found, wanted in zip(held(after.own[place]), held(whole), strict=True)
            ]
            assert len(models) == {"pool:2,1": 2, "staged:6": 2}.get(switch.names[place], 0)
            for found, wanted in models:
                np.testing.assert_array_equal(found.cache.length, wanted.cache.length)
                np.testing.assert_allclose(found.logits, wanted.logits, atol=1e-4)


@pytest.fixture(scope="module")
def of_head() -> tuple[Model, SwitchingDrafter]:
    """A target, and settings of heads that read two and three of its hidden states."""
    target = varied_model(num_layers=3, hidden_size=32)
    return target, switching_of_head(head(target, 1), head(target, 2, layers=(1, 2, 3)))


@pytest.mark.slow
def test_a_draft_that_reads_hidden_states_keeps_up_with_what_other_settings_committed(of_head):
    """Then it is as if it had read the text."""
    target, switch = of_head
    assert switch.wants == Wants(2, (0, 1, 2, 3))
    text, start = texts_of(2, 16), jnp.asarray([3, 5], jnp.int32)
    made = jnp.asarray([4, 2], jnp.int32)
    at = jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32), text.shape)
    layers = switch.wants.hidden_layers
    states = trunk(target, text, at, None, None, hidden_layers=layers).hidden
    hidden = jnp.concatenate(states).T.reshape(2, 16, -1)
    top_tokens = jnp.zeros((2, 16, 2), jnp.int32)

    def cut(whole: jax.Array, first: jax.Array, size: int) -> jax.Array:
        return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, size))(whole, first)

    # a chain below the root of which all is taken, and one token more
    every = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), (2, 4))
    chain = chosen(
        cut(text, start - 1, 4), every - 1, every, every >= 0, 0 * every, jnp.ones((2, 4)),
        VOCABULARY,
    )  # fmt: skip
    seen = Seen(jnp.zeros((2, 4, 2), jnp.int32), cut(hidden, start - 1, 4))
    accepted = Accepted(every, made, text[:, 0])
    step = Step(cut(text, start, 4), made, made > 99, chain, accepted, seen)
    state = switch.init(text, start, 32, Seen(top_tokens, hidden))
    keys, sampling = jax.random.split(jax.random.key(0), 2), Sampling().rows(2)
    whole = prefill(switch.model, text, start + made, 32, hidden, layers)
    root = jnp.take_along_axis(text, start[:, None] - 1, axis=1)[:, 0]
    for name in switch.settings:
        used = switch.of_setting(name)
        assert used.keeps_up
        _, within = used.propose(keys, start, state, root, sampling)
        after = used.commit(within, step) if name != "pool:1,1" else switch.follow(state, step)
        np.testing.assert_array_equal(after.held.cache.length, whole.cache.length)
        np.testing.assert_allclose(after.held.logits, whole.logits, atol=1e-4)
        np.testing.assert_allclose(after.held.features, whole.features, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head", "block"])
def test_texts_are_those_of_plain_decoding_whatever_each_step_drafts_with_a_head(
    kind, of_head, monkeypatch
):
    target, drafter = of_head
    if kind == "block":
        drafter = switching_of_head(*(block_draft(target, seed, size=6) for seed in (1, 2)))
    monkeypatch.setattr(engines, "CHUNKS", (16,))
    drawn = np.random.default_rng(3)
    requests = [random_request(drawn, VOCABULARY, 40) for _ in range(32)]
    with running_at_random(target, drafter, 2, 48) as engine:
        found = [ids_of(events) for events in served(engine, requests)]
        policy = engine.speculation.policy
        assert set(policy.taken) == set(policy.shapes), "every program was run"
        assert engine.statistics().accepted_tokens > 0
        assert not policy.chances, "nothing was read late"
    assert found == plain_texts(target, requests)


def held(state) -> list[ModelState]:
    """The states of draft models within a state."""
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, ModelState))
    return [leaf for leaf in leaves if isinstance(leaf, ModelState)]


@pytest.mark.slow
def test_a_draft_of_no_numbers_changes_no_text(target, monkeypatch):
    monkeypatch.setattr(engines, "CHUNKS", (16,))
    drawn = np.random.default_rng(2)
    requests = [random_request(drawn, VOCABULARY) for _ in range(12)]
    with running_at_random(target, switching_of(broken(target, np.nan)), 2) as engine:
        found = [ids_of(events) for events in served(engine, requests)]
    assert found == plain_texts(target, requests)


def agreement(draft, prompt, text):
    """Of each token of a text whether it is the draft's likeliest one there."""
    tokens = jnp.asarray([[*prompt, *text]], jnp.int32)
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    likely = forward(draft, tokens, positions, None, None)[0][0].argmax(axis=-1)
    return np.asarray(likely[len(prompt) - 1 : -1]) == np.asarray(text)


def test_a_chain_is_as_good_after_steps_that_left_the_draft_behind(engine, target, monkeypatch):
    """It accepts exactly as far as the draft agrees with the text, whatever the steps before."""
    # As many steps of each setting, however long its own take here.
    monkeypatch.setattr(scheduler, "steps_of", lambda seconds, left, most: most)
    policy = TurnsPolicy(engine.speculation, 4, ["chain:3", "none", "none", "lookup:4", "chain:1"])
    engine.speculation.policy = policy
    prompts = np.random.default_rng(4).integers(0, VOCABULARY, (12, 9)).tolist()
    requests = [Request(prompt=each, max_new_tokens=50, ignore_eos=True) for each in prompts]
    texts = [ids_of(events) for events in served(engine, requests)]
    checked = 0
    for prompt, text in zip(prompts, texts, strict=True):
        agrees, at = agreement(near(target, 1), prompt, text), 0
        for setting, tokens, accepted, ended in policy.steps[tuple(prompt)]:
            if setting.startswith("chain") and not ended:
                most = int(setting[-1])
                run = next((n for n in range(most) if not agrees[at + n]), most)
                assert accepted == run
                checked += 1
            at += tokens
    assert checked > 80


def texts_of(rows: int, length: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(5).integers(0, VOCABULARY, (rows, length)), jnp.int32)


def test_at_the_end_of_its_cache_a_draft_reads_what_it_lacks():
    """It begins earlier there, with tokens that it has read; a longer cache gives the same."""
    draft = varied_model()
    switch = switching_of(draft).of_setting("chain:1")
    text, start, slots = texts_of(2, 16), jnp.asarray([9, 12], jnp.int32), 16
    own = jax.vmap(lambda row, at: jax.lax.dynamic_slice(row, (at,), (4,)))(text, start)
    made, found = jnp.asarray([4, 2], jnp.int32), []
    for room in (slots, 2 * slots):
        state = switch.init(text, start, room, switch.wants.zeros((2, 16), 1))
        behind = switch.of_setting("none")
        step = replace(given(own, made, jnp.full((2, 4), 0.5)), seen=switch.wants.zeros((2, 1), 1))
        keys, sampling = jax.random.split(jax.random.key(0), 2), Sampling(1.0).rows(2)
        _, within = behind.propose(keys, start, state, text[:, 0], sampling)
        state, chances = behind.commit(within, step), []
        for _ in range(3):  # before the last time 12 tokens are read
            state, chance = switch.catch_up(state, sampling, 6)
            chances.append(chance)
        np.testing.assert_array_equal(state.held.cache.length, start + made)
        read = [key[..., : slots - 3] for key in state.held.cache.keys]
        known = [own[own >= 0] for own in jnp.concatenate(chances, axis=1)]
        assert [len(own) for own in known] == made.tolist()
        found.append((read, state.held.logits, known))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), *found)


def given(tokens: jax.Array, count: jax.Array, probs: jax.Array | None) -> Step:
    path = jnp.zeros(tokens.shape, jnp.int32)
    accepted = Accepted(path, count, tokens[:, 0])
    tree = root_only(tokens[:, 0], VOCABULARY)
    seen = nothing_seen((tokens.shape[0], 1))
    return Step(tokens, count, count > 99, tree, accepted, seen, probs=probs)


@pytest.fixture(scope="module")
def caught_up(target):
    """Rows of 5 and 9 tokens that the draft has read, of which 4 and 6 came from the target."""
    draft = near(target, 1)
    switch = switching_of(draft)
    text, made = texts_of(2, 16), jnp.asarray([4, 6], jnp.int32)
    start = jnp.asarray([1, 3], jnp.int32)
    own = jax.vmap(lambda row, at: jax.lax.dynamic_slice(row, (at,), (6,)))(text, start)
    p = jnp.linspace(0.05, 0.9, 12).reshape(2, 6)
    none = nothing_seen((2, 16))
    state = switch.init(jnp.where(jnp.arange(16) < start[:, None], text, 0), start, 32, none)
    state = switch.of_setting("none").commit(
        switch.of_setting("none").propose(
            jax.random.split(jax.random.key(0), 2), start, state, text[:, 0], Sampling().rows(2)
        )[1],
        given(own, made, p),
    )
    sampling = Sampling(np.asarray([0.0, 0.9], np.float32)).rows(2)
    chances = []
    for _ in range(3):
        state, own = switch.catch_up(state, sampling, 4)
        chances.append(own)
    return draft, text, start, made, p, sampling, state, jnp.concatenate(chances, axis=1)


def test_a_draft_that_caught_up_is_one_that_read_the_text(caught_up):
    draft, text, start, made, _, _, state, _ = caught_up
    length = start + made
    expected = prefill(draft, text, length, 32, jnp.zeros((*text.shape, 0)), ())
    np.testing.assert_array_equal(state.held.cache.length, length)
    np.testing.assert_allclose(state.held.logits, expected.logits, atol=1e-4)
    for found, wanted in zip(state.held.cache.keys, expected.cache.keys, strict=True):
        for row in range(2):
            seen = slice(0, int(length[row]))
            np.testing.assert_allclose(found[row, ..., seen], wanted[row, ..., seen], atol=1e-5)


def test_how_likely_a_text_would_have_been_accepted_is_q_over_p(caught_up):
    """Of greedy rows whether the draft's likeliest token is the text's; unknown for the prompt."""
    draft, text, start, made, p, sampling, _, chances = caught_up
    positions = jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32), (2, 16))
    logits, _ = forward(draft, text, positions, None, None)
    q = sampled_probs(logits, sampling, jnp.asarray([True, False]))
    for row in range(2):
        for at in range(12):
            number = at - int(start[row])
            if not 0 <= number < int(made[row]):
                assert chances[row, at] == UNKNOWN
                continue
            token = int(text[row, at])
            likely = float(q[row, at - 1, token] / p[row, number])
            expected = float(logits[row, at - 1].argmax() == token) if row == 0 else min(1, likely)
            np.testing.assert_allclose(chances[row, at], expected, rtol=1e-4)


def test_the_mean_of_q_over_p_along_the_targets_text_is_the_rate_of_acceptance():
    """Leviathan et al. (2211.17192), theorem 3.5, enumerated."""
    drawn = np.random.default_rng(6)
    p, q = drawn.dirichlet(np.ones(8)), drawn.dirichlet(np.ones(8))
    assert np.sum(p * np.minimum(1, q / p)) == pytest.approx(np.minimum(p, q).sum())


def test_verifying_only_the_drawn_nodes_that_the_draft_finds_likely_is_lossy():
    """p = (.5, .5), q = (.9, .1), and only a draw of q >= .5 is verified: P(0) = .55.

    That is why trees of drawn nodes are bounded by depth, before the draw, and `within_budget` cuts
    chosen ones only.
    """
    p, q = np.array([0.5, 0.5]), np.array([0.9, 0.1])
    accept = np.minimum(1, p / q)
    residual = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
    emitted = np.zeros(2)
    for token in range(2):
        if q[token] >= 0.5:  # verified
            emitted[token] += q[token] * accept[token]
            emitted += q[token] * (1 - accept[token]) * residual
        else:  # cut: the target's own token
            emitted += q[token] * p
    np.testing.assert_allclose(emitted, [0.55, 0.45])


def trees(drawn, rows: int, slots: int):
    """Trees of random shapes and chances, of which some slots are empty."""
    parents = np.stack(
        [[NO_PARENT, *(drawn.integers(0, node) for node in range(1, slots))] for _ in range(rows)]
    )
    valid = np.ones((rows, slots), bool)
    for row in range(rows):
        for node in range(1, slots):
            valid[row, node] = valid[row, parents[row, node]] and drawn.random() < 0.85
    depth = np.zeros((rows, slots), int)
    for node in range(1, slots):
        depth[:, node] = depth[np.arange(rows), parents[:, node]] + 1
    numbers = [jnp.asarray(x, jnp.int32) for x in (drawn.integers(0, 9, (rows, slots)), parents,
                                                   depth)]  # fmt: skip
    chance = jnp.asarray(drawn.random((rows, slots)), jnp.float32)
    return _chosen(*numbers, jnp.asarray(valid), numbers[2] * 0, chance, 9)


_chosen = jax.jit(chosen, static_argnums=6)
_log_acceptance = jax.jit(log_acceptance)
_likeliest = jax.jit(likeliest, static_argnums=3)


def test_the_likeliest_nodes_of_all_rows_are_kept_and_are_trees():
    drawn = np.random.default_rng(7)
    for _ in range(20):
        rows, slots = int(drawn.integers(1, 5)), int(drawn.integers(2, 12))
        tree = trees(drawn, rows, slots)
        done = drawn.random(rows) < 0.2
        exists = np.asarray(tree.valid) & ~done[:, None]
        width = int(drawn.integers(max((~done).sum(), 1), rows * slots + 1))
        score = _log_acceptance(tree, *(np.full(rows, x, np.float32) for x in (0.3, 0.8)))
        kept = np.asarray(_likeliest(tree, jnp.asarray(exists), score, width).valid)
        assert (kept & exists).sum() == min(width, exists.sum())
        assert not (kept & ~np.asarray(tree.valid)).any()
        for row, node in zip(*np.nonzero(kept & exists), strict=True):
            assert node == 0 or kept[row, tree.parents[row, node]]
        left = np.asarray(score)[exists & ~kept]
        inner = kept & exists & (np.arange(slots) > 0)
        if left.size and inner.any():
            assert left.max() <= np.asarray(score)[inner].min()


def test_a_nodes_score_is_the_product_of_calibrated_chances_along_its_path():
    tree = trees(np.random.default_rng(8), 3, 8)
    intercept, slope = np.array([0.0, 0.5, -1.0]), np.array([1.0, 0.7, 2.0])
    score = log_acceptance(tree, jnp.asarray(intercept, jnp.float32),
                           jnp.asarray(slope, jnp.float32))  # fmt: skip
    for row in range(3):
        for node in np.flatnonzero(tree.valid[row]):
            total, at = 0.0, node
            while at > 0:
                chance = float(tree.chance[row, at])
                logit = np.log(chance / (1 - chance))
                total -= np.log1p(np.exp(-(intercept[row] + slope[row] * logit))) + 1e-3
                at = int(tree.parents[row, at])
            np.testing.assert_allclose(score[row, node], total, rtol=1e-4, atol=1e-4)


def test_what_drafts_with_another_model_has_a_state_of_its_own(target):
    one, other = near(target, 1), near(target, 2)
    plain = PlainDrafter(VOCABULARY)
    found = SwitchingDrafter.of({"none": plain, "chain:2": alone(one, (1, 1)), "a": alone(other)})
    assert (found.model, found.share) == (one, (True, True, False))
    assert not found.of_setting("a").runs_draft


class Counting(PlainDrafter):
    """Plain decoding with a state of its own."""

    def init(self, prompt, length, slots, seen):
        return length

    def commit(self, state, step):
        return state + step.count

    follow = commit

    def propose(self, key, position, state, last, sampling):
        return super().propose(key, position, (), last, sampling)[0], state


def test_a_class_derived_from_one_that_shares_keeps_its_state():
    plain = PlainDrafter(VOCABULARY)
    switch = SwitchingDrafter.of({"none": plain, "counting": Counting(VOCABULARY)})
    assert switch.share == (True, False)
    length = jnp.asarray([4, 3], jnp.int32)
    state = switch.init(texts_of(2, 4), length, 32, nothing_seen((2, 4)))
    keys, last = jax.random.split(jax.random.key(0), 2), texts_of(2, 1)
    for name in ("none", "counting"):  # what another drafted is counted, too
        own = switch.of_setting(name)
        _, within = own.propose(keys, length, state, last[:, 0], Sampling().rows(2))
        state = own.commit(within, given(last, jnp.ones(2, jnp.int32), None))
    np.testing.assert_array_equal(state.own[1], [6, 5])


@pytest.mark.parametrize(("rows", "named"), [(2, None), (8, "specexec:15"), (32, "chain:3, ")])
def test_settings_that_no_step_has_columns_for_are_named(target, caplog, rows, named):
    draft = near(target, 1)
    tree = BestFirstDrafter(draft, jnp.ones(2), Growth(budget=15, beams=2, width=2))
    settings = {"none": PlainDrafter(VOCABULARY), "chain:3": alone(draft, (1, 1, 1))}
    made = Speculation(SwitchingDrafter.of(settings | {"specexec:15": tree}), rows, None, 64)
    for name in ("none", "chain:3", "specexec:15"):  # such a setting reads no prompts in its steps
        shape = made.mixed_shape(Decision(StepShape(name, rows, 1), ()))
        assert (shape is None) == (name in made.settings_without_columns)
    assert bool(made.settings_without_columns) == (named is not None)
    assert (named is None) == (caplog.text == "")
    assert (named or "") in caplog.text


@pytest.mark.parametrize(("rows", "on_a_cpu", "elsewhere"), [(8, 64, 64), (32, None, 256)])
def test_columns_are_bounded_where_each_of_them_costs(
    target, monkeypatch, rows, on_a_cpu, elsewhere
):
    chain = alone(near(target, 1), (1,) * 7)
    drafter = SwitchingDrafter.of({"none": PlainDrafter(VOCABULARY), "chain:7": chain})
    for kind, most, sizes in (
        ("cpu", on_a_cpu, [1, 2, 4, 8, 16, 32]),
        ("gpu", elsewhere, [1, 8, 32]),
    ):
        monkeypatch.setattr(engines, "platform", lambda kind=kind: kind)
        shapes = Engine(target, drafter, rows=rows).speculation.shapes
        of_chain = [each.width for each in shapes if each[:2] == ("chain:7", rows)]
        assert max(of_chain, default=None) == most
        plain = [each.rows for each in shapes if each.setting == "none"]
        assert plain == [size for size in sizes if size <= rows]


class Reading(PlainDrafter):
    """Plain decoding that reads hidden states."""

    @property
    def wants(self) -> Wants:
        return Wants(hidden_layers=(1,))


def test_drafters_that_no_switch_is_made_of_are_refused(target):
    plain = PlainDrafter(VOCABULARY)
    with pytest.raises(ValueError, match="the setting both is a switch between settings itself"):
        SwitchingDrafter.of({"none": plain, "both": switching_of(near(target, 1))})
    reading = SwitchingDrafter.of({"none": plain, "reading": Reading(VOCABULARY)})
    assert reading.wants == Wants(hidden_layers=(1,)), "states of their own may read, too"
    assert not reading.keeps_up


def test_plain_steps_leave_the_draft_where_it_is(target):
    """A step that drafts nothing has no pass of the draft: its cache is given back as it was."""
    switch = switching_of(near(target, 1))
    state = switch.init(texts_of(2, 4), jnp.asarray([4, 4], jnp.int32), 32, nothing_seen((2, 4)))
    none = switch.of_setting("none")
    keys, at = jax.random.split(jax.random.key(0), 2), jnp.asarray([4, 4], jnp.int32)

    def step(state):
        _, within = none.propose(keys, at, state, texts_of(2, 1)[:, 0], Sampling().rows(2))
        return none.commit(within, given(texts_of(2, 1), jnp.ones(2, jnp.int32), None))

    after = step(state)
    assert after.held.cache.keys[0] is state.held.cache.keys[0]
    assert after.held.logits is state.held.logits
    dots = [eqn for eqn in jax.make_jaxpr(step)(state).eqns if "dot" in eqn.primitive.name]
    assert not dots


@pytest.mark.slow
def test_the_engine_chooses_among_the_settings(target, monkeypatch):
    """And its texts are the target's, with a controller in charge and when a setting is fixed."""
    monkeypatch.setattr(engines, "CHUNKS", (16,))
    drawn = np.random.default_rng(9)
    requests = [random_request(drawn, VOCABULARY, 30) for _ in range(16)]
    texts = plain_texts(target, requests)
    with running(target, switching_of(near(target, 1)), rows=2, columns=16) as engine:
        controller = engine.speculation.controller
        assert isinstance(controller, Controller)
        for fixed in (None, "chain:3", "none", None):
            engine.fix(fixed)
            assert [ids_of(events) for events in served(engine, requests)] == texts
            report = engine.report()
            assert report["mode"] == (fixed or "auto")
            assert set(report["predicted"]) <= set(report["settings"])
        with pytest.raises(ValueError, match="no setting 'chain:9'; there are auto, none"):
            engine.fix("chain:9")
        until(lambda: not controller.acceptance._requests)  # what has ended is forgotten


def test_rows_are_replaced_in_a_state_that_settings_share(target):
    state = switching_of(near(target, 1)).init(
        texts_of(2, 4), jnp.asarray([4, 3], jnp.int32), 32, nothing_seen((2, 4))
    )
    assert float(state.probs.max()) == UNKNOWN
    known = replace(state, probs=state.probs + 2)
    cut = switching_of(near(target, 1)).truncate(known, jnp.asarray([2, 3], jnp.int32))
    assert float(cut.probs.max()) == UNKNOWN, "they were another request's"
    np.testing.assert_array_equal(cut.text.length, [2, 3])
    np.testing.assert_array_equal(cut.held.cache.length, [0, 0])


@pytest.mark.slow
def test_chunks_are_measured_at_every_start_and_the_least_time_counts(
    target, tmp_path, monkeypatch
):
    """No steps correct them; a start beside other work would make them slow for ever."""
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))
    monkeypatch.setattr(engines, "CHUNKS", (8, 16))
    chain = alone(target, (1,))
    drafter = SwitchingDrafter.of({"none": PlainDrafter(VOCABULARY), "chain:1": chain})

    def started():
        engine = Engine(target, drafter, rows=2)
        engine.start()
        report = engine.report()
        engine.close()
        return report

    first = started()
    assert [(each["setting"], each["rows"]) for each in first["mixed"]] == [("none", 2)]
    file = tmp_path / "step_costs.json"
    held = json.loads(file.read_text())
    (entry,) = held.values()
    steps = entry["steps"]
    assert [each[0] for each in entry["chunks"]] == [8, 16]
    entry["chunks"] = [[8, 1e-9, 0.0], [16, 50.0, 0.0]]
    file.write_text(json.dumps(held))
    again = {each["tokens"]: each["seconds"] for each in started()["chunks"]}
    assert again[8] == 1e-9
    assert 0 < again[16] < 5.0
    (entry,) = json.loads(file.read_text()).values()
    assert entry["steps"] == steps  # those are corrected as they run
    assert entry["chunks"][1][1] == again[16]
    assert {each["tokens"] for each in first["chunks"]} == {8, 16}
