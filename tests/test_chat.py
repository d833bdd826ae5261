"""`specjax chat`: turns over a pipe and at a terminal, commands, Ctrl-C, a context that is full."""

import functools
import io
import json
import shutil
import signal
import tempfile
from pathlib import Path

import jax
import pytest

import specjax
from specjax.__main__ import main
from specjax.base.prefix import common_prefix
from specjax.checkpoints.load import load
from specjax.checkpoints.tokenizers import ids_of_talk
from specjax.cli import chat
from tests.folders import own_cache, pair_folder

__all__ = ["own_cache"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
SHORT = ["--max-new-tokens", "12", "--max-model-len", "200"]
CHAIN = ["--method", "chain", "--tree", "1,1"]


@functools.cache
def folder() -> Path:
    """The pair's target with a chat template."""
    made = Path(tempfile.mkdtemp(prefix="specjax-chat-")) / "target"
    shutil.copytree(pair_folder() / "target", made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@functools.cache
def loaded():
    return load(folder())


def flags(*more: str) -> list[str]:
    return ["--model", str(folder()), "--draft", f"{pair_folder()}/one", *SHORT, *more]


def plain(*talks) -> list[tuple[list[int], list[int]]]:
    """The prompts of talks, and plain decoding's replies to them."""
    target, tokenizer = loaded()
    prompts = [ids_of_talk(tokenizer, messages) for messages in talks]
    made = specjax.generate(jax.random.key(0), target, None, prompts, max_new_tokens=12)
    texts = [text[:length].tolist() for text, length in zip(made.tokens, made.lengths, strict=True)]
    return list(zip(prompts, texts, strict=True))


def user(text):
    return {"role": "user", "content": text}


def spoken(reply):
    return {"role": "assistant", "content": reply["text"]}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def typed(monkeypatch):
    """Lets somebody type lines at a terminal; an exception among them is raised."""

    def type_(*lines):
        left = iter([*lines, EOFError()])

        def read(prompt=""):
            del prompt
            line = next(left)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr("sys.stdin", Terminal())

    return type_


def piped(monkeypatch, text):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def objects(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_turns_over_a_pipe_are_plain_decoding_and_read_what_is_new(capsys, monkeypatch, tmp_path):
    """Also after another system message, and after everything was forgotten."""
    kept = tmp_path / "said.json"
    lines = f'def add\n"""\nreturn\n  a\n"""\n\n/system be b\nif a\n/save {kept}\n/reset\nif a\n'
    piped(monkeypatch, lines)
    assert main(["chat", "--json", *CHAIN, *flags()]) == 0
    replies, messages, talks = objects(capsys), [], []
    for text, reply in zip(["def add", "return\n  a"], replies[:2], strict=True):
        talks.append([*messages, user(text)])
        messages = [*talks[-1], spoken(reply)]
    told = {"role": "system", "content": "be b"}
    talks += [[told, *messages, user("if a")], [told, user("if a")]]
    said = json.loads(kept.read_text())
    assert said == {"model": str(folder()), "messages": [*talks[2], spoken(replies[2])]}
    held = []
    for number, (reply, (ids, tokens)) in enumerate(zip(replies, plain(*talks), strict=True)):
        assert reply["token_ids"] == tokens
        cached = common_prefix(held, ids[:-1]) if number < 3 else 0
        assert (reply["cached_tokens"], reply["read_tokens"]) == (cached, len(ids) - cached)
        assert reply["tokens_per_step"] == len(tokens) / reply["target_steps"] > 1
        assert 0 < reply["seconds_to_first_token"] <= reply["seconds"]
        assert reply["finish_reason"] == "length"
        held = ids + tokens
    assert replies[1]["cached_tokens"] >= replies[0]["read_tokens"]


def test_a_message_on_the_command_line_is_answered_and_that_is_all(capsys, monkeypatch):
    """Where nobody sits at a terminal, or an object is asked for."""
    piped(monkeypatch, "never read\n")
    assert main(["chat", "def add", "--method", "none", *flags()]) == 0
    text = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", Terminal())
    assert main(["chat", "def add", "--json", "--method", "none", *flags()]) == 0
    (reply,) = objects(capsys)
    assert reply["text"] + "\n" == text
    assert reply["token_ids"] == plain([user("def add")])[0][1]
    piped(monkeypatch, "def add")
    assert main(["chat", "-", "--json", "--method", "none", *flags()]) == 0
    assert objects(capsys)[0]["token_ids"] == reply["token_ids"]


def test_ctrl_c_stops_a_reply_and_not_the_chat(capsys, typed, monkeypatch, tmp_path):
    """The reply stays as far as it came; a second Ctrl-C at the prompt leaves."""
    stops = iter([False, True])
    print_piece = chat.print_piece

    def show(console, piece, style=""):
        print_piece(console, piece, style)
        for _ in range(2 * next(stops, False)):  # whoever presses it twice means the same
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat, "print_piece", show)
    before, kept = signal.getsignal(signal.SIGINT), tmp_path / "said.json"
    interrupt = KeyboardInterrupt()
    typed(f"/save {kept}", "/stats", "/tree", interrupt, "/stats", interrupt, interrupt)
    assert main(["chat", "def add", "--method", "none", *flags()]) == 130
    assert signal.getsignal(signal.SIGINT) is before
    told = capsys.readouterr().err
    for part in (
        "stopped; what was written stays", "2 messages are in", "last reply: 2 tokens in 2 steps",
        "once more, Ctrl-D or /exit leaves",
    ):  # fmt: skip
        assert part in told
    tokens = plain([user("def add")])[0][1][:2]
    reply = {"role": "assistant", "content": loaded()[1].decode(tokens, skip_special_tokens=True)}
    assert json.loads(kept.read_text())["messages"] == [user("def add"), reply]


def test_commands_and_what_is_wrong_are_answered_in_a_sentence(capsys, typed, tmp_path):
    """And the conversation goes on."""
    typed(
        "/help", "/tree", "/frob", "/save", f"/save {tmp_path}/no/where", "/system", "/etc/hosts",
        "a" * 300, "/reset", "/exit", "never said",
    )  # fmt: skip
    assert main(["chat", "--method", "none", *flags()]) == 0
    printed = capsys.readouterr()
    for part in (
        "/stats", "no reply yet.", "there is no command /frob; /help lists them.",
        "/save needs the name of a file.", "/no/where cannot be written: ", "no system message.",
        "it must be below the context of 200.", "what was said is forgotten.",
    ):  # fmt: skip
        assert part in printed.err
    assert len(printed.out.splitlines()) >= 1  # of /etc/hosts, which is a message


def test_the_oldest_turns_leave_a_context_that_is_full(capsys, monkeypatch):
    texts = ["qz" * 25, "zq" * 30, "xz" * 75]
    piped(monkeypatch, texts[2])
    assert main(["chat", "--json", "--method", "none", *flags()]) == 0
    (alone,) = objects(capsys)
    piped(monkeypatch, "\n".join(texts))
    assert main(["chat", "--json", "--method", "none", *flags()]) == 0
    printed = capsys.readouterr()
    replies = [json.loads(line) for line in printed.out.splitlines()]
    assert [reply["dropped_messages"] for reply in replies] == [0, 0, 4]
    assert "the context of 200 tokens is full: the oldest 4 messages were left out." in printed.err
    assert replies[2]["token_ids"] == alone["token_ids"]


def test_what_cannot_chat_is_refused_in_a_sentence(capsys, monkeypatch):
    piped(monkeypatch, "a" * 300)
    assert main(["chat", "--method", "none", *flags()]) == 2
    assert "the message makes a prompt of " in capsys.readouterr().err
    assert main(["chat", "a", "--model", f"{pair_folder()}/target"]) == 2
    told = capsys.readouterr().err
    assert "target has no chat template, so it cannot chat; specjax generate continues" in told
    piped(monkeypatch, "/frob\n")
    assert main(["chat", *flags("--method", "none")]) == 2
    for given, sentence in (("--max-new-tokens", "must be at least 1"), ("--max-model-len", "[2")):
        assert main(["chat", "a", "--model", str(folder()), given, "0"]) == 2
        assert sentence in capsys.readouterr().err


def test_sampling_is_that_of_the_generation_config_unless_it_is_named(capsys, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.9, "max_new_tokens": 5}')
    own = ["--model", str(folder()), "--method", "none", "--max-model-len", "200", "--json"]
    own += ["--generation-config", str(tmp_path), "--seed", "3"]
    for more, sampling in (([], 0.9), (["--temperature", "0"], 0.0)):
        assert main(["chat", "def add", *own, *more]) == 0
        target, tokenizer = loaded()
        same = specjax.generate(
            jax.random.key(3), target, None, [ids_of_talk(tokenizer, [user("def add")])],
            max_new_tokens=5, sampling=specjax.Sampling(sampling),
        )  # fmt: skip
        assert objects(capsys)[0]["token_ids"] == same.tokens[0, : same.lengths[0]].tolist()


def test_generate_says_that_there_is_a_chat_template(capsys):
    own = ["--model", str(folder()), "--max-new-tokens", "2", "--method", "none", "--json"]
    for more, says in (([], True), (["--chat"], False)):
        assert main(["generate", "def add", *own, *more]) == 0
        assert ("has a chat template" in capsys.readouterr().err) == says
