"""A conversation: each reply is plain decoding's, and of each prompt only what is new is read."""

import jax
import numpy as np
import pytest

import specjax
from specjax.base.prefix import common_prefix
from specjax.base.sampling import Sampling
from specjax.decoding import conversation as conversations
from specjax.decoding.conversation import Conversation
from specjax.draft.plain import PlainDrafter
from tests.cases import slow_among
from tests.pairs import KEY, alone, block_draft, generate, head, varied_model
from tests.test_engine import DRAFTERS

HEADS = {
    "head": lambda target: alone(head(target, 1, steps=1), (1, 1)),
    "block": lambda target: alone(block_draft(target, 1, steps=1), (1, 1)),
}
"""Drafts that read hidden states."""


@pytest.fixture(scope="module")
def target():
    return varied_model()


@pytest.fixture(scope="module")
def conversation(target):
    """One for all that need no drafts: its programs are compiled once."""
    return Conversation(target, max_model_len=100)


def plain(target, prompt, key=KEY, **options):
    """The text that `generate` gives without a draft."""
    made = generate(target, None, [prompt], key=key, **({"max_new_tokens": 9} | options))
    return made.tokens[0, : made.lengths[0]].tolist()


def said(steps) -> list[int]:
    return [token for step in steps for token in step.tokens[0, : step.count[0]].tolist()]


def drawn(seed, length):
    return np.random.default_rng(seed).integers(0, 64, length).tolist()


@pytest.mark.parametrize(
    "name",
    slow_among(["none", "pool", "best first", "hybrid", *HEADS], "pool", "hybrid", *HEADS),
)
def test_every_turn_is_plain_decoding_and_reads_what_is_new(name, target, monkeypatch):
    """A prompt that goes on, one that turns off earlier, the same again, and one of its own."""
    monkeypatch.setattr(conversations, "CHUNK", 8)
    if name == "none":
        monkeypatch.setattr(conversations, "LARGE_CHUNK", 12)
    drafter = (DRAFTERS | HEADS)[name](target)
    conversation = Conversation(target, drafter, max_model_len=100)
    conversation.compile()
    first = drawn(0, 33)
    reply = plain(target, first, stop_at_eos=False)
    second = [*first, *reply, 5, 9, 2]
    third = [*second[:36], 7, 7, 1]
    turns = [(first, 0), (second, 42), (third, 36), (third, 38), ([3, *third], 0)]
    for prompt, cached in turns:
        made = said(conversation.reply(KEY, prompt, max_new_tokens=9, stop_at_eos=False))
        assert made == plain(target, prompt, stop_at_eos=False)
        assert conversation.cached == cached
        assert conversation.tokens == prompt + made


def test_a_reply_samples_as_generate_does(target, conversation):
    sampling = Sampling(0.9, top_k=12, repetition_penalty=1.2)
    prompt = drawn(1, 40)
    for key in jax.random.split(jax.random.key(3), 2):
        made = said(conversation.reply(key, prompt, max_new_tokens=9, sampling=sampling))
        assert made == plain(target, prompt, key=key, sampling=sampling, stop_at_eos=True)
    assert conversation.cached == 39
    assert said(conversation.reply(KEY, prompt, max_new_tokens=9)) == plain(
        target, prompt, stop_at_eos=True
    )


def test_what_was_stopped_is_held_and_gone_on_with(target, conversation):
    """While a prompt is read, and while a reply is written; and what was stopped stays so."""
    prompt = drawn(2, 50)
    reading = conversation.read(prompt)
    assert next(reading) == 17
    assert conversation.tokens == prompt[:33]
    steps = conversation.reply(KEY, prompt, max_new_tokens=30, stop_at_eos=False)
    assert conversation.cached == 33
    assert list(reading) == []
    begun = said([next(steps), next(steps)])
    assert conversation.tokens == prompt + begun
    assert said(conversation.reply(KEY, [*prompt, *begun], max_new_tokens=9)) == plain(
        target, [*prompt, *begun], stop_at_eos=True
    )
    assert conversation.cached == len(prompt) + len(begun) - 1
    assert list(steps) == []
    conversation.forget()
    assert conversation.tokens == []


def test_an_interrupted_program_leaves_nothing_that_is_wrong(target, conversation, monkeypatch):
    prompt = drawn(4, 40)
    for _ in conversation.read(prompt):
        pass
    steps = conversation.write(KEY, max_new_tokens=9)
    with monkeypatch.context() as patched:
        patched.setattr("jax.device_get", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(steps)
    assert conversation.tokens == []
    assert said(conversation.reply(KEY, prompt, max_new_tokens=9)) == plain(
        target, prompt, stop_at_eos=True
    )
    assert conversation.cached == 0


def test_a_draft_that_cannot_be_shortened_reads_all_unless_the_text_goes_on(target, monkeypatch):
    monkeypatch.setattr(PlainDrafter, "truncate", lambda *_: None)
    conversation = Conversation(target, max_model_len=100)
    conversation.compile()
    prompt = drawn(5, 40)
    made = said(conversation.reply(KEY, prompt, max_new_tokens=9, stop_at_eos=False))
    assert made == plain(target, prompt, stop_at_eos=False)
    for after, cached in (([*prompt, *made, 5], 49), ([*prompt, 1], 0)):
        made = said(conversation.reply(KEY, after, max_new_tokens=9, stop_at_eos=False))
        assert (made, conversation.cached) == (plain(target, after, stop_at_eos=False), cached)


def test_what_a_conversation_cannot_do_is_said(target):
    for length in (1, 129):
        with pytest.raises(ValueError, match=rf"{length}; it must lie in \[2, 128\]"):
            Conversation(target, max_model_len=length)
    conversation = specjax.Conversation(target, max_model_len=20)
    refused = {
        "there is no prompt to reply to": lambda: conversation.write(KEY),
        "prompt 0 is empty": lambda: conversation.read([]),
        "prompt 0 holds token 64": lambda: conversation.read([64]),
        "the prompt has 20 tokens and 1 are asked for.* context of 20": (
            lambda: conversation.read([1] * 20)
        ),
    }
    for sentence, work in refused.items():
        with pytest.raises(ValueError, match=sentence):
            work()
    for new, sentence in ((0, "is 0; it must be at least 1"), (18, "3 tokens and 18 are asked")):
        with pytest.raises(ValueError, match=sentence):
            conversation.reply(KEY, [1, 2, 3], max_new_tokens=new)


def test_the_common_prefix_of_a_prompt_ends_before_its_last_token(conversation):
    for _ in range(2):
        list(conversation.read([1, 2, 3]))
    assert conversation.cached == common_prefix([1, 2, 3], [1, 2]) == 2
