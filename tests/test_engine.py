"""The engine: every request's text is its own, whatever runs beside it; rows are never lost."""

import asyncio
import contextlib
import dataclasses
import re
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import xla
from specjax.base.pytree import replace
from specjax.base.sampling import Sampling
from specjax.decoding.extending import can_truncate
from specjax.draft import ExpansionDrafter
from specjax.draft.best_first import BestFirstDrafter
from specjax.draft.growth import Growth
from specjax.draft.hybrid import HybridDrafter
from specjax.draft.prompt_lookup import TextDrafter
from specjax.draft.token_recycling import RecycleDrafter
from specjax.engine import engine as engines
from specjax.engine import programs, scheduler
from specjax.engine.checks import key_of
from specjax.engine.device import Device
from specjax.engine.engine import Engine
from specjax.engine.request import EngineClosedError, QueueFullError, Request, Tokens
from specjax.goodput.bursts import BURST
from specjax.goodput.chunks import PrefillBatch
from specjax.trees.construction import DISTINCT
from specjax.trees.tree import TreeShape
from tests.engines import alone as plain_texts
from tests.engines import collected, ids_of, mixing, random_request, running, served
from tests.pairs import END, alone, broken, forward, generate, near, varied_model
from tests.scripted_engine import until

VOCABULARY = 64


@pytest.fixture(scope="module")
def target():
    return varied_model()


def chain(target):
    return alone(near(target, 1), (1, 1, 1))


def best_first(target, **options):
    growth = Growth(budget=5, beams=2, width=2, depth=4)
    return BestFirstDrafter(near(target, 1), jnp.ones(2), growth, **options)


def recycled(target):
    return RecycleDrafter(jnp.full(2, 0.4), TreeShape((2, (1, 0))), VOCABULARY)


DRAFTERS = {
    "none": lambda target: None,
    "tree": lambda target: alone(near(target, 1), (2, 2, 1), children=DISTINCT),
    "pool": lambda target: ExpansionDrafter.of(
        [near(target, 1), near(target, 2)], ((1, 1, 1), (2, 1)), stack=False
    ),
    "stacked": lambda target: ExpansionDrafter.of(
        [near(target, 1), near(target, 2)], (2, 1), stack=True
    ),
    "best first": best_first,
    "lookup": lambda target: TextDrafter(
        jnp.asarray([0.0, 0.4, 0.6]), None, Growth(budget=4, depth=3), VOCABULARY
    ),
    "recycle": recycled,
    "staged": lambda target: best_first(target, second=alone(near(target, 2), (1, 1))),
    "hybrid": lambda target: HybridDrafter(
        replace(best_first(target), second=recycled(target)), jnp.asarray([0.0, 0.3]), None, least=1
    ),
}


@pytest.fixture(scope="module")
def one_engine(target):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "CHUNKS", (16, 64))
        with running(target, chain(target), rows=4) as found:
            yield found


@pytest.fixture
def engine(one_engine):
    """The engine of all tests, in which nothing of an earlier one runs."""
    until(lambda: not one_engine.num_requests_running + one_engine.num_requests_waiting, 60)
    return one_engine


def check_texts(target, engine, count, seed):
    """Requests that ask for anything, more of them than rows, all at once."""
    drawn = np.random.default_rng(seed)
    requests = [random_request(drawn, VOCABULARY) for _ in range(count)]
    texts = plain_texts(target, requests)
    for request, expected, events in zip(requests, texts, served(engine, requests), strict=True):
        assert ids_of(events) == expected
        ended = not request.ignore_eos and expected[-1] == END
        assert events[-1].finish_reason == ("stop" if ended else "length")
        assert all(event.finish_reason is None for event in events[:-1])


def test_texts_are_those_of_plain_decoding(engine, target):
    check_texts(target, engine, 40, 1)


def test_how_many_steps_a_burst_has_changes_nothing(engine, target, monkeypatch):
    """Ends, seeds, penalties and log probabilities are right inside it, and so are the counts."""
    drawn = np.random.default_rng(9)
    requests = [random_request(drawn, VOCABULARY, most=40) for _ in range(24)]
    found = {}
    monkeypatch.setattr(scheduler, "_BURSTS", 0.01)  # however few steps requests take
    for most in (1, 3, BURST):
        monkeypatch.setattr(
            scheduler, "steps_of", lambda seconds, left, bound, most=most: min(most, bound)
        )
        before = engine.statistics()
        events = served(engine, requests)
        after = engine.statistics()
        counts = [
            getattr(after, name) - getattr(before, name)
            for name in ("steps", "generated_tokens", "accepted_tokens")
        ]
        found[most] = [ids_of(own) for own in events], counts, events
    assert found[1][0] == plain_texts(target, requests)
    assert found[1][:2] == found[3][:2] == found[BURST][:2]
    assert max(len(own) for own in found[1][2]) > max(len(own) for own in found[BURST][2])
    for own, other in zip(found[1][2], found[BURST][2], strict=True):
        one, two = (
            [each.logprob for at in events for each in at.logprobs] for events in (own, other)
        )
        np.testing.assert_allclose(one, two, atol=1e-4)
        assert own[-1].finish_reason == other[-1].finish_reason


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_method_gives_the_texts_of_plain_decoding(name, target, monkeypatch):
    monkeypatch.setattr(engines, "CHUNKS", (16,))
    with running(target, DRAFTERS[name](target), rows=2) as engine, whenever_it_can(engine):
        check_texts(target, engine, 24, 5)


@contextlib.contextmanager
def whenever_it_can(engine):
    """Prompts are read together as if that took no time; the passes that were."""
    device, passes = engine._device, []
    with pytest.MonkeyPatch.context() as patch:
        read = device.extend_together
        patch.setattr(device, "batch_seconds", 1e-9)
        patch.setattr(
            device,
            "extend_together",
            lambda tokens, batch: (passes.append(tokens), read(tokens, batch)),
        )
        yield passes
    assert passes


def test_prompts_that_come_at_once_are_read_together(engine, target):
    """Each is its own, however long; equal ones are read once."""
    drawn = np.random.default_rng(12)

    def asked(prompt, seed):
        return Request(prompt=prompt, max_new_tokens=12, seed=seed, temperature=1.0)

    lengths = (90, 3, 30, 64, 2, 75, 40, 80)
    *others, last = (drawn.integers(0, VOCABULARY, length).tolist() for length in lengths)
    requests = [asked(prompt, at) for at, prompt in enumerate([*others, last, last, last])]
    with whenever_it_can(engine) as passes:
        before = engine.statistics().cached_tokens
        found = served(engine, requests)
        reused = engine.statistics().cached_tokens - before
    assert [ids_of(own) for own in found] == plain_texts(target, requests)
    assert reused == 2 * 79
    for own in passes:
        counts = [len(tokens) for tokens in own.values()]
        assert len(counts) > 1
        assert max(counts) <= 64
        assert sum(counts) <= 256


MIXED = PrefillBatch(2, 8, 11)
"""What steps read of prompts in tests: two of them, not both whole."""


def test_steps_read_prompts_in_their_passes(target, monkeypatch):
    """Texts are the same; of equal prompts one is read; those whose log probabilities are asked for
    are read apart."""
    monkeypatch.setattr(engines, "CHUNKS", (16,))
    drawn = np.random.default_rng(13)
    with mixing(MIXED) as read, running(target, chain(target), rows=4) as engine:
        measured = dict(engine._device.mixed_seconds)
        check_texts(target, engine, 40, 6)
        found = engine._device.mixed_seconds
        assert found.keys() == measured.keys()
        assert found != measured, "it is corrected by steps that read"
        assert {0, 1, 2} >= set(read) > {1}
        long = drawn.integers(0, VOCABULARY, 60).tolist()
        asked = [Request(prompt=long, max_new_tokens=9, seed=at, temperature=1.0) for at in (0, 1)]
        scored = Request(prompt=long[::-1], max_new_tokens=3, prompt_logprobs=1)
        first = Request(prompt=[1, 2], max_new_tokens=60, ignore_eos=True)
        before = engine.statistics().cached_tokens
        requests = [first, *asked, scored]
        found = served(engine, requests)
        assert engine.statistics().cached_tokens - before == 59
    assert [ids_of(own) for own in found] == plain_texts(target, requests)


@pytest.mark.slow
@pytest.mark.parametrize(("in_place", "prompts"), [(False, MIXED), (True, PrefillBatch(1, 8, 8))])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_method_mixes(name, in_place, prompts, target, monkeypatch):
    monkeypatch.setattr(engines, "CHUNKS", (16,))
    for module in (xla, programs):
        monkeypatch.setattr(module, "reads_rows_in_place", lambda: in_place)
    monkeypatch.setattr(engines, "_CPU_ROW_FACTOR", 2 if in_place else None)
    with mixing(prompts) as read, running(target, DRAFTERS[name](target), rows=3) as engine:
        check_texts(target, engine, 24, 5)
    assert read


def test_what_another_row_holds_is_taken_over(engine, target):
    """Prompts that begin alike, in the middle of what rows hold, and as long as it."""
    drawn = np.random.default_rng(3)
    shared = drawn.integers(0, VOCABULARY, 50).tolist()
    first = Request(prompt=shared, max_new_tokens=30, ignore_eos=True)
    made = ids_of(served(engine, [first])[0])
    later = [
        Request(prompt=[*shared[:30], 1, 2], max_new_tokens=9),
        Request(prompt=[*shared, *made], max_new_tokens=9, temperature=0.9, seed=4),
        Request(prompt=shared, max_new_tokens=9),
        Request(prompt=[*shared, *made[:7], 5], max_new_tokens=9),
    ]
    reused = []

    async def one_by_one():
        for request in later:
            stream = engine.submit(request)
            assert ids_of(await collected(stream)) == plain_texts(target, [request])[0]
            reused.append(stream.statistics.cached_tokens)

    before = engine.statistics().cached_tokens
    asyncio.run(one_by_one())
    assert reused == [30, 79, 49, 57]
    assert engine.statistics().cached_tokens - before == sum(reused)


def test_a_prompt_of_several_choices_is_read_once(engine, target):
    prompt = np.random.default_rng(7).integers(0, VOCABULARY, 60).tolist()
    requests = [
        Request(prompt=prompt, max_new_tokens=9, temperature=1.0, seed=5, choice=choice)
        for choice in range(2)
    ]

    async def both():
        streams = engine.submit_all(requests)
        events = await asyncio.gather(*map(collected, streams))
        return [ids_of(each) for each in events], [s.statistics.cached_tokens for s in streams]

    before = engine.statistics()
    texts, cached = asyncio.run(both())
    made = generate(
        target, None, [prompt] * 2, jax.random.key(5), max_new_tokens=9, sampling=Sampling(1.0),
        stop_at_eos=True,
    )  # fmt: skip
    assert texts == [made.tokens[at, : made.lengths[at]].tolist() for at in range(2)]
    assert cached == [0, 59]
    after = engine.statistics()
    assert after.cached_tokens - before.cached_tokens == 59
    assert after.prompt_tokens - before.prompt_tokens == 120


def test_rows_that_fill_up_a_step_change_no_text(engine, target):
    """Three that decode beside one that reads, is free, has left or is what others copy from."""
    drawn = np.random.default_rng(8)
    shared = drawn.integers(0, VOCABULARY, 40).tolist()
    requests = [random_request(drawn, VOCABULARY) for _ in range(24)]
    requests = [
        dataclasses.replace(each, prompt=[*shared[: 20 * (at % 3)], *each.prompt])
        for at, each in enumerate(requests)
    ]
    leaves = Request(prompt=shared, max_new_tokens=60, ignore_eos=True)
    expected = plain_texts(target, requests)

    async def all_of_them():
        async def one(request):
            return ids_of(await collected(engine.submit(request)))

        async def left():
            stream = engine.submit(leaves)
            await anext(stream)
            stream.abort()

        return await asyncio.gather(*map(one, requests), *(left() for _ in range(6)))

    assert asyncio.run(all_of_them())[: len(requests)] == expected


def test_a_prompts_log_probabilities_are_read_in_whole_chunks(engine, monkeypatch):
    """Whatever chunk the row's turn would have had."""
    sizes, extend = [], engine._device.extend

    def counted(row, tokens, size, scored=False):
        sizes.append((len(tokens), size, scored))
        return extend(row, tokens, size, scored)

    monkeypatch.setattr(engine._device, "extend", counted)
    served(engine, [Request(prompt=[1] * 41, max_new_tokens=0, prompt_logprobs=0)])
    assert sizes == [(16, 16, True), (16, 16, True), (8, 16, True)]


@pytest.mark.parametrize("seed", [0, 5, 2**31 - 1, -5, -(2**31)])
def test_seeds_are_those_of_jax(seed):
    assert np.array_equal(key_of(seed), jax.random.key_data(jax.random.key(seed)))


def logprobs_after(target, text):
    tokens = jnp.asarray([text], jnp.int32)
    positions = jnp.arange(len(text), dtype=jnp.int32)[None]
    logits, _ = forward(target, tokens, positions, None, None)
    return np.asarray(jax.nn.log_softmax(logits[0]))


def test_log_probabilities_are_those_of_the_target(engine, target):
    """Before penalties and temperature, for the prompt and for every token inside a path."""
    prompt = np.random.default_rng(5).integers(0, VOCABULARY, 80).tolist()
    request = Request(
        prompt=prompt, max_new_tokens=12, temperature=1.2, presence_penalty=1.0, logprobs=3,
        prompt_logprobs=2, ignore_eos=True,
    )  # fmt: skip
    plain = Request(prompt=[5], max_new_tokens=12)

    async def both():
        stream = engine.submit(request)
        events, other = await asyncio.gather(collected(stream), collected(engine.submit(plain)))
        return stream.prompt_logprobs, events, other

    of_prompt, events, other = asyncio.run(both())
    text = [*prompt, *ids_of(events)]
    expected = logprobs_after(target, text)
    assert of_prompt[0] is None
    found = [*of_prompt[1:], *(each for event in events for each in event.logprobs)]
    assert len(found) == len(text) - 1
    for at, each in enumerate(found):
        assert each.logprob == pytest.approx(expected[at, text[at + 1]], abs=1e-4)
        assert len(each.top) == (2 if at + 1 < len(prompt) else 3)
        for rank, (token, value) in enumerate(each.top):
            assert value == pytest.approx(np.sort(expected[at])[-1 - rank], abs=1e-4)
            assert value == pytest.approx(expected[at, token], abs=1e-4)
    assert all(event.logprobs == () for event in other)


def test_a_prompts_log_probabilities_alone(engine):
    (events,) = served(engine, [Request(prompt=[1, 2], max_new_tokens=0, prompt_logprobs=0)])
    assert [(event.ids, event.finish_reason) for event in events] == [((), "length")]


def test_stop_token_ids_end_a_text_beside_the_models_own(engine, target):
    request = Request(prompt=[7, 8, 9], max_new_tokens=40, ignore_eos=True)
    (text,) = plain_texts(target, [request])
    stop = text[9]
    for ignore_eos in (True, False):
        own = dataclasses.replace(request, stop_token_ids=[stop], ignore_eos=ignore_eos)
        (events,) = served(engine, [own])
        wanted = text[: text.index(stop) + 1]
        if not ignore_eos and END in wanted:
            wanted = wanted[: wanted.index(END) + 1]
        assert ids_of(events) == wanted
        assert events[-1].finish_reason == "stop"


def test_choices_of_a_seed_are_rows_of_generate(engine, target):
    requests = [
        Request(prompt=[3, 4], max_new_tokens=9, temperature=1.0, seed=11, choice=choice)
        for choice in range(3)
    ]
    made = generate(
        target, None, [[3, 4]] * 3, jax.random.key(11), max_new_tokens=9,
        sampling=Sampling(1.0), stop_at_eos=True,
    )  # fmt: skip
    for choice, events in enumerate(served(engine, requests)):
        assert ids_of(events) == made.tokens[choice, : made.lengths[choice]].tolist()


def test_requests_without_a_seed_differ(engine):
    request = Request(prompt=[3, 4], max_new_tokens=20, temperature=1.5, ignore_eos=True)
    texts = {tuple(ids_of(events)) for events in served(engine, [request] * 6)}
    assert len(texts) == 6


def test_who_leaves_frees_the_row_for_the_next(engine, target):
    """Before a row, while the prompt is read, and while tokens come."""
    long = Request(prompt=[1] * 40, max_new_tokens=80, ignore_eos=True)
    short = Request(prompt=[9, 9], max_new_tokens=12)

    async def with_departures():
        streams = [engine.submit(long) for _ in range(8)]
        await streams[0].__anext__()
        later = engine.submit(short)
        for stream in streams:
            stream.abort()
            stream.abort()
        ends = [(await collected(stream))[-1].finish_reason for stream in streams[1:]]
        assert ends == ["abort"] * 7
        return ids_of(await collected(later))

    assert asyncio.run(with_departures()) == plain_texts(target, [short])[0]


def test_a_text_that_ends_at_a_stop_string_is_a_burst_late_at_most(engine, monkeypatch):
    """The next burst waits for who reads what the last one gave, while one more is in flight."""
    bursts, advance = [], Device.advance
    monkeypatch.setattr(engines, "_READING", 1e6)
    monkeypatch.setattr(
        Device,
        "advance",
        lambda self, *given, **more: bursts.append(0) or advance(self, *given, **more),
    )
    asked = Request(prompt=[1, 2], max_new_tokens=60, ignore_eos=True, has_stop_strings=True)

    async def stopped(after: int) -> int:
        stream, count = engine.submit(asked), 0
        async for _ in stream:
            count += 1
            if count == after:
                break
            await asyncio.sleep(0.01)
        seen = len(bursts)
        stream.abort()
        return seen

    for after in (1, 2):
        bursts.clear()
        seen = asyncio.run(stopped(after))
        until(lambda: not engine.num_requests_running, 60)
        assert len(bursts) == seen == after + 1


def test_who_never_reads_a_text_holds_up_nobody(engine):
    silent = Request(prompt=[1, 2], max_new_tokens=60, ignore_eos=True, has_stop_strings=True)

    async def one_of_two() -> list[Tokens]:
        streams = engine.submit_all([silent, Request(prompt=[3], max_new_tokens=60)])
        return await collected(streams[1])

    assert asyncio.run(asyncio.wait_for(one_of_two(), 20))[-1].finish_reason is not None


def test_who_leaves_before_the_queue_never_enters_it(engine):
    async def left():
        (sequence,) = engine.prepare([Request(prompt=[1, 2], max_new_tokens=80)])
        sequence.abort()
        engine.enqueue([sequence])
        assert engine.num_requests_waiting == 0
        return await collected(sequence)

    assert [tokens.finish_reason for tokens in asyncio.run(left())] == ["abort"]


def test_a_full_queue_refuses_and_a_request_is_checked(engine, monkeypatch):
    ask = partial(Request, prompt=[1], max_new_tokens=9)
    wrong = {
        "prompt is empty": ask(prompt=[]),
        "token 64; the vocabulary has 64": ask(prompt=[64]),
        "exceed the context of 128": ask(prompt=[1] * 100, max_new_tokens=29),
        "max_new_tokens is 0": ask(max_new_tokens=0),
        "temperature is -1": ask(temperature=-1.0),
        "top_p is 0": ask(top_p=0.0),
        r"logprobs is 21; it must lie in \[0, 20\]": ask(logprobs=21),
        "stop_token_ids holds 17": ask(stop_token_ids=[3] * 17),
        "stop_token_ids is 64": ask(stop_token_ids=[64]),
        "logit_bias names token 70": ask(logit_bias={70: 1.0}),
        "seed is 18446744073709551616": ask(seed=2**64),
    }

    async def tried():
        for sentence, request in wrong.items():
            with pytest.raises((ValueError, TypeError), match=sentence):
                engine.submit(request)
        monkeypatch.setattr(engine._scheduler, "_max_requests", 0)
        streams = engine.submit_all([ask(max_new_tokens=90, ignore_eos=True)] * 4)
        with pytest.raises(QueueFullError):
            engine.submit(ask())
        with pytest.raises(ValueError, match="5 requests come at once; 4 may run and 0 wait"):
            engine.submit_all([ask()] * 5)
        with pytest.raises(ValueError, match="prompt is empty"):
            engine.submit_all([ask(), ask(prompt=[])])
        await asyncio.gather(*map(collected, streams))

    asyncio.run(tried())


@pytest.mark.slow
def test_a_drafter_that_gives_no_numbers_changes_no_text(target, monkeypatch):
    drafter = alone(broken(target, np.nan), (2, 1))
    requests = [
        Request(prompt=[5, 6], max_new_tokens=12),
        Request(prompt=[5, 6], max_new_tokens=12, temperature=1.0, seed=3),
    ]
    monkeypatch.setattr(engines, "CHUNKS", (16,))
    with running(target, drafter, rows=2) as engine:
        texts = [ids_of(events) for events in served(engine, requests)]
    assert texts == plain_texts(target, requests)


def test_draining_lets_requests_end_and_then_ends_them(target):
    with running(target, None, rows=1) as engine:
        request = Request(prompt=[1, 2], max_new_tokens=100, ignore_eos=True)

        async def drained(seconds):
            streams = [engine.submit(request), engine.submit(request)]
            waiting = asyncio.create_task(engine.drain(seconds))
            await asyncio.sleep(0)
            with pytest.raises(EngineClosedError):
                engine.submit(request)
            found = await asyncio.gather(*map(collected, streams))
            await waiting
            return [events[-1].finish_reason for events in found]

        assert asyncio.run(drained(60)) == ["length", "length"]
        engine._accepts = True
        assert asyncio.run(drained(0)) == ["abort", "abort"]


def test_a_failure_ends_every_request_and_is_said(target, monkeypatch):
    with pytest.MonkeyPatch.context() as patch:
        engine = Engine(target, None, rows=1, max_model_len=64)
        engine.start()
        patch.setattr(engine._device, "results", lambda *_: 1 / 0)
        events = served(engine, [Request(prompt=[1, 2], max_new_tokens=9)] * 3)
        assert [each[-1].finish_reason for each in events] == ["error"] * 3
        assert "division by zero" in engine.failure
        assert not engine.ready

        async def refused():
            with pytest.raises(EngineClosedError, match="division by zero"):
                engine.submit(Request(prompt=[1], max_new_tokens=9))

        asyncio.run(refused())
        engine.close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rows": 0}, "rows is 0"),
        ({"max_model_len": 10**6}, "max_model_len is 1000000; it must lie in"),
        ({"verify": "block", "drafter": "staged"}, "not lossless"),
        ({"verify": "nothing"}, "no verification rule"),
    ],
)
def test_what_an_engine_cannot_be_is_refused(options, sentence, target):
    drafter = DRAFTERS[options.pop("drafter", "pool")](target)
    with pytest.raises(ValueError, match=sentence):
        Engine(target, drafter, **options)


def test_nothing_compiles_and_nothing_is_transferred_unasked(engine):
    """Whatever requests ask for, once the engine has started, and whatever jax forgot."""
    jax.clear_caches()
    drawn = np.random.default_rng(9)
    requests = [random_request(drawn, VOCABULARY) for _ in range(60)]
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "compile" in name else None
    )
    before = len(compiled)
    with jax.transfer_guard("disallow"):
        jax.config.update("jax_transfer_guard", "disallow")  # in the engine's thread too
        try:
            served(engine, requests)
        finally:
            jax.config.update("jax_transfer_guard", None)
    assert compiled[before:] == []
    assert engine.failure is None


def test_no_program_copies_a_cache(engine):
    """Neither in a step nor while a prompt is read: it would cost more than what they do."""
    cache = engine._device._state[0]
    sizes = {leaf.shape for leaf in engine._device._state if leaf.size >= cache.size // 4}
    assert cache.shape in sizes
    for program in engine._device._programs.values():
        copied = re.findall(r"f32\[([\d,]+)\]\S* copy\(", program.as_text())
        assert not sizes & {tuple(map(int, shape.split(","))) for shape in copied}


def test_a_caller_may_change_its_prompt(engine, target):
    """As one does who appends what comes."""
    prompt = [5, 6, 7]
    request = Request(prompt=prompt, max_new_tokens=20)
    expected = plain_texts(target, [request])[0]

    async def appended():
        async for tokens in engine.submit(request):
            prompt.extend(tokens.ids)

    asyncio.run(appended())
    assert prompt == [5, 6, 7, *expected]


def test_an_engine_that_never_started_ends_its_requests(target):
    engine = Engine(target, None, rows=1, max_model_len=64)

    async def closed():
        stream = engine.submit(Request(prompt=[1], max_new_tokens=5))
        engine.close()
        return await collected(stream)

    assert asyncio.run(closed())[-1].finish_reason == "abort"
    assert engine.num_requests_waiting == 0


def test_an_engine_that_does_not_start_ends_its_requests(target, monkeypatch):
    engine = Engine(target, None, rows=1, max_model_len=64)
    monkeypatch.setattr(engines.Device, "compile", lambda *_: 1 / 0)

    async def started():
        stream = engine.submit(Request(prompt=[1], max_new_tokens=5))
        with pytest.raises(ZeroDivisionError):
            engine.start()
        with pytest.raises(EngineClosedError, match="did not start: ZeroDivisionError"):
            engine.submit(Request(prompt=[1], max_new_tokens=5))
        return await collected(stream)

    assert asyncio.run(started())[-1].finish_reason == "error"
    engine.close()


@pytest.mark.slow
def test_rows_may_be_copied_out_and_steps_have_all_of_them(target, monkeypatch):
    """As on a GPU, where caches are not read in place; keys of another kind of generator."""
    monkeypatch.setattr(engines, "CHUNKS", (16,))
    for module in (xla, programs):
        monkeypatch.setattr(module, "reads_rows_in_place", lambda: False)
    monkeypatch.setattr(engines, "_CPU_ROW_FACTOR", None)
    with (
        jax.default_prng_impl("rbg"),
        running(target, DRAFTERS["stacked"](target), rows=2) as engine,
    ):
        check_texts(target, engine, 16, 3)


def test_threads_may_submit_side_by_side(engine):
    found = []

    def client(seed):
        requests = [Request(prompt=[seed, 2], max_new_tokens=6, ignore_eos=True)] * 4
        found.append([len(ids_of(events)) for events in served(engine, requests)])

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[6] * 4] * 4


def test_can_truncate_is_what_drafters_say(target):
    assert all(can_truncate(target, DRAFTERS[name](target)) for name in ("pool", "hybrid"))
