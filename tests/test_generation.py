"""What is asked of a generation and what comes back: ends, streams, refusals, programs, keys."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.base.pytree import replace, unchecked
from specjax.base.sampling import Sampling
from specjax.checkpoints.pair import Pair
from specjax.decoding.generate import generate_jit, on_host, steps_on_host, stream
from specjax.decoding.request import NO_END, Limits, Rows, prepare
from specjax.draft import ExpansionDrafter
from specjax.methods import registry
from specjax.models.transformer import Model
from specjax.trees.construction import DISTINCT, TOP_K
from specjax.verify.rules import BLOCK, MULTI_STEP, NAIVE, TRAVERSAL, find_rule
from tests.cases import slow_among, slow_but
from tests.pairs import END, KEY, NEW, PROMPTS, alone, generate, near, varied_model


@pytest.fixture(scope="module")
def target() -> Model:
    return varied_model()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 32])
def test_max_new_tokens_is_exact(count, target):
    drafter = alone(target)
    longest = generate(target, drafter, max_new_tokens=32)
    got = generate(target, drafter, max_new_tokens=count)
    assert got.tokens.shape == (len(PROMPTS), count)
    assert (got.lengths == count).all()
    np.testing.assert_array_equal(got.tokens, longest.tokens[:, :count])


def test_a_text_ends_with_the_end_token_inside_an_accepted_path(target):
    """The target drafts for itself, so that every step commits 3 tokens at once."""
    full = generate(target, alone(target)).tokens
    expected = [int(np.argmax(row == END)) + 1 if END in row else NEW for row in full]
    assert any((length - 1) % 3 == 1 for length in expected if length < NEW), "none inside a path"
    assert NEW in expected
    got = generate(target, alone(target), stop_at_eos=True)
    assert got.lengths.tolist() == expected
    for row, length in enumerate(expected):
        np.testing.assert_array_equal(got.tokens[row, :length], full[row, :length])
        assert not got.tokens[row, length:].any()
    assert got.steps.tolist() == [-(-length // 3) for length in expected]


@pytest.mark.parametrize("drafted", [True, False])
def test_stream_gives_what_generate_gives(drafted, target):
    drafter = alone(near(target, 1)) if drafted else None
    sampling = Sampling(temperature=np.array([0.0, 0.8, 0.8, 0.8]))
    options = {"max_new_tokens": NEW, "sampling": sampling}
    whole = generate(target, drafter, stop_at_eos=True, **options)
    texts, steps = [[] for _ in PROMPTS], np.zeros(len(PROMPTS), int)
    for step in stream(KEY, target, drafter, PROMPTS, **options):
        assert isinstance(step.tokens, np.ndarray)
        steps += step.count > 0
        for row, count in enumerate(step.count):
            texts[row] += step.tokens[row, :count].tolist()
    assert [len(text) for text in texts] == whole.lengths.tolist()
    for text, tokens, length in zip(texts, whole.tokens, whole.lengths, strict=True):
        assert text == tokens[:length].tolist()
    np.testing.assert_array_equal(steps, whole.steps)
    assert len(set(whole.lengths.tolist())) > 1


# Refusals. -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([[1] * 110], {}, "prompt 0 has 110 tokens and 21 are asked for.* exceed the model's 128"),
        ([[1], []], {}, "prompt 1 is empty; it needs at least one token"),
        ([], {}, "there is no prompt"),
        ([[1, 64]], {}, "prompt 0 holds token 64; the vocabulary has 64"),
        ([[1, -3]], {}, "prompt 0 holds token"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ([[1]], {"verify": "fast"}, "no verification rule 'fast'; there are auto, greedy, naive"),
        (
            [[1]],
            {"verify": "greedy", "sampling": Sampling(temperature=0.5)},
            "the greedy rule needs temperature 0; it is 0.5",
        ),
        ([[1]], {"sampling": Sampling(top_p=-1.0)}, "sampling.top_p is -1.0; it must lie in"),
        ([[1]] * 3, {"key": jax.random.split(KEY, 2)}, "key has shape .2,., for 3 prompts"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(prompts, options, words, target):
    for drafter in (alone(target), None):
        with pytest.raises(ValueError, match=words):
            generate(target, drafter, prompts, **options)


def test_multi_step_on_most_likely_children_is_refused_with_the_reason(target):
    """That the pair is wrong is shown by enumeration in `test_lossy`."""
    drafter = alone(target, (2, 1), children=TOP_K)
    with pytest.raises(ValueError, match="not lossless for trees of top-k children: it div"):
        generate(target, drafter, verify="multi-step")
    assert find_rule("auto", drafter.construction) is NAIVE
    assert find_rule("auto", alone(target, (2, 1)).construction) is MULTI_STEP
    distinct = alone(target, (2, 1), children=DISTINCT)
    assert find_rule("auto", distinct.construction) is TRAVERSAL
    assert find_rule("auto", alone(target, (1, 1)).construction) is BLOCK


def test_drafts_of_different_vocabularies_make_no_pool(target):
    with pytest.raises(ValueError, match="different vocabulary sizes: \\[32, 64\\]"):
        ExpansionDrafter.of([target, varied_model(vocab_size=32)], (1,))
    with pytest.raises(ValueError, match="a pool needs at least one draft model"):
        ExpansionDrafter.of([], (1,))


# Programs, transfers, keys. ------------------------------------------------------------------


def requests(count):
    """Requests of mixed lengths and parameters, with the buckets each of them uses."""
    random = np.random.default_rng(0)
    kinds = [(1, 32, 32), (1, 64, 32), (2, 32, 32), (1, 32, 128)]
    for index, (rows, prompt, outputs) in zip(range(count), itertools.cycle(kinds), strict=False):
        lengths = random.integers(1 if prompt == 32 else 33, prompt + 1, rows)
        most = min(outputs, 128 - int(lengths.max()))
        sampling = Sampling(
            temperature=random.choice([0.0, 0.7, 1.3], rows),
            top_k=int(random.integers(0, 9)),
            top_p=float(random.uniform(0.2, 1)),
            min_p=float(random.uniform(0, 0.2)),
        )
        yield (
            (rows, prompt, outputs),
            {
                "prompts": [random.integers(0, 64, n).tolist() for n in lengths],
                "max_new_tokens": int(random.integers(1 if outputs == 32 else 33, most + 1)),
                "sampling": sampling,
                "key": jax.random.key(index),
            },
        )


@pytest.mark.slow
def test_programs_are_as_many_as_buckets(target):
    generate_jit.clear_cache()
    drafters = [alone(near(target, seed), (1,)) for seed in range(2)]
    used = set()
    for index, (buckets, options) in enumerate(requests(100)):
        used.add(buckets)
        generate(target, drafters[index % 2], **options)
    assert generate_jit._cache_size() == len(used) == 4
    for _, options in requests(20):
        generate(near(target, 3), drafters[0], stop_at_eos=True, **options)
    assert generate_jit._cache_size() == len(used)


@pytest.mark.parametrize("method", slow_but(["staged", "hybrid", "recycle"], "recycle"))
def test_trees_of_any_topology_are_one_program(target, method):
    generate_jit.clear_cache()
    asked = [options for buckets, options in requests(24) if buckets == (1, 32, 32)]
    for seed, options in enumerate(asked):
        pair = Pair(target, None, [near(target, seed)], smaller=near(target, seed + 9))
        drafter = registry.build(registry.setting_of(method, budget=5), pair)
        generate(target, drafter, **options)
    assert len(asked) == 6
    assert generate_jit._cache_size() == 1


def test_every_row_has_limits_of_its_own(target):
    """Their tokens are the first ones of a longer batch, up to an end token of the row's own."""
    drafter = alone(near(target, 1))
    whole = prepare(KEY, target, drafter, PROMPTS, max_new_tokens=NEW, stop_at_eos=False)
    expected = on_host(generate_jit(**whole._asdict()), NEW)
    most, ends = np.array([1, 5, NEW, NEW], np.int32), np.full((4, 2), NO_END, np.int32)
    ends[2, 1] = expected.tokens[2, 7]
    limits = Limits(jnp.asarray(most), jnp.asarray(ends))
    request = whole._replace(rows=replace(whole.rows, limits=limits))
    made = on_host(generate_jit(**request._asdict()), NEW)
    first = expected.tokens[2].tolist().index(expected.tokens[2, 7])
    assert made.lengths.tolist() == [1, 5, first + 1, NEW]
    streamed = list(steps_on_host(request))
    for row, count in enumerate(made.lengths):
        tokens = expected.tokens[row, :count].tolist()
        assert made.tokens[row].tolist() == tokens + [0] * (NEW - count)
        assert [t for gave in streamed for t in gave.tokens[row, : gave.count[row]]] == tokens
    assert streamed[-1].done.all()


def test_keys_and_sampling_of_the_caller_stay_theirs(target):
    """A stream gives its state's buffers away, and none that it was given."""
    keys, sampling = jax.random.split(KEY, len(PROMPTS)), Sampling(jnp.full(len(PROMPTS), 0.8))
    found = [
        [step.tokens.tolist() for step in stream(keys, target, None, PROMPTS, max_new_tokens=4,
                                                 sampling=sampling)]
        for _ in range(2)
    ]  # fmt: skip
    assert found[0] == found[1]


def test_nothing_moves_between_host_and_device_inside_a_run(target):
    drafter = alone(near(target, 1))
    sampling = Sampling(temperature=0.8)
    request = prepare(KEY, target, drafter, PROMPTS, max_new_tokens=NEW, sampling=sampling)
    held = {name: getattr(request.rows, name) for name in ("prompt", "key", "sampling", "limits")}
    on_host = unchecked(Rows, **held, length=np.ones(4, np.int32))
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(generate_jit(**request._asdict()))
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
            generate_jit(**request._replace(rows=on_host)._asdict())


def keys_used(monkeypatch, target, drafter, verify):
    """The keys of all uniforms that a run of one row draws, and its steps."""
    seen, uniform = [], jax.random.uniform

    def recorded(key, *arguments):
        data = jax.random.key_data(key)
        jax.debug.callback(lambda data: seen.append(tuple(np.ravel(data).tolist())), data)
        return uniform(key, *arguments)

    monkeypatch.setattr(jax.random, "uniform", recorded)
    sampling = Sampling(temperature=0.8)
    request = prepare(
        KEY, target, drafter, PROMPTS[:1], max_new_tokens=NEW, sampling=sampling, verify=verify,
        stop_at_eos=False,
    )  # fmt: skip
    static = {name: getattr(request, name) for name in ("rule", "outputs", "slots")}
    afresh = jax.jit(lambda *models_and_rows: generate_jit.__wrapped__(*models_and_rows, **static))
    made = afresh(target, drafter, request.rows)
    jax.effects_barrier()
    return seen, int(made.steps[0])


def test_no_key_is_used_twice_under_multi_step(monkeypatch, target):
    """Two drafts of two levels, an accept key and a residual key, anew every step."""
    drafter = ExpansionDrafter.of([near(target, 1), near(target, 2)], (2, 1), stack=False)
    seen, steps = keys_used(monkeypatch, target, drafter, "multi-step")
    assert len(seen) == len(set(seen)) == 6 * steps


def test_naive_uses_one_key_for_each_emitted_position(monkeypatch, target):
    """A step draws at three positions, the next one again at those that were not reached."""
    drafter = alone(near(target, 2))
    seen, steps = keys_used(monkeypatch, target, drafter, "naive")
    assert steps < NEW
    assert len(seen) == (2 + 3) * steps
    assert 2 * steps + NEW <= len(set(seen)) <= 2 * steps + NEW + 2 * (drafter.window - 1)


IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


@pytest.mark.parametrize("method", slow_but(["plain", "chain", "tree"], "tree"))
@pytest.mark.parametrize("impl", slow_among(IMPLEMENTATIONS, "unsafe_rbg"))
def test_a_row_draws_alone_what_it_draws_beside_one_that_ended(impl, method, target):
    """Row 0 ends with its first token, and row 1 goes on at a temperature that is nearly flat."""
    end = int(generate(target, None, PROMPTS[:1]).tokens[0, 0])
    ends = replace(target, config=dataclasses.replace(target.config, eos_ids=(end,)))
    draft = near(target, 1, 0.3)
    drafter = {
        "plain": None,
        "chain": alone(draft, (1, 1)),
        "tree": alone(draft, (2, 1), children=DISTINCT),
    }[method]
    keys = jax.random.split(jax.random.key(5, impl=impl), 2)
    mixed = Sampling(temperature=np.array([0.0, 50.0], np.float32))
    both = generate(ends, drafter, PROMPTS[:2], keys, sampling=mixed, stop_at_eos=True)
    alone_too = generate(
        ends, drafter, PROMPTS[1:2], keys[1:], sampling=Sampling(50.0), stop_at_eos=True
    )
    assert both.lengths[0] == 1
    np.testing.assert_array_equal(both.tokens[1], alone_too.tokens[0])
    drawn = both.tokens[1, : both.lengths[1]].tolist()
    assert len(set(drawn)) > len(drawn) // 2
