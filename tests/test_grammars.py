"""Texts under grammars: their distribution through trees, and texts that match."""

import asyncio
import copy
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.base import grammars
from specjax.base.sampling import Sampling
from specjax.decoding import stepping
from specjax.draft.best_first import BestFirstDrafter
from specjax.draft.growth import Growth
from specjax.draft.ngram import pack
from specjax.draft.plain import PlainDrafter
from specjax.draft.prompt_lookup import TextDrafter
from specjax.draft.static import ExpansionDrafter
from specjax.draft.switching import SwitchingDrafter
from specjax.draft.token_recycling import RecycleDrafter
from specjax.engine.request import Request
from specjax.goodput.policy import Decision, StepShape
from specjax.measure.distribution_tests import g_test
from specjax.trees.construction import DISTINCT
from specjax.trees.tree import TreeShape
from tests.cases import slow_but
from tests.engines import collected, ids_of, running, served
from tests.pairs import alone, generate, head, near, varied_model
from tests.switched import switching_of

VOCABULARY, END, TOKENS, ROWS, BATCHES = 12, 0, 3, 512, 4
LEVEL = 1e-6
PROMPT = [7, 3, 9]


def may_follow(text: tuple[int, ...]) -> set[int]:
    """A made-up grammar: no token is a multiple of its place, and none is the one before; a text
    that came to 5 ends there.
    """
    if text and text[-1] == 5:
        return {END}
    own = {t for t in range(1, VOCABULARY) if t % (2 + len(text)) and (not text or t != text[-1])}
    return own | ({END} if len(text) > 1 else set())


class Table:
    """Follows `may_follow`, and says when it is asked for what it may not be."""

    def __init__(self) -> None:
        self.text: list[int] = []

    def words(self) -> np.ndarray:
        bits = np.zeros(32, np.uint8)
        bits[list(may_follow(tuple(self.text)))] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def consume(self, tokens) -> int:
        for number, token in enumerate(tokens):
            assert token != END
            if token not in may_follow(tuple(self.text)):
                return number
            self.text.append(token)
        return len(tokens)

    def copy(self) -> "Table":
        return copy.deepcopy(self)

    def fail(self, reason: str) -> None:
        raise AssertionError(reason)

    def reset(self) -> None:
        self.text = []

    def forced(self) -> list[int]:
        found = list[int]()
        while END not in found and len(own := may_follow((*self.text, *found))) == 1:
            found += own
        return found

    def is_end(self, token: int) -> bool:
        return token == END

    def error(self) -> str:
        return ""

    def matcher(self) -> "Table":
        return Table()


@functools.cache
def target() -> specjax.Model:
    return varied_model(
        vocab_size=VOCABULARY, eos_ids=(END,), hidden_size=16, intermediate_size=16, num_heads=2,
        num_kv_heads=1,
    )  # fmt: skip


def probs_after(texts: list[tuple[int, ...]]) -> np.ndarray:
    """The target's distribution among the allowed tokens after texts, by one pass of each."""
    tokens = jnp.asarray([PROMPT + list(text) for text in texts], jnp.int32)
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    logits = np.asarray(
        stepping.unembed(target(), stepping.trunk(target(), tokens, at, None, None).x)
    )
    logits = logits.T.reshape(*tokens.shape, -1)[:, -1].astype(float) / 1.3
    for own, text in zip(logits, texts, strict=True):
        own[[t for t in range(VOCABULARY) if t not in may_follow(text)]] = -np.inf
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


@functools.cache
def expected() -> dict[tuple[int, ...], float]:
    """The probability of every text, of three tokens or ended before."""
    whole, open_texts = {}, {(): 1.0}
    for place in range(TOKENS):
        found = {}
        for text, probs in zip(open_texts, probs_after([*open_texts]), strict=True):
            for token in may_follow(text):
                longer = (*text, token)
                ended = token == END or place == TOKENS - 1
                (whole if ended else found)[longer] = open_texts[text] * probs[token]
        open_texts = found
    return whole


def best_first(budget: int = 3) -> BestFirstDrafter:
    return BestFirstDrafter(near(target(), 1, 0.4), jnp.ones(2), Growth(budget, 1, 2, 2, 0.9))


def of_text() -> TextDrafter:
    """Three successors of each token, most of which are forbidden somewhere."""
    tokens = (np.arange(VOCABULARY)[:, None] + np.array([1, 4, 5])) % VOCABULARY
    table = pack(np.zeros((0, 2), int), tokens, np.log(np.full(tokens.shape, 0.3)))
    return TextDrafter(jnp.full(3, 0.4), table, Growth(5, 1, 2, 3, 0.9), VOCABULARY)


CASES = {
    "plain": (lambda: None, "auto"),
    "chain, block": (lambda: alone(near(target(), 1, 0.4), (1, 1)), "block"),
    "chain, naive": (lambda: alone(near(target(), 1, 0.4), (1, 1)), "naive"),
    "drawn, multi-step": (lambda: alone(near(target(), 1, 0.4), (2, 1)), "multi-step"),
    "distinct, recursive": (
        lambda: alone(near(target(), 1, 0.4), (3, 1), children=DISTINCT), "recursive"
    ),
    "distinct, traversal": (
        lambda: alone(near(target(), 1, 0.4), (3, 2), children=DISTINCT), "traversal"
    ),
    "pool, multi-step": (
        lambda: ExpansionDrafter.of([near(target(), 1, 0.4), near(target(), 2, 0.8)], (1, 1)),
        "multi-step",
    ),
    "stacked pool": (
        lambda: ExpansionDrafter.of(
            [near(target(), 1, 0.4), near(target(), 2, 0.8)], (1, 1), stack=True
        ),
        "multi-step",
    ),
    "best first, naive": (best_first, "naive"),
    "best first, one-hot": (best_first, "one-hot"),
    "of the text, naive": (of_text, "naive"),
    "of the text, one-hot": (of_text, "one-hot"),
    "recycled": (
        lambda: RecycleDrafter(jnp.ones(2), TreeShape((2, 1)), VOCABULARY), "naive"
    ),
    "a head": (lambda: alone(head(target(), 3), (2, 1)), "multi-step"),
}  # fmt: skip


def found_texts(drafter, rule: str, seed: int) -> tuple[list[tuple[int, ...]], float]:
    made = generate(
        target(), drafter, [PROMPT] * ROWS, key=jax.random.key(seed), max_new_tokens=TOKENS,
        sampling=Sampling(temperature=1.3), verify=rule, grammar=Table(), stop_at_eos=False,
    )  # fmt: skip
    texts = zip(made.tokens.tolist(), made.lengths, strict=True)
    return [tuple(own[:length]) for own, length in texts], made.tokens_per_step.mean()


@pytest.fixture(params=["as here", "by callbacks"])
def rows(request, monkeypatch) -> int:
    """Of a batch, so that none is another's program; also as on a GPU or TPU: jax calls back."""
    if request.param == "as here":
        return 2
    monkeypatch.setattr(grammars, "host_call_unable", lambda: "this is a test")
    return 3


@pytest.mark.parametrize("name", slow_but(CASES, "drawn, multi-step", "best first, one-hot"))
def test_texts_are_distributed_as_the_targets_among_the_allowed_tokens(name):
    make, rule = CASES[name]
    cells = {text: cell for cell, text in enumerate(expected())}
    found, rates = [], []
    for seed in range(BATCHES):
        texts, rate = found_texts(make(), rule, seed)
        found += [cells[text] for text in texts]
        rates.append(rate)
    p = np.array([*expected().values()])
    assert p.sum() == pytest.approx(1)
    assert g_test(np.array(found), p).p_value > LEVEL
    assert (np.mean(rates) > 1.1) == (name != "plain")
    assert grammars.num_rows() == 0


def completed(tree: dict[int, tuple[int, int]], text: list[int], room: int, deepest: int = 9):
    """Nodes (slot, token, parent, depth) of a tree, given as (token, parent) by slot, once it is
    within the grammar; and the masks.
    """
    number = grammars.add(Table())
    tokens, parents = np.zeros((2, 1, room), np.int32)
    parents[:] = grammars.NO_NODE
    for slot, node in tree.items():
        tokens[0, slot], parents[0, slot] = node
    recent = jnp.asarray([text + [0] * (4 - len(text))], jnp.int32)
    own = grammars.Grammars(*jnp.asarray([[number], [len(text)]], jnp.int32), recent,
                            jnp.asarray([len(text)], jnp.int32))  # fmt: skip
    most = jnp.asarray([deepest], jnp.int32)
    found = own.completed(jnp.asarray(tokens), jnp.asarray(parents), most, VOCABULARY)
    grammars.remove(number)
    fields = [np.asarray(x)[0].tolist() for x in found[:4]]
    there = [node for node in zip(*fields, strict=True) if node[2] != grammars.NO_NODE]
    masks = np.asarray(grammars.allowed(found.words, VOCABULARY))[0]
    return there, [set(np.flatnonzero(own).tolist()) for own in masks]


NONE = grammars.NO_NODE


@pytest.mark.parametrize(
    ("text", "tree", "room", "deepest", "expected"),
    [
        ([], {}, 4, 9, []),
        # 4 is a multiple of its place, and so nothing is below it; 5 ends the text.
        ([], {0: (3, -1), 1: (4, -1), 2: (5, 0), 3: (1, 1)}, 4, 9,
         [(0, 3, -1, 1), (2, 5, 0, 2), (NONE, END, 1, 3)]),
        ([], {0: (3, -1), 1: (5, 0)}, 2, 9, [(0, 3, -1, 1), (1, 5, 0, 2)]),
        ([], {0: (5, -1)}, 3, 1, [(0, 5, -1, 1)]),
        # What must come takes the place of the last that may not, but not of what is above it.
        ([3, 5], {0: (1, -1), 1: (7, -1)}, 2, 9, [(NONE, END, -1, 1)]),
        ([3, 5], {0: (END, -1)}, 1, 9, [(0, END, -1, 1)]),
        ([3, 5], {}, 1, 0, []),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("rows")
def test_chosen_trees_are_completed_within_a_grammar(text, tree, room, deepest, expected):
    found, masks = completed(tree, text, room, deepest)
    assert found == expected
    paths = [()]
    for _, token, parent, depth in found:
        paths.append((*paths[parent + 1], token))
        assert len(paths[-1]) == depth
    for path, own in zip(paths, masks, strict=False):
        ended = END in path
        assert own == (set(range(VOCABULARY)) if ended else may_follow((*text, *path)))


def test_greedy_texts_follow_the_grammar_however_masks_are_asked_for(rows):
    """One token after the other, by passes over the whole text."""
    text = ()
    while len(text) < 6 and (not text or text[-1] != END):
        text = (*text, int(probs_after([text])[0].argmax()))
    for drafter in (None, alone(near(target(), 1, 0.4), (1, 1)), of_text()):
        made = generate(
            target(), drafter, [PROMPT] * rows, max_new_tokens=len(text), sampling=Sampling(),
            grammar=[Table(), *[None] * (rows - 1)], stop_at_eos=False,
        )  # fmt: skip
        assert tuple(made.tokens[0, : made.lengths[0]].tolist()) == text


def test_what_must_come_takes_the_place_of_other_nodes():
    """Here in one way: 1, 2 and an end. Others came first, and there is no room for all."""

    class OneWay(Table):
        def words(self) -> np.ndarray:
            bits = np.zeros(32, np.uint8)
            bits[[1, 2, 7] if len(self.text) < 2 else [END]] = 1
            return np.packbits(bits, bitorder="little").view(np.int32)

        def consume(self, tokens) -> int:
            self.text += tokens
            return len(tokens)

        def forced(self) -> list[int]:
            return [1, 2, END][len(self.text) :] if set(self.text) <= {1, 2} else []

    row = grammars._Row(OneWay())

    def tree(place):
        found = grammars._Tree(place, 3, 9)
        for slot, (above, token) in enumerate([((), 7), ((), 1), ((1,), 7)]):
            assert found.add(above, token, slot)
        found.fill()
        return found.nodes()

    assert row.ask(0, [], tree) == [((1,), 1), ((1, 2), NONE), ((1, 2, END), NONE)]


ENGINES = {
    "chain": lambda: alone(near(target(), 1, 0.4), (1, 1)),
    "tree": lambda: alone(near(target(), 1, 0.4), (2, 1)),
    "best first": best_first,
    "any setting": lambda: switching_of(near(target(), 1, 0.4)),
}


@pytest.fixture(scope="module", params=slow_but(ENGINES, "chain"))
def engine(request):
    with running(target(), ENGINES[request.param](), rows=4, max_model_len=64) as found:
        yield found


def greedy_texts(prompts: list[list[int]], followed: list[bool], new: int) -> list[list[int]]:
    """Plain decoding of each, by `generate`."""
    made = generate(
        target(), None, prompts, max_new_tokens=new, sampling=Sampling(), stop_at_eos=False,
        grammar=[Table() if own else None for own in followed],
    )  # fmt: skip
    return [own[:n] for own, n in zip(made.tokens.tolist(), made.lengths, strict=True)]


def test_rows_with_and_without_grammars_run_beside_each_other(engine):
    drawn, new = np.random.default_rng(0), 9
    prompts = [drawn.integers(1, VOCABULARY, drawn.integers(1, 9)).tolist() for _ in range(24)]
    followed = (drawn.random(24) < 0.5).tolist()
    requests = [
        Request(prompt=text, max_new_tokens=new, ignore_eos=True, grammar=Table() if own else None)
        for text, own in zip(prompts, followed, strict=True)
    ]
    found = served(engine, requests)
    assert [ids_of(events) for events in found] == greedy_texts(prompts, followed, new)
    for events, own in zip(found, followed, strict=True):
        ended = own and ids_of(events)[-1] == END
        assert events[-1].finish_reason == ("stop" if ended else "length")
    assert grammars.num_rows() == 0


def test_texts_through_an_engine_are_distributed_as_the_targets_among_the_allowed(engine):
    """Beside others that have no grammar, and some that leave."""
    cells = {text: cell for cell, text in enumerate(expected())}
    asked = Request(prompt=PROMPT, max_new_tokens=TOKENS, temperature=1.3, grammar=Table())
    mate = Request(prompt=PROMPT, max_new_tokens=9, temperature=1.0)

    async def drawn() -> list[tuple[int, ...]]:
        room = asyncio.Semaphore(32)

        async def one(request: Request, leaves: bool) -> tuple[int, ...]:
            async with room:
                stream = engine.submit(request)
                if leaves:
                    await stream.__anext__()
                    stream.abort()
                return tuple(ids_of(await collected(stream)))

        leaving = [one(own, n % 2 > 0) for n, own in enumerate([mate, asked, mate, asked] * 20)]
        every = await asyncio.gather(*(one(asked, False) for _ in range(1200)), *leaving)
        return every[:1200]

    found = np.array([cells.get(text, -1) for text in asyncio.run(drawn())])
    assert found.min() >= 0
    assert g_test(found, np.array([*expected().values()])).p_value > LEVEL


@pytest.mark.slow
def test_a_request_may_come_before_the_engine_begins():
    engine = specjax.Engine(target(), None, rows=2, max_model_len=64)

    async def both() -> list[list[int]]:
        asked = [Request(prompt=PROMPT, max_new_tokens=5, grammar=own) for own in (Table(), None)]
        sequences = engine.submit_all(asked)
        await asyncio.to_thread(engine.start)
        return [ids_of(await collected(each)) for each in sequences]

    try:
        first, second = asyncio.run(both())
    finally:
        engine.close()
    assert first == greedy_texts([PROMPT], [True], 5)[0]
    assert second
    assert grammars.num_rows() == 0


@pytest.mark.slow
def test_programs_that_come_later_hold_rows_to_grammars_too():
    drafter = SwitchingDrafter.of(
        {"none": PlainDrafter(VOCABULARY), "chain:1": alone(near(target(), 1, 0.4), (1,))}
    )
    later = StepShape("chain:1", 1, 3)
    request = Request(prompt=PROMPT, max_new_tokens=3, grammar=Table())
    with running(target(), drafter, rows=1, max_model_len=64) as engine:
        served(engine, [request])
        programs = engine._grammars
        instead = programs.instead(Decision(later, (1,)))
        assert (instead.shape, instead.depths) == (("none", 1, 1), (0,))
        programs.add([later])
        end = time.monotonic() + 120
        while programs.instead(Decision(later, (1,))).shape != later:
            assert time.monotonic() < end
            time.sleep(0.01)
        served(engine, [request])
