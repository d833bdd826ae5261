"""The command line keeps its contracts: what it prints, and how it refuses."""

import gc
import io
import os
import re
import subprocess
import sys
import time

import jax
import pytest
from rich.console import Console

import specjax
from pallas_kernels.cache import cache_folder
from specjax.__main__ import main
from specjax.base.sampling import Sampling
from specjax.checkpoints import files as folder
from specjax.checkpoints import names
from specjax.checkpoints.detokenizer import Detokenizer, TokenTexts
from specjax.checkpoints.load import load
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.cli import generate, info
from specjax.decoding import generate as decoding
from tests.folders import answer, own_cache, pair_flags, pair_folder

__all__ = ["own_cache"]
KEYS = {
    *("text", "token_ids", "new_tokens", "target_steps", "tokens_per_step", "seconds"),
    *("tokens_per_second", "method", "setting", "verify", "dtype"),
}
PROMPT = "def add(a, b):"
SHORT = ["--max-new-tokens", "12"]
POOL = ["--method", "pool", "--tree", "1,1"]  # one shape in all tests: it compiles once


def test_json_holds_what_the_contract_says(capsys):
    found = answer(capsys, "generate", PROMPT, *POOL, *SHORT)
    assert found.keys() >= KEYS
    tokenizer = tokenizer_of(pair_folder() / "target")
    assert found["text"] == tokenizer.decode(found["token_ids"], skip_special_tokens=True)
    assert found["new_tokens"] == len(found["token_ids"]) <= 12
    assert found["tokens_per_step"] == found["new_tokens"] / found["target_steps"]
    assert found["tokens_per_second"] == pytest.approx(found["new_tokens"] / found["seconds"])
    assert (found["method"], found["verify"], found["dtype"]) == ("pool", "multi-step", "float32")


def test_methods_print_the_same_greedy_text(capsys):
    plain, pool = (
        answer(capsys, "generate", PROMPT, *flags, *SHORT) for flags in (["--method", "none"], POOL)
    )
    assert plain["text"] == pool["text"]
    assert plain["tokens_per_step"] == 1.0 < pool["tokens_per_step"]


def test_the_seed_names_the_key_of_the_row(capsys):
    flags = ["--method", "none", "--temperature", "0.8", "--top-k", "20", "--seed", "3"]
    found = answer(capsys, "generate", PROMPT, *flags, *SHORT)
    target, tokenizer = load(pair_folder() / "target")
    key = jax.random.fold_in(jax.random.key(3), 0)[None]
    same = specjax.generate(
        key, target, None, [tokenizer(PROMPT).input_ids], max_new_tokens=12,
        sampling=Sampling(0.8, top_k=20),
    )  # fmt: skip
    assert found["token_ids"] == same.tokens[0, : same.lengths[0]].tolist()
    assert found["verify"] == "naive"


def test_streamed_text_is_that_of_json_and_standard_input_is_read(capsys, monkeypatch):
    expected = answer(capsys, "generate", PROMPT, *POOL, *SHORT)
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    begin, begun = decoding.begin, []
    monkeypatch.setattr(decoding, "begin", lambda request: begun.append(request) or begin(request))
    assert main(["generate", "-", *POOL, *SHORT, *pair_flags()]) == 0
    assert len(begun) == 1  # the prompt is read once
    printed = capsys.readouterr()
    assert printed.out == expected["text"] + "\n"
    for part in ("method pool:1,1: it was asked for", "tokens per step", "tokens/s"):
        assert part in printed.err


@pytest.mark.parametrize(
    ("encoding", "flags", "words"),
    [
        ("utf-8", ["caf\udce9"], r"the prompt is not UTF-8 text: character 3 is '\\udce9'"),
        ("utf-8", ["-"], "the prompt on standard input is not utf-8: byte 3 is not"),
        ("utf-8:surrogateescape", ["-"], "the prompt on standard input is not UTF-8 text: char"),
    ],
    ids=["argument", "standard input", "standard input of the C locale"],
)
def test_a_prompt_that_is_not_utf8_gets_one_sentence(capsys, monkeypatch, encoding, flags, words):
    code, *errors = encoding.split(":")
    held = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), code, *errors)
    monkeypatch.setattr("sys.stdin", held)
    assert main(["generate", *flags, *POOL, *SHORT, *pair_flags()]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(f"specjax: {words}.*\n", said)


def test_without_standard_input_a_prompt_of_it_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert main(["generate", "-", *SHORT, *pair_flags()]) == 2
    assert "there is no standard input" in capsys.readouterr().err


def test_nothing_is_compiled_once_the_text_is_there(capsys, monkeypatch):
    compiled, at_remarks, say = [], [], generate.say

    def remark(sentence: str) -> None:
        at_remarks.append(len(compiled))
        say(sentence)

    def listen(event: str, seconds: float, **_: object) -> None:
        if "compile" in event:
            compiled.append(event)

    monkeypatch.setattr(generate, "say", remark)
    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    assert main(["generate", PROMPT, *POOL, *SHORT, *pair_flags()]) == 0
    assert 0 < at_remarks[-1] == len(compiled)


def test_trees_are_drawn_and_a_terminal_shows_drafters_in_colour(capsys, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(
        generate, "Console",
        lambda **options: Console(
            file=screen, force_terminal=True, color_system="standard", **options
        ),
    )  # fmt: skip
    assert main(["generate", PROMPT, "--show-tree", *POOL, *SHORT, *pair_flags()]) == 0
    assert "└─" in capsys.readouterr().out
    assert screen.getvalue().startswith(f"\x1b[2m{PROMPT}\x1b[0m\n")
    assert "\x1b[32m" in screen.getvalue()


def test_a_terminal_shows_the_prompt_before_its_continuation(capsys, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(
        generate, "Console", lambda **options: Console(file=screen, force_terminal=True, **options)
    )
    assert main(["generate", PROMPT, *POOL, *SHORT, *pair_flags()]) == 0
    shown = re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue())
    monkeypatch.undo()
    capsys.readouterr()
    assert main(["generate", PROMPT, *POOL, *SHORT, *pair_flags()]) == 0
    assert shown == PROMPT + capsys.readouterr().out.removesuffix("\n")


def test_no_command_gets_help(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([])
    printed = capsys.readouterr().out
    assert "Lossless speculative decoding" in printed
    assert "generate" in printed


def test_help_whose_reader_is_gone_ends_without_a_trace():
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-m", "specjax", "--help"], env=buffered, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        process.stdout.close()
        assert process.wait() == 1
        assert process.stderr.read() == b""


def test_characters_are_shown_whole():
    tokenizer = tokenizer_of(pair_folder() / "target")
    tokens = tokenizer("naïve 😀!").input_ids
    assert len(tokens) > len("naïve 😀!")
    detokenizer = Detokenizer(TokenTexts(tokenizer), tokenizer("x").input_ids)
    pieces = [detokenizer.add(token) for token in tokens]
    assert "".join(pieces) == "naïve 😀!"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_info_shows_the_pair(capsys):
    found = answer(capsys, "info")
    assert found["config"]["vocab_size"] == 272
    assert found["caches_bytes"] == 320 * 2 * 2 * 8 * 4  # 128 prompt + 128 new + nodes
    assert found["draft_caches_bytes"] == 2 * found["caches_bytes"]
    assert main(["info", *pair_flags()]) == 0
    assert f"parameters: {found['parameters']:,}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", "x", "--model", "nowhere"], "no model folder at nowhere"),
        (["generate", "x", "--method", "bush"], "no method 'bush'"),
        (["generate", "x", "--verify", "hope"], "no verification rule 'hope'"),
        (["generate", "x", "--dtype", "int8"], "no dtype 'int8'"),
        (["generate", "x", "--tree", "2,x"], "--tree is '2,x'"),
        (["generate", "x", "--tree", "0"], "at least 1"),
        (["generate", "x", "--tree", "3/2,1"], "--tree is '3/2,1': level 2 has widths 2,1, which"),
        (["verify", "--tree", "2/0,0"], "--tree is '2/0,0': level 2 has widths 0,0, and so not"),
        (["generate", "x", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["generate", "x", "--json", "--show-tree"], "--show-tree"),
        (["generate", "x", "--seed", "-1"], "--seed is -1; it must lie between 0 and 4294967295"),
        (["verify", "--seed", f"{2**32}"], "--seed is 4294967296"),
        (["generate", "x", "--method", "none", "--tree", "2"], "takes no tree and no budget"),
        (["bench", "--prompts", "nowhere.jsonl"], "no prompt file at nowhere.jsonl"),
        (["bench", "--methods", "bush"], "no method 'bush'"),
        (["bench", "--batch", "1,x"], "--batch is '1,x'"),
        (["bench", "--inflate", "big"], "--inflate is 'big'"),
        (["verify", "--methods", "bush"], "no method 'bush'"),
    ],
)
def test_a_wrong_value_gets_one_sentence_and_code_2(arguments, sentence, capsys):
    refused(arguments, sentence, capsys)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--temperature", "0.8", "--verify", "greedy"], "the greedy rule needs temperature 0"),
        (["--temperature", "-1"], "sampling.temperature is -1.0"),
        (["--max-new-tokens", "999"], "exceed the model's 256"),
        (["--method", "chain", "--tree", "2,1"], "a chain has widths of 1, not 2,1"),
        (["--method", "chain", "--tree", "1/2/0,1"], "a chain has widths of 1, not 1/2/0,1"),
    ],
)
def test_what_the_pair_cannot_do_is_refused(flags, sentence, capsys):
    refused(["generate", PROMPT, *flags, *pair_flags()], sentence, capsys)


def refused(arguments, sentence, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1


def test_memory_that_is_not_there_is_said_in_a_sentence(capsys, monkeypatch):
    def greedy_for_memory(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore")

    monkeypatch.setattr(info, "info", greedy_for_memory)
    refused(["info"], "not enough memory: RESOURCE_EXHAUSTED: Out of memory", capsys)


def test_an_empty_folder_and_a_missing_bundled_pair_are_named(tmp_path, monkeypatch, capsys):
    refused(["info", "--model", str(tmp_path)], "config.json", capsys)
    for module in (names, folder):
        monkeypatch.setattr(module, "BUNDLED", tmp_path / "bundled")
    refused(["info"], "no bundled pair", capsys)
    model = ["--model", str(pair_folder() / "target")]
    refused(["generate", "x", "--method", "tree", *model], "needs a draft model", capsys)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", "x", "--colour"], "Unrecognized options: --colour"),
        (["generate", "x", "--top-k", "many"], "Error parsing --top-k"),
        (["generate"], "PROMPT"),
        (["translate"], "translate"),
    ],
)
def test_an_unknown_flag_gets_one_sentence_and_code_2(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert len(printed.err.splitlines()) == 1
    assert "---" not in printed.err
    assert "──" not in printed.err


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("SPECJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "specjax"


@pytest.mark.parametrize("lost", ["in a callback of the collector", "in a finalizer"])
def test_an_interrupt_that_python_drops_comes_again(lost, monkeypatch):
    def dropped(*_):
        if dropped in gc.callbacks:
            gc.callbacks.remove(dropped)
        raise KeyboardInterrupt

    class Finalized:
        __del__ = dropped

    def generate(options):
        if lost == "in a finalizer":
            Finalized()
        else:
            gc.callbacks.append(dropped)
            gc.collect()
        time.sleep(10)
        return 0

    monkeypatch.setattr("specjax.cli.generate.generate", generate)
    began = time.monotonic()
    assert main(["generate", "x"]) == 130
    assert time.monotonic() - began < 9


COMPILING = """
import os, signal, threading, time
import jax, jax.numpy as jnp
from specjax.base import interrupts
interrupts.PATIENCE_SECONDS = 0.1
interrupts.if_interrupted(lambda: "overwritten")
WORK = {
    "compiles": lambda: jax.jit(
        lambda x: sum(jnp.sin(x * i) @ x for i in range(400))).lower(jnp.ones((8, 8))).compile(),
    "hears nothing": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        or time.sleep(20),
}
work = WORK["%s"]
def interrupt():
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGINT)
def run():
    with interrupts.ending_at_interrupts():
        interrupts.if_interrupted(lambda: "rows so far are in FILE")
        threading.Thread(target=interrupt, daemon=True).start()
        work()
try:
    run()
except KeyboardInterrupt:
    interrupts.leave(interrupts.CODE)
"""


@pytest.mark.parametrize("work", ["compiles", "hears nothing"])
def test_an_interrupt_ends_a_command_wherever_it_is(work):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", COMPILING % work], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 130
    assert done.stderr == "specjax: interrupted; rows so far are in FILE.\n"
    assert time.monotonic() - began < 15
