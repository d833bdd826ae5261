"""Text as it comes is the text of all tokens; stops are found across them, and nothing leaks."""

import functools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specjax.checkpoints.detokenizer import (
    INCOMPLETE,
    Detokenizer,
    SpecialToken,
    SpecialTokens,
    TokenTexts,
)
from specjax.checkpoints.files import BUNDLED
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.engine.request import Logprob
from specjax.server.choices import Delta, TextUntilStop
from specjax.server.completions import logprobs_of
from specjax.server.stops import StopStrings, sequences_of

WORDS = ["▁", "a", "b", "▁a", "▁the", "the", "é", "你", "\n", ".", "ab", "▁▁", "ing", "�"]


def sentencepiece_like(decoder) -> PreTrainedTokenizerFast:
    """A tokenizer of words and bytes as LLaMA 2's, Mistral's and Gemma's are."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocabulary = {name: number for number, name in enumerate(names)}
    made = Tokenizer(
        models.BPE(vocabulary, [("a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    made.decoder = decoder
    made.add_special_tokens([AddedToken(name, special=True) for name in names[:3]])
    made.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def word_pieces() -> PreTrainedTokenizerFast:
    names = ["[UNK]", "[CLS]", "##ing", "##s", "play", "it", "'", "do", "n't", "."]
    made = Tokenizer(models.WordPiece({name: n for n, name in enumerate(names)}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece("##", cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", cls_token="[CLS]")


def word_ends() -> PreTrainedTokenizerFast:
    names = ["<unk>", "a</w>", "b", "the</w>", "c"]
    made = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, [], unk_token="<unk>"))
    made.decoder = decoders.BPEDecoder("</w>")
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


BUILDERS = {
    "bundled": lambda: tokenizer_of(BUNDLED / "target"),
    "llama": lambda: sentencepiece_like(
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    ),
    "metaspace": lambda: sentencepiece_like(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", "first")])
    ),
    "gemma": lambda: sentencepiece_like(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    ),
    "word pieces": word_pieces,
    "word ends": word_ends,
}


@functools.cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    return BUILDERS[name]()


@functools.cache
def texts(name: str) -> TokenTexts:
    return TokenTexts(tokenizer(name))


@functools.cache
def single_bytes(name: str) -> list[int]:
    """Tokens of one byte that is no character: those that break texts most often."""
    own = texts(name)
    return [n for n in sorted(own.visible) if own.text_of(n).startswith("bytes:")] or [0]


def ids(name: str) -> st.SearchStrategy[list[int]]:
    """Tokens of all kinds, special, unknown and broken ones more often than by chance."""
    any_token = st.integers(0, len(tokenizer(name)) + 3)
    return st.lists(st.one_of(any_token, st.sampled_from(single_bytes(name)), st.just(0)))


def whole_text(tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """The text of all tokens behind a prompt, decoded at once."""

    def decoded(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    return decoded([*prompt, *tokens])[len(decoded(prompt).rstrip(INCOMPLETE)) :]


def pieces(name: str, prompt: list[int], tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(texts(name), prompt)
    return [*(detokenizer.add(token) for token in tokens), detokenizer.flush()]


@pytest.mark.parametrize("name", BUILDERS)
def test_pieces_are_the_text_of_all_tokens(name):
    @settings(max_examples=120, deadline=None)
    @given(ids(name), ids(name), st.integers(1, 40))
    def check(prompt, tokens, times):
        tokens = tokens * times if len(tokens) < 10 else tokens
        whole = whole_text(tokenizer(name), prompt, tokens)
        assert "".join(pieces(name, prompt, tokens)) == whole

    check()


@pytest.mark.parametrize("name", ["bundled", "llama", "metaspace", "gemma"])
@pytest.mark.parametrize("text", ["naïve – 你好 👩‍👩‍👧 ok\n\n  é", "ру́сский\tтекст", "🏳️‍🌈" * 8])
def test_pieces_hold_whole_characters_only(name, text):
    tokens = tokenizer(name)(text, add_special_tokens=False).input_ids
    for cut in range(len(tokens)):
        made = pieces(name, tokens[:cut], tokens[cut:])
        assert INCOMPLETE not in "".join(made)
        assert all(piece.encode() is not None for piece in made)
    assert "".join(pieces(name, [], tokens)) == tokenizer(name).decode(
        tokens, clean_up_tokenization_spaces=False
    )


def test_invalid_bytes_come_out_before_the_end():
    own = single_bytes("bundled")
    tokens = [own[-1]] * 10
    detokenizer = Detokenizer(texts("bundled"), [])
    given_before = "".join(map(detokenizer.add, tokens))
    assert given_before == INCOMPLETE * 9
    assert detokenizer.flush() == INCOMPLETE


def decoded_lengths(monkeypatch, own: TokenTexts) -> list[int]:
    """How many tokens each further call decodes."""
    lengths = []

    def decode(tokens, **options):
        lengths.append(len(tokens))
        return TokenTexts.decode(own, tokens, **options)

    monkeypatch.setattr(own, "decode", decode)
    return lengths


@pytest.mark.parametrize("name", ["bundled", "llama"])
def test_a_token_costs_the_same_however_long_the_text_is(name, monkeypatch):
    tokens = tokenizer(name)("def f(x): return 你 + x\n", add_special_tokens=False).input_ids * 400
    own = TokenTexts(tokenizer(name))
    lengths = decoded_lengths(monkeypatch, own)
    for prompt in ([], tokens):
        detokenizer, before = Detokenizer(own, prompt), len(lengths)
        for token in tokens[:300]:
            detokenizer.add(token)
        assert 100 < len(lengths) - before <= 400
    assert max(lengths) < 40


def test_long_runs_of_byte_tokens_are_decoded_once(monkeypatch):
    own = TokenTexts(tokenizer("llama"))
    lengths = decoded_lengths(monkeypatch, own)
    detokenizer, names = Detokenizer(own, []), tokenizer("llama").get_vocab()
    for _ in range(5000):
        assert detokenizer.add(names["<0xE4>"]) == ""
        detokenizer.unsettled()
    assert detokenizer.add(names["ing"]) == INCOMPLETE * 5000 + "ing"
    assert sum(lengths) < 5100 + 128 * 128


def test_unsettled_characters_are_whole():
    detokenizer = Detokenizer(texts("llama"), [])
    byte = 3
    assert detokenizer.add(byte + 0x0A) == ""
    assert detokenizer.unsettled() == "\n"
    assert detokenizer.add(byte + 0xE4) == ""
    assert detokenizer.unsettled() == ""
    detokenizer.add(byte + 0xBD)
    detokenizer.add(byte + 0xA0)
    assert detokenizer.unsettled() == "\n你"
    assert detokenizer.flush() == "\n你"


def test_tokens_by_themselves():
    own, bundled = texts("bundled"), tokenizer("bundled")
    for text in (" return", "\n", "é"):
        for token in bundled(text).input_ids:
            alone = own.text_of(token)
            assert alone.startswith("bytes:\\x") or alone.encode() == own.bytes_of(token)
        assert b"".join(map(own.bytes_of, bundled(text).input_ids)) == text.encode()
    assert own.text_of(0) == "<|endoftext|>"
    llama = texts("llama")
    names = tokenizer("llama").get_vocab()
    assert llama.text_of(names["▁the"]) == " the"
    assert llama.text_of(names["the"]) == "the"
    assert llama.text_of(names["<0xE4>"]) == "bytes:\\xe4"
    assert llama.bytes_of(names["<0xE4>"]) == b"\xe4"
    assert llama.text_of(names["<0x0A>"]) == "\n"


def test_two_tokens_of_one_text_have_names_of_their_own():
    """The token that came has the text, else the likelier one; nothing is lost."""
    names, own = tokenizer("llama").get_vocab(), texts("llama")
    letter, byte, other = names["a"], names["<0x61>"], names["b"]
    start, end = names["<0x62>"], names["▁"]
    top = ((letter, -0.5), (other, -1.0), (byte, -3.5), (start, -4.0))
    for token, logprob, expected in (
        (byte, -3.5, {"a": -3.5, f"token_id:{letter}": -0.5, "b": -1.0, f"token_id:{start}": -4.0}),
        (letter, -0.5, {"a": -0.5, "b": -1.0, f"token_id:{byte}": -3.5, f"token_id:{start}": -4.0}),
        (end, -9.0, {" ": -9.0, "a": -0.5, "b": -1.0, f"token_id:{byte}": -3.5,
                     f"token_id:{start}": -4.0}),
    ):  # fmt: skip
        known = Logprob(logprob, top)
        made = logprobs_of(own, Delta(0, True, "", [token], [known], [0], None))
        assert made["tokens"] == [own.text_of(token)]
        assert made["top_logprobs"] == [expected]
        assert made["token_logprobs"] == [logprob]


def first_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop that is complete first, found one character after the other."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


STOPS = ["\n", "a", "é", "你", " a", "b.", "\n\n", "the"]
LETTERS = st.text(st.sampled_from("ab\n"), max_size=30)


@settings(max_examples=300, deadline=None)
@given(st.lists(LETTERS), st.lists(st.text(st.sampled_from("ab\n"), min_size=1, max_size=6)))
def test_stops_across_pieces(parts, stops):
    search, given_text, ended = StopStrings(stops).search(), "", False
    expected = first_stop("".join(parts), stops)
    for number, part in enumerate(parts):
        would = search.would_end(part)
        text, ended = search.add(part)
        assert ended == would
        given_text += text
        seen = "".join(parts[: number + 1])
        assert expected[0].startswith(given_text)
        if ended:
            break
        held = len(seen) - len(given_text)
        assert held == max(
            (n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0
        )
    given_text += "" if ended else search.flush()
    assert (given_text, ended) == expected


def test_a_token_begins_where_those_before_it_end():
    """After a run of byte tokens too, which is held back until another token ends it."""
    names = tokenizer("llama").get_vocab()
    tokens = [names[each] for each in ("a", "<0x0A>", "<0x0A>", "b", "<0xE4>", "a")]
    until, begins, shown = TextUntilStop(Detokenizer(texts("llama"), []), None), [], ""
    for token in tokens:
        begins.append(until.offset_of(token))
        shown += until.add(token)[0]
    assert shown + until.flush()[0] == "a\n\nb\N{REPLACEMENT CHARACTER}a"
    assert begins == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["bundled", "llama", "gemma"])
def test_a_stop_ends_with_the_token_that_completes_it(name):
    names = tokenizer(name).get_vocab()
    newline = names["<0x0A>"] if "<0x0A>" in names else tokenizer(name)("\n").input_ids[0]
    likely = st.sampled_from(
        [newline, *single_bytes(name)[:40], *sorted(texts(name).visible)[-40:]]
    )

    @settings(max_examples=150, deadline=None)
    @given(st.lists(likely, max_size=60), st.lists(st.sampled_from(STOPS), min_size=1, max_size=3))
    def check(tokens, stops):
        def text(count):
            return whole_text(tokenizer(name), [], tokens[:count])

        until = TextUntilStop(Detokenizer(texts(name), []), StopStrings(stops).search())
        expected = next((n for n in range(len(tokens) + 1) if first_stop(text(n), stops)[1]), None)
        given_text, taken = "", None
        for count, token in enumerate(tokens, start=1):
            piece, ended = until.add(token)
            given_text += piece
            if ended:
                taken = count
                break
        if taken is None:
            given_text += until.flush()[0]
        assert taken == expected
        assert given_text == first_stop(text(taken), stops)[0]

    check()


def cut_at(marked: str, stops: list[str]) -> tuple[str, bool]:
    """`first_stop` where private characters stand for special tokens, which have no text."""
    for end in range(1, len(marked) + 1):
        seen = marked[:end]
        found = [stop for stop in stops if seen.endswith(stop)]
        if seen[-1] < PRIVATE:
            found += [stop for stop in stops if without(seen).endswith(stop)]
        if found:
            return without(seen)[: len(without(seen)) - max(len(without(s)) for s in found)], True
    return without(marked), False


PRIVATE = "\ue000"


def without(text: str) -> str:
    return "".join(letter for letter in text if letter < PRIVATE)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_stops_with_special_tokens(name):
    """Byte tokens too, whose text is held back when a special token comes."""
    names = tokenizer(name).get_vocab()
    letters = {names["a"]: "a", names["b"]: "b", names["<0x0A>"]: "\n", names["<0x61>"]: "a"}
    signs = {names["<s>"]: PRIVATE, names["</s>"]: "\ue001"}
    both = letters | signs
    stop = st.text(st.sampled_from([*"ab\n", PRIVATE, "\ue001"]), min_size=1, max_size=4)

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.sampled_from(sorted(both)), max_size=12), st.lists(stop, min_size=1))
    def check(tokens, stops):
        texts_of_stops = [each.replace(PRIVATE, "<s>").replace("\ue001", "</s>") for each in stops]
        search = StopStrings(texts_of_stops, texts(name).special).search()
        until = TextUntilStop(Detokenizer(texts(name), []), search, texts(name).special.ids)
        given_text, ended = "", False
        for count, token in enumerate(tokens, start=1):
            piece, ended = until.add(token)
            given_text += piece
            expected = cut_at("".join(map(both.__getitem__, tokens[:count])), stops)
            assert ended == expected[1]
            if ended:
                break
        if not ended:
            given_text += until.flush()[0]
        assert given_text == cut_at("".join(map(both.__getitem__, tokens)), stops)[0]

    check()


def test_the_longest_special_token_is_meant_and_its_spaces_may_be_missing():
    tokens = [("<a>", 1), ("<a>b", 2)]
    special = SpecialTokens([SpecialToken(*each) for each in tokens])
    assert sequences_of("x<a>", special) == [("x", 1)]
    assert sequences_of("<a>b<a>", special) == [(2, 1)]
    assert sequences_of("<a", special) == []
    wide = SpecialTokens([SpecialToken("<w>", 3, lstrip=True, rstrip=True)])
    assert sequences_of("a \n<w> <w> b", wide) == [
        ("a", " ", "\n", 3, " ", 3, " ", "b"),
        ("a", 3, 3, "b"),
    ]


def test_stops_in_linear_time():
    stops = StopStrings(["a" * n + "b" for n in range(1, 200, 5)] + ["a" * 500 + "c"])

    def seconds(count):
        search, start = stops.search(), time.thread_time()
        for _ in range(count):
            search.add("a" * 4)
        return time.thread_time() - start

    seconds(100)
    assert min(seconds(4000) for _ in range(3)) < 30 * min(seconds(400) for _ in range(3))


def test_an_empty_stop_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
