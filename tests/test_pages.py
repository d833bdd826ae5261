"""Pages of the caches: none leaks, none is shared wrongly, and texts are what they are without."""

import asyncio
import dataclasses

import numpy as np
import pytest

from pallas_kernels.tree_attention import xla
from specjax.engine import engine as engines
from specjax.engine import programs, sizes
from specjax.engine.engine import Engine
from specjax.engine.pages import Pages, Paging
from specjax.engine.request import Request
from specjax.engine.scheduler import Row, Scheduler
from specjax.engine.sequence import Sequence
from specjax.goodput.chunks import PrefillBatch
from tests import test_engine
from tests.engines import alone as plain_texts
from tests.engines import collected, ids_of, mixing, random_request, running, served
from tests.pairs import varied_model
from tests.scripted_engine import until
from tests.test_engine import DRAFTERS, VOCABULARY, chain, check_texts

SIZE = 4
"""Of a page, where there is no device."""
WINDOW = 3


class Shadow:
    """What a device holds in its pages: rows write where its tables say, as programs do, and past
    their texts they write what is none.
    """

    def __init__(self, rows: int, slots: int, paging: Paging) -> None:
        counts = paging.target_pages, paging.draft_pages
        self.held = [np.full((count, SIZE), -1) for count in counts]
        self.tables = [np.zeros((rows, slots // SIZE), int) for _ in counts]
        self.length = [0] * rows

    def place(self, pages: Pages) -> None:
        for row, own in pages.changes().items():
            for table, each in zip(self.tables, own, strict=True):
                table[row] = 0
                table[row, : len(each)] = each

    def write(self, row: Row, tokens: list[int], wrong: int) -> None:
        """More tokens of a row, the last of which is in no cache, and `wrong` ones after them."""
        written = [*row.tokens[-1:], *tokens][:-1] if tokens else []
        for held, table in zip(self.held, self.tables, strict=True):
            for slot, token in enumerate([*written, *(-1,) * wrong], self.length[row.number] - 1):
                page = table[row.number, slot // SIZE] if slot // SIZE < table.shape[1] else 0
                held[page, slot % SIZE] = token
        self.length[row.number] += len(tokens)

    def copy(self, source: int, row: int, length: int) -> None:
        for held, table in zip(self.held, self.tables, strict=True):
            equal = int(np.cumprod(table[source] == table[row]).sum())
            for slot in range(equal * SIZE, length):
                one, other = table[source, slot // SIZE], table[row, slot // SIZE]
                held[other, slot % SIZE] = held[one, slot % SIZE]
        self.length[row] = length

    def texts(self, row: int) -> list[list[int]]:
        """What the target and the draft see of a row."""
        slots = np.arange(self.length[row] - 1)
        return [
            held[table[row, slots // SIZE], slots % SIZE].tolist()
            for held, table in zip(self.held, self.tables, strict=True)
        ]


@pytest.mark.parametrize("seed", range(40))
def test_rows_see_their_own_texts_whoever_comes_and_goes(seed):
    """Few pages, prompts that begin alike: the device's pages hold what the scheduler says."""
    drawn = np.random.default_rng(seed)
    most, slots = int(drawn.integers(1, 6)), 48
    rows = most * int(drawn.integers(1, 4))
    paging = Paging(SIZE, 1 + int(drawn.integers(12, 30)), 1 + int(drawn.integers(12, 40)))
    pages = Pages(rows, slots, WINDOW, paging)
    at, device = Scheduler(most, texts=rows, pages=pages), Shadow(rows, slots, paging)
    shared = drawn.integers(0, 9, 30).tolist()
    costs, ended = {8: (1.0, 0.0), 32: (2.0, 0.0)}, 0

    def begin(admission):
        device.place(pages)
        row = admission.row.number
        if admission.source is None:
            device.length[row] = 1
        else:
            device.copy(admission.source, row, admission.common)

    def check():
        for row in at.rows:
            for text in device.texts(row.number) if row.sequence is not None else ():
                assert text == row.tokens[: device.length[row.number] - 1]
        running = [row.number for row in at.rows if row.sequence is not None]
        assert len(running) <= most
        assert pages.counts(running).leaked == 0

    for _ in range(400):
        match drawn.integers(7):
            case 0 | 1:
                cut, more = int(drawn.integers(0, 31)), drawn.integers(0, 9, drawn.integers(1, 8))
                prompt = [*shared[:cut], *more.tolist()]
                new = int(drawn.integers(1, 44 - len(prompt)))
                at.add(Sequence(Request(prompt=prompt, max_new_tokens=new)))
            case 2:
                while (admission := at.admit()) is not None:
                    begin(admission)
            case 3:
                if (taken := at.prefix()) is not None:
                    begin(taken)
                if (chunk := at.chunk(costs, 1.0)) is not None:
                    device.write(chunk.row, chunk.tokens, int(drawn.integers(9)))
                    at.read(chunk)
            case 4:
                for row in at.step(most).rows:
                    count = min(int(drawn.integers(1, WINDOW + 1)), row.sequence.left)
                    made = drawn.integers(0, 9, count).tolist()
                    device.write(row, made, WINDOW - count)
                    at.postprocess(row, made)
                    if not row.sequence.left:
                        at.free(row)
                        ended += 1
            case 5:
                for row in at.rows:  # those that fill up a step, and are read beside others
                    if row.sequence is None and device.length[row.number]:
                        device.write(row, [], int(drawn.integers(9)))
            case 6:
                busy = [row for row in at.rows if row.sequence is not None]
                if busy and drawn.integers(4) == 0:
                    row = busy[drawn.integers(len(busy))]
                    if row.decoding:  # a burst of it is in flight, which nobody reads
                        device.write(row, [7, 8][: drawn.integers(3)], WINDOW)
                    at.abort(row.sequence)
        check()
    assert ended


def ended(at, prompts, new):
    """Runs requests to their ends, all at once."""
    sequences = [Sequence(Request(prompt=prompt, max_new_tokens=new)) for prompt in prompts]
    at.add(*sequences)
    while (admission := at.admit()) is not None:
        while (taken := at.prefix()) is not None or (chunk := at.chunk({64: (1.0, 0.0)}, 1.0)):
            if taken is None:
                at.read(chunk)
        assert admission.row.sequence in sequences
    for row in at.step(len(at.rows)).rows:
        at.postprocess(row, [8] * new)
        at.free(row)


def test_another_row_takes_a_prefix_over_whose_page_is_read_by_others():
    """Choices of one prompt share its pages; their row could keep only the full ones before."""
    pages = Pages(4, 48, WINDOW, Paging(SIZE, 40, 0))
    at = Scheduler(4, pages=pages)
    ended(at, [list(range(30))] * 2, 2)
    at.add(Sequence(Request(prompt=[*range(22), 40, 41], max_new_tokens=2)))
    admission = at.admit()
    assert admission.source in (0, 1)
    assert (admission.row.number, admission.common) == (2, 22)


def test_engines_without_caches_of_drafts_lack_no_pages_for_them():
    pages = Pages(8, 48, 1, Paging(SIZE, 1 + 8 + 7 * 2, 0))  # 6 of 8 pages are shared
    at = Scheduler(8, pages=pages)
    for _ in range(8):
        at.add(Sequence(Request(prompt=list(range(28)), max_new_tokens=3)))
    at.admit()
    while (chunk := at.chunk({64: (1.0, 0.0)}, 1.0)) is not None:
        at.read(chunk)
    while at.admit() is not None:
        pass
    assert len(at.running) == 8


@pytest.fixture(scope="module")
def target():
    return varied_model()


@pytest.fixture(scope="module")
def engine(target):
    """Rows need more pages than there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "CHUNKS", (16, 64))
        patch.setattr(sizes, "_LEAST_PAGE", 16)
        options = {"page_size": 16, "kv_cache_tokens": 304}
        with running(target, chain(target), rows=4, **options) as found:
            assert found._device._tables.shape == (2, 16, 16)
            yield found
            check_pages(found)


def check_pages(engine):
    """Nobody runs any more, and every page is free or an ended text's."""
    until(lambda: not engine.num_requests_running, 60)  # who left goes with the next turn
    counts = engine.page_counts
    assert (counts.running, counts.leaked) == (0, 0)
    assert counts.total == counts.free + counts.cached


OF_ROWS = (
    test_engine.test_what_another_row_holds_is_taken_over,
    test_engine.test_a_prompt_of_several_choices_is_read_once,
    test_engine.test_rows_that_fill_up_a_step_change_no_text,
    test_engine.test_who_leaves_frees_the_row_for_the_next,
    test_engine.test_log_probabilities_are_those_of_the_target,
)


@pytest.mark.parametrize("proof", OF_ROWS, ids=lambda proof: proof.__name__.removeprefix("test_"))
def test_what_holds_of_rows_holds_of_pages(proof, engine, target):
    proof(engine, target)
    check_pages(engine)


def test_pages_compile_nothing_and_no_program_copies_a_cache(engine):
    test_engine.test_nothing_compiles_and_nothing_is_transferred_unasked(engine)
    test_engine.test_no_program_copies_a_cache(engine)


def test_texts_are_those_of_plain_decoding_with_few_pages(engine, target):
    """Whatever requests ask for; prompts end anywhere in a page, and begin alike up to anywhere."""
    drawn = np.random.default_rng(21)
    shared = drawn.integers(0, VOCABULARY, 70).tolist()
    requests = [random_request(drawn, VOCABULARY) for _ in range(60)]
    requests = [
        dataclasses.replace(each, prompt=[*shared[: drawn.integers(71)], *each.prompt[:30]])
        for each in requests
    ]
    before = engine.statistics().cached_tokens
    found = [ids_of(events) for events in served(engine, requests)]
    assert found == plain_texts(target, requests)
    assert engine.statistics().cached_tokens - before > 200
    check_pages(engine)


def test_a_crowd_of_equal_prompts_reads_one(engine, target):
    """64 requests of 4 choices each; half of them leave, before, while and after they are read."""
    prompt = np.random.default_rng(22).integers(0, VOCABULARY, 60).tolist()
    stays = [
        Request(prompt=prompt, max_new_tokens=9, temperature=1.0, seed=seed, choice=choice)
        for seed in range(8) for choice in range(4)
    ]  # fmt: skip
    leaves = dataclasses.replace(stays[0], max_new_tokens=60, ignore_eos=True)
    before = engine.statistics()

    async def all_of_them():
        async def left(tokens):
            sequence = engine.submit(leaves)
            for _ in range(tokens):
                await anext(sequence)
            sequence.abort()
            await collected(sequence)

        runs = [collected(engine.submit(request)) for request in stays]
        found = await asyncio.gather(*runs, *(left(at % 4) for at in range(32)))
        return [ids_of(events) for events in found[: len(stays)]]

    assert asyncio.run(all_of_them()) == plain_texts(target, stays)
    after = engine.statistics()
    read = after.prompt_tokens - before.prompt_tokens
    assert after.cached_tokens - before.cached_tokens > 0.9 * read
    check_pages(engine)


def test_who_needs_more_pages_than_are_free_waits(engine, target):
    """Two run where four rows are; the text of one that has ended gives up its pages."""
    drawn = np.random.default_rng(23)
    requests = [
        Request(prompt=drawn.integers(0, VOCABULARY, 60).tolist(), max_new_tokens=66)
        for _ in range(5)
    ]
    running = []

    async def all_of_them():
        async def watched():
            while True:
                running.append(engine.num_requests_running)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watched())
        found = await asyncio.gather(*map(collected, engine.submit_all(requests)))
        watching.cancel()
        return [ids_of(events) for events in found]

    assert asyncio.run(all_of_them()) == plain_texts(target, requests)
    assert max(running) == 2
    check_pages(engine)


def test_more_texts_are_kept_than_run(engine, target):
    """Each of them as long as its pages are not needed."""
    drawn = np.random.default_rng(24)
    prompts = [drawn.integers(0, VOCABULARY, 20).tolist() for _ in range(6)]
    requests = [Request(prompt=prompt, max_new_tokens=4) for prompt in prompts]
    texts = plain_texts(target, requests)
    later = [
        Request(prompt=[*prompt, *text], max_new_tokens=4)
        for prompt, text in zip(prompts, texts, strict=True)
    ]

    async def one_by_one():
        for request in requests:
            await collected(engine.submit(request))
        found = []
        for request in later:
            sequence = engine.submit(request)
            found.append((ids_of(await collected(sequence)), sequence.statistics.cached_tokens))
        return found

    texts, cached = zip(*asyncio.run(one_by_one()), strict=True)
    assert list(texts) == plain_texts(target, later)
    assert cached == tuple(len(request.prompt) - 1 for request in later)
    check_pages(engine)


@pytest.mark.slow
@pytest.mark.parametrize(("in_place", "size"), [(True, 64), (False, 16)])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_method_has_pages(name, in_place, size, target, monkeypatch):
    """By the kernels of a CPU and as elsewhere; half of them read prompts in steps, too."""
    monkeypatch.setattr(engines, "CHUNKS", (16,))
    monkeypatch.setattr(sizes, "_LEAST_PAGE", 16)
    for module in (xla, programs):
        monkeypatch.setattr(module, "reads_rows_in_place", lambda: in_place)
    options = {"rows": 3, "page_size": size, "kv_cache_tokens": 320}
    with mixing(PrefillBatch(1, 8, 8)), running(target, DRAFTERS[name](target), **options) as found:
        check_texts(target, found, 24, 5)
        check_pages(found)
        assert found._device._rows == (3 if name == "stacked" else 12), "texts that are kept"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"page_size": 48}, r"page_size is 48; it must be a power of two, \d+ at least, or 0"),
        ({"page_size": 8}, r"page_size is 8; it must be a power of two, \d+ at least"),
        ({"page_size": 64, "kv_cache_tokens": 100, "max_model_len": 100},
         "kv_cache_tokens is 100, which in pages of 64 are too few for a text of 100 and the 1 of"),
        ({"kv_cache_tokens": 999, "page_size": 0},
         "kv_cache_tokens is 999, and rows have no pages here"),
    ],
)  # fmt: skip
def test_what_pages_cannot_be_is_refused(options, sentence, target):
    with pytest.raises(ValueError, match=sentence):
        Engine(target, None, **options)


def test_a_context_is_as_long_as_its_pages(target):
    """Where none is named."""
    engine = Engine(target, None, rows=2, page_size=64, kv_cache_tokens=128)
    assert engine.max_model_len == 127
    assert engine.page_counts == (2, 2, 0, 0, 0)
    odd = Engine(target, None, rows=2, page_size=64, kv_cache_tokens=127)
    assert (odd.max_model_len, odd.page_counts.total, odd.kv_cache_tokens) == (63, 1, 64)
    assert Engine(target, None, rows=2).page_counts.total == 8
    assert Engine(target, None, rows=2, page_size=0).page_counts is None
