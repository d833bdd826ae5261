"""The scheduler's policy: rows, queue, chunks of prompts, prefixes. No jax."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.base.prefix import common_prefix
from specjax.engine.request import QueueFullError, Request, RequestError
from specjax.engine.scheduler import Row, Scheduler
from specjax.engine.sequence import Sequence
from specjax.goodput.bursts import BURST
from specjax.goodput.chunks import PrefillBatch, fastest, mixing_pays

COSTS = {16: (0.01, 1e-5), 64: (0.02, 0.0), 256: (0.06, 0.0)}


def sequence(*tokens: int, **options) -> Sequence:
    return Sequence(Request(prompt=list(tokens), **options))


def text(count: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def read_all(at: Scheduler) -> None:
    while (chunk := at.chunk(COSTS, 1.0)) is not None:
        at.read(chunk)


def test_the_scheduler_needs_no_jax():
    code = (
        "import sys; sys.modules['jax'] = sys.modules['numpy'] = None;"
        "import specjax.engine.scheduler, specjax.engine.request"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_forgotten_is_no_prefix_and_what_runs_stays():
    at = Scheduler(2)
    at.add(sequence(*text(40)), sequence(*text(40, 50)))
    first, second = at.admit().row, at.admit().row
    read_all(at)
    at.free(first)
    at.forget()
    assert (first.tokens, second.tokens) == ([], list(text(40, 50)))
    at.add(sequence(*text(40), 1))
    assert at.admit().source is None


def test_requests_move_into_free_rows_in_order():
    at = Scheduler(2)
    first, second, third = (sequence(number, 9) for number in range(3))
    for each in (first, second, third):
        at.add(each)
    admitted = [at.admit(), at.admit()]
    assert [each.row.sequence for each in admitted] == [first, second]
    assert at.admit() is None
    at.free(admitted[1].row)
    assert at.admit().row is admitted[1].row
    assert at.rows[1].sequence is third
    assert (len(at.running), len(at.waiting)) == (2, 0)


def test_a_queue_holds_as_many_requests_and_tokens_as_it_may():
    at = Scheduler(1, max_requests=2, max_tokens=100)
    at.add(sequence(*text(70)))
    at.admit()
    at.add(sequence(*text(60)))
    with pytest.raises(QueueFullError, match="60 tokens of prompts wait; with 41 more"):
        at.add(sequence(*text(41)))
    at.add(sequence(*text(40)))
    with pytest.raises(QueueFullError, match="2 requests wait; with 1 more they exceed the 2"):
        at.add(sequence(1))
    idle = Scheduler(2, max_requests=1)
    for _ in range(3):
        idle.add(sequence(1))  # two rows are free
    with pytest.raises(QueueFullError):
        idle.add(sequence(1))
    with pytest.raises(RequestError, match="4 requests come at once; 2 may run and 1 wait"):
        idle.add(*(sequence(1) for _ in range(4)))
    alone = Scheduler(1, max_tokens=10)
    with pytest.raises(RequestError, match="12 tokens of prompts come at once") as refused:
        alone.add(sequence(*text(6)), sequence(*text(6)))
    assert refused.value.field == "prompt"
    assert not alone.waiting
    alone.add(sequence(*text(60)))  # it could not be taken ever otherwise
    assert alone.waiting_tokens == 60


def test_who_was_aborted_counts_no_more_even_before_the_next_turn():
    at = Scheduler(1, max_requests=1, max_tokens=100)
    first, second = sequence(*text(70)), sequence(*text(90))
    at.add(first)
    at.admit()
    at.add(second)
    with pytest.raises(QueueFullError):
        at.add(sequence(1))
    second.finished = True
    at.add(third := sequence(*text(90)))
    third.finished = first.finished = True
    at.add(sequence(1), sequence(2))
    with pytest.raises(QueueFullError, match="2 requests wait; with 1 more they exceed the 1"):
        at.add(sequence(3))


def test_who_leaves_frees_the_row_or_the_place_in_the_queue():
    at = Scheduler(1)
    runs, waits = sequence(*text(40)), sequence(2)
    at.add(runs)
    at.add(waits)
    row = at.admit().row
    assert at.abort(waits)
    assert not at.waiting
    assert at.abort(runs)
    assert row.sequence is None
    assert at.chunk(COSTS, 1.0) is None
    assert not at.abort(runs)


def test_chunks_take_little_longer_than_a_step_while_a_row_decodes():
    at = Scheduler(2)
    at.add(sequence(5))
    at.admit()
    at.add(sequence(*text(300)))
    at.admit()
    for seconds, size in ((1.0, 256), (0.03, 64), (0.0143, 64), (0.0142, 16), (0.001, 16)):
        chunk = at.chunk(COSTS, seconds)
        assert (chunk.size, len(chunk.tokens)) == (size, min(size, 299))
    at.free(at.rows[0])
    assert at.chunk(COSTS, 0.001).size == 256, "no row decodes that it could keep waiting"
    assert not at.read(at.chunk(COSTS, 0.001))
    last = at.chunk(COSTS, 1.0)
    assert (last.size, last.tokens) == (64, list(text(43, 257)))
    assert at.read(last)
    assert at.rows[1].tokens == list(text(300))
    assert at.rows[1].decoding


def test_prompts_are_read_together_where_that_takes_less():
    batch = PrefillBatch(3, 32, 80)

    def of(*sequences: Sequence, seconds: float = 0.02, step: float = 0.01) -> list[int]:
        at = Scheduler(5)
        at.add(*sequences)
        while at.admit():
            pass
        chunks = at.together(COSTS, batch, seconds, step)
        assert all(chunk.size == 32 for chunk in chunks)
        return [len(chunk.tokens) for chunk in chunks]

    three = [sequence(*text(50, 1000 * n)) for n in range(3)]
    assert of(*three) == [32, 32, 16]
    assert of(*(sequence(*text(50, 1000 * n)) for n in range(4))) == [32, 32, 16]
    assert of(*(sequence(*text(20, 1000 * n)) for n in range(5))) == [19, 19, 19]
    assert of(three[0]) == []
    assert of(*(sequence(*text(33, 1000 * n)) for n in range(2)), seconds=0.04) == []
    # Long prompts take less in the largest chunks.
    assert of(*(sequence(*text(2561, 10_000 * n)) for n in range(3))) == []
    # Who begins as another does, or wants log probabilities, has a turn of its own.
    assert of(sequence(*text(50)), sequence(*text(50), 7), sequence(*text(50, 1000))) == [32, 32]
    scored = sequence(*text(50, 2000), prompt_logprobs=1)
    assert of(scored, *(sequence(*text(50, 1000 * n)) for n in range(2))) == []
    # Rows that decode wait no longer than 1.4 steps take, or longer as more wait than decode.
    for decoding, seconds, found in (
        (2, 0.013, [32, 32]), (2, 0.015, []), (1, 0.015, [32, 32]), (1, 0.029, []),
    ):  # fmt: skip
        again = [sequence(*text(33, 1000 * n)) for n in range(2)]
        assert of(*map(sequence, range(decoding)), *again, seconds=seconds) == found


def test_steps_read_prompts_until_one_is_whole():
    def of(batch: PrefillBatch, steps: int, *sequences: Sequence) -> list[list[int]]:
        at = Scheduler(5)
        at.add(sequence(1), *sequences)
        while at.admit():
            pass
        held = [len(row.tokens) for row in at.rows]
        found = at.beside(batch, steps)
        assert [len(row.tokens) for row in at.rows] == held, "nothing is read yet"
        for step in found:
            for chunk in step:
                assert chunk.tokens == at_prompt(chunk)
                at.read(chunk)
        return [[len(chunk.tokens) for chunk in step] for step in found]

    def at_prompt(chunk) -> list[int]:
        prompt = chunk.row.sequence.request.prompt
        return list(prompt[chunk.start : chunk.start + len(chunk.tokens)])

    def texts(*lengths: int) -> list[Sequence]:
        return [sequence(*text(length, 1000 * n)) for n, length in enumerate(lengths)]

    one, two = PrefillBatch(1, 16, 16), PrefillBatch(2, 16, 24)
    assert of(one, 8, *texts(51)) == [[16], [16], [16], [2]]
    assert of(one, 2, *texts(51)) == [[16], [16]]
    assert of(one, 8, *texts(34, 20)) == [[16], [16], [1]], "the next one waits for its turn"
    assert of(two, 8, *texts(51, 23)) == [[16, 8], [16, 8], [16, 6]]
    assert of(two, 8, *texts(20, 100, 100)) == [[16, 8], [3, 16]]
    assert of(two, 8) == []
    # Who begins as another does, or wants log probabilities, has a turn of its own.
    assert of(two, 1, *texts(30), sequence(*text(30), 7)) == [[16]]
    assert of(two, 1, sequence(*text(30), prompt_logprobs=1), *texts(30)) == []


def test_whether_steps_read_prompts_depends_on_the_next_one():
    at = Scheduler(2)
    batch = PrefillBatch(1, 16, 16)
    assert not at.mixes(COSTS, batch, 0.005, 0.01), "there is none"
    at.add(sequence(1), sequence(*text(50)))
    while at.admit():
        pass
    assert at.mixes(COSTS, batch, 0.005, 0.01)
    assert not at.mixes(COSTS, batch, 0.02, 0.01), "chunks take less"
    at.free(at.rows[0])
    assert not at.mixes(COSTS, batch, 0.005, 0.01), "nobody decodes"
    scored = Scheduler(2)
    scored.add(sequence(1), sequence(*text(50), prompt_logprobs=1))
    while scored.admit():
        pass
    assert not scored.mixes(COSTS, batch, 0.005, 0.01)


def test_a_burst_that_reads_prompts_has_several_steps():
    at = Scheduler(2)
    at.add(sequence(1, max_new_tokens=50), sequence(*text(60)))
    at.admit()
    at.admit()
    assert at.burst(0.001, mixed=True) == 1, "its first token is due"
    at.rows[0].sequence.first_token = 1.0
    assert at.burst(0.001) == 1
    assert at.burst(0.001, mixed=True) == BURST


@pytest.mark.parametrize(
    ("mixed", "chunk", "step", "pays"),
    [
        ((16, 0.0079), (8, 0.009), 0.0096, True),  # waits for weights: 100M on two cores
        ((16, 0.0038), (8, 0.002), 0.0023, False),  # computes all the time
        ((16, 0.0141), (32, 0.0178), 0.0434, False),  # cheaper, but a prompt takes longer
        ((256, 0.0009), (512, 0.0093), 0.0074, True),  # 8B on an H100
        ((1, 0.0079), (1, 0.009), 0.0096, True),
        ((1, 0.0089), (1, 0.009), 0.0096, False),
        ((256, 0.040), (8, 0.005), 0.007, False),  # rows that decode would wait too long
    ],
)
def test_steps_read_prompts_where_that_takes_less(mixed, chunk, step, pays):
    assert mixing_pays(mixed, chunk, step) == pays


def test_what_a_row_holds_makes_its_chunks_smaller():
    costs = {8: (0.01, 1e-5), 16: (0.012, 2e-5)}
    at = Scheduler(2)
    at.add(sequence(5))
    at.admit()
    at.add(sequence(*text(1000)))
    at.admit()
    sizes = []
    while (chunk := at.chunk(costs, 0.0142)) is not None:
        sizes.append((at.rows[1].sequence.prefilled, chunk.size))
        at.read(chunk)
    assert [size for filled, size in sizes if filled <= 400] == [16] * 25
    assert {size for filled, size in sizes if filled > 400} == {8}


@pytest.mark.parametrize(
    ("tokens", "size"),
    [(1, 8), (8, 8), (9, 64), (64, 64), (65, 64), (120, 64), (200, 64), (250, 256), (900, 256)],
)
def test_a_prompt_is_read_in_the_chunks_that_take_least(tokens, size):
    assert fastest(tokens, {8: 0.02, 64: 0.03, 256: 0.115})[1] == size


def test_chunks_that_take_longer_than_smaller_ones_together_are_not_chosen():
    assert [fastest(tokens, {64: 0.03, 256: 0.2})[1] for tokens in (250, 256, 900)] == [64] * 3


def test_a_step_has_the_rows_that_decode_and_those_that_hold_least():
    at = Scheduler(8)
    assert at.decoding == ()
    for number in range(3):
        at.add(sequence(number))
        at.admit()
    at.add(sequence(*text(20)))
    at.admit()
    assert [row.number for row in at.decoding] == [0, 1, 2]
    plan = at.step(4)
    assert [row.number for row in plan.rows] == [0, 1, 2]
    assert plan.filling == (4,)  # row 3 holds a token, row 4 none
    assert len(at.step(8).filling) == 5


def test_a_request_that_may_not_join_waits_and_so_do_those_behind_it():
    at = Scheduler(3)
    for number in range(3):
        at.add(sequence(number, max_tpot_ms=1.0 if number == 1 else None))
    assert at.admit(lambda _: True).row.sequence.request.prompt == [0]
    assert at.admit(lambda request: request.max_tpot_ms is None) is None
    assert len(at.waiting) == 2
    assert at.admit(lambda request: True).row.sequence.request.prompt == [1]


def test_the_draft_lacks_what_was_given_without_it():
    """Of a row that takes over what another holds it reads the last token anew, for its logits."""
    at = Scheduler(2)
    at.add(sequence(*text(40)))
    row = at.admit().row
    read_all(at)
    assert (row.lag, row.drafted, row.current) == (40, 0, False)
    row.current = True  # a step that runs the draft was handed over
    assert row.lag == 0
    row.current, row.drafted = False, 40  # then one that does not
    at.step(1, window=4)
    at.step(1, window=4)
    assert row.lag == 8
    at.postprocess(row, [1, 2], window=4)
    at.postprocess(row, [3], window=4)
    assert row.lag == 3
    at.add(sequence(*text(30), 99))
    other = at.admit()
    assert (other.source, other.common, other.row.drafted) == (row.number, 30, 29)
    row.current = True
    at.free(other.row)
    at.add(sequence(*text(40), 1, 2, 3, 77))
    assert at.admit().row.drafted == 42


def test_a_burst_has_as_many_steps_as_there_is_time_for_and_as_its_rows_need():
    at = Scheduler(3)
    at.add(sequence(1, max_new_tokens=20))
    row = at.admit().row
    assert at.burst(0.001) == 1  # its first token is due
    at.step(1)
    assert at.burst(0.001) == 16
    assert at.burst(0.001, 4) == 4
    assert at.burst(0.009) == 2
    assert at.burst(0.03) == 1
    row.sequence.first_token = 1.0
    row.sequence.statistics.count_steps([4], [7], [0])
    at.postprocess(row, [5, 6, 7, 8])
    assert at.burst(0.001) == 4  # of four tokens each, as the first
    at.step(1, 3)
    assert at.burst(0.001) == 1
    at.add(sequence(*text(20)))
    at.admit()
    assert at.burst(0.0001) == 1  # a prompt is read
    at.postprocess(row, [9], 3, 1, 1)
    assert (row.sequence.in_flight, row.sequence.left) == (0, 15)


def test_a_burst_is_a_small_part_of_what_may_end_at_any_time():
    """Unless it is alone: then a burst ends with it."""
    at = Scheduler(2)

    def begun(**options) -> Row:
        at.add(sequence(1, max_new_tokens=500, **options))
        row = at.admit().row
        row.sequence.first_token = 1.0
        return row

    row = begun()
    assert at.burst(0.001) == 16
    begun()
    assert at.burst(0.001) == 8  # of the 128 steps that are believed at first
    for _ in range(30):
        for _ in range(32):
            row.sequence.statistics.count_steps([1], [0], [0])
        at.free(row)
        row = begun()
    assert at.burst(0.001) == 2
    for row in at.rows:
        at.free(row)
        begun(ignore_eos=True)
    assert at.burst(0.001) == 16


def test_a_row_takes_no_step_that_cannot_give_it_a_token():
    """For a row that may still get two, two steps fly; one more once they gave too few."""
    at = Scheduler(2)
    at.add(sequence(1, max_new_tokens=2))
    row = at.admit().row
    at.add(sequence(2, max_new_tokens=9))
    at.admit()
    assert [len(at.step(2).rows) for _ in range(3)] == [2, 2, 1]
    at.postprocess(row, [5])
    assert not row.decoding
    at.postprocess(row, [])
    assert row.decoding
    assert (row.tokens, row.sequence.left) == ([1, 5], 1)


def test_prompts_that_come_at_once_are_read_once():
    at = Scheduler(4)
    prompt = text(100)
    for _ in range(3):
        at.add(sequence(*prompt))
    at.add(sequence(*text(100, 500)))
    assert [at.admit().source for _ in range(4)] == [None] * 4
    read, copies = 0, []
    while True:
        copies.append(at.prefix())
        if (chunk := at.chunk(COSTS, 1.0)) is None:
            break
        read += len(chunk.tokens)
        at.read(chunk)
    assert read == 99 + 1 + 1 + 99
    taken = [each for each in copies if each is not None]
    assert [(each.row.number, each.source, each.common) for each in taken] == [
        (1, 0, 99),
        (2, 0, 99),
    ]
    assert [row.tokens for row in at.rows] == [list(prompt)] * 3 + [list(text(100, 500))]


def test_what_another_may_need_is_not_written_over():
    """A row of which a little is copied stays while another is free, though that was used later."""
    at = Scheduler(2)
    for prompt in (text(40), (999,)):
        at.add(sequence(*prompt))
        row = at.admit().row
        read_all(at)
        at.free(row)
    at.add(sequence(*text(16), 7))
    admission = at.admit()
    assert (admission.source, admission.common, admission.row.number) == (0, 16, 1)


def test_a_prompt_begins_with_the_longest_text_that_a_row_holds():
    at = Scheduler(3)
    for first in (0, 500):
        at.add(sequence(*text(40, first)))
        at.admit()
    read_all(at)
    at.add(sequence(*text(30), 999, 998))
    admission = at.admit()
    assert (admission.source, admission.common, admission.row.number) == (0, 30, 2)
    assert admission.row.tokens == list(text(30))
    at.free(at.rows[1])
    at.add(sequence(*text(40, 500)))
    admission = at.admit()
    assert (admission.source, admission.common) == (1, 39), "its last token is read anew"
    assert admission.row.number == 1, "which held little else"
    at.free(at.rows[0])
    at.add(sequence(*text(15), 7))
    assert at.admit().source is None, "too little to be worth a copy"


def test_a_prompt_whose_log_probabilities_are_asked_for_is_read_whole():
    at = Scheduler(2)
    at.add(sequence(*text(40)))
    at.admit()
    read_all(at)
    at.add(sequence(*text(40), prompt_logprobs=0))
    assert at.admit()[1:] == (None, 1)
    without = Scheduler(2, reuses=False)
    for _ in range(2):
        without.add(sequence(*text(40)))
        assert without.admit().source is None


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90)), max_size=60))
def test_no_row_and_no_place_is_lost_whatever_happens(events):
    """Arrivals, chunks, ends and departures in any order; then everybody leaves."""
    at, here = Scheduler(3, max_requests=5), []
    for kind, number in events:
        if kind == 0:
            try:
                at.add(own := sequence(*text(number)))
                here.append(own)
            except QueueFullError:
                assert len(at.waiting) == 5
        elif kind == 1 and (chunk := at.chunk(COSTS, 0.02)) is not None:
            at.read(chunk)
        elif kind == 2 and here:
            at.abort(here.pop(number % len(here)))
        elif kind == 3:
            ended = [row for row in at.rows if row.decoding]
            if ended:
                here.remove(ended[number % len(ended)].sequence)
                at.free(ended[number % len(ended)])
        while at.admit() is not None:
            pass
        assert len(at.running) + len(at.waiting) == len(here)
        assert len(at.running) == 3 or not at.waiting
        assert {*at.running, *at.waiting} == {*here}
    for each in here:
        assert at.abort(each)
    assert len(at.running) == len(at.waiting) == 0
    assert at.chunk(COSTS, 1.0) is None
    assert at.decoding == ()


def test_common_prefixes():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0
    assert common_prefix([3], [1]) == 0
    for same in range(9):
        assert common_prefix([1] * same + [2] * 3, [1] * same + [3] * 5) == same
