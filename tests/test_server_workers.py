"""Worker processes: templates that never end, texts that cost too much, and clients that attack."""

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specjax.checkpoints.files import BUNDLED
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.server.parsing import RefusedError
from specjax.server.rendering import dumps, rendered
from specjax.server.token_lengths import most_bytes_of_tokens
from specjax.server.workers import WorkerLostError, Workers, WorkersClosedError
from tests.folders import byte_tokenizer
from tests.letters import Letters
from tests.scripted_engine import ScriptedEngine, serving, until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEMPLATE = (
    "{% for a in range(n | default(0)) %}{% for b in range(n) %}{% for c in range(n) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
    "{{ 'a' * (m | default(0)) }}{% for m in messages %}{{ m.content }}{% endfor %}"
)
USER = [{"role": "user", "content": "hi"}]
ENDLESS = {"n": 99_999}


@pytest.fixture(scope="module")
def tokenizer():
    made = tokenizer_of(BUNDLED / "target")
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def server(tokenizer):
    with serving(ScriptedEngine(ready=True), tokenizer, text_seconds=0.6) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=60) as made:
        made.post("/tokenize", json={"prompt": "a"})  # workers are there
        yield made


def error_of(client, path, body, status=400) -> dict:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text[:1000]
    assert len(response.content) < 4_000
    return response.json()["error"]


def test_templates_that_never_end_keep_nobody_waiting(client, server):
    errors = []

    def attack() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as own:
            body = {"messages": USER, "chat_template_kwargs": ENDLESS}
            errors.append(error_of(own, CHAT, body))

    threads = [threading.Thread(target=attack) for _ in range(5)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    start = time.monotonic()
    assert client.get("/health").status_code == 200
    assert time.monotonic() - start < 0.5
    assert client.post(CHAT, json={"messages": USER, "max_tokens": 1}).status_code == 200
    assert time.monotonic() - start < 1.5  # not behind five of which each takes 1.1 s
    for thread in threads:
        thread.join()
    assert {error["param"] for error in errors} == {"messages"}
    assert all("longer than 0.6 seconds" in error["message"] for error in errors)


@pytest.mark.parametrize("size", [10_000_000, 3_000_000_000])
def test_templates_that_make_too_much(client, size):
    body = {"messages": USER, "chat_template_kwargs": {"m": size}}
    error = error_of(client, CHAT, body)
    if size < 1 << 30:
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
        assert f"{size + 2:,} bytes" in error["message"]
    else:
        assert "memory" in error["message"]


MANY = 300_000


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 5_000}, "messages", "5,000 items"),
        ("/tokenize", {"messages": USER * 5_000}, "messages", "at most 4,096"),
        (COMPLETIONS, {"prompt": [5] * MANY}, "prompt", f"{MANY} were given"),
        (COMPLETIONS, {"prompt": [[5], [5] * 600]}, "prompt", "600 were given"),
        (COMPLETIONS, {"prompt": ["a"] * MANY}, None, "16,384 values"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [5] * MANY}, None, "16,384 values"),
        (CHAT, {"messages": [{"content": [{"type": "text"}] * 99_999}]}, None, "16,384 values"),
        ("/detokenize", {"tokens": [5] * MANY}, "tokens", "300,000 tokens"),
        (COMPLETIONS, {"prompt": " " * 3_900_000}, "prompt", "3,900,000 bytes"),
        (COMPLETIONS, {"prompt": ["a", "b " * 99_999]}, "prompt", "199,998 bytes"),
    ],
)
def test_bodies_that_hold_too_much(client, path, body, param, said):
    error = error_of(client, path, body)
    assert error["param"] == param
    assert said in error["message"]
    assert (error["code"] == "context_length_exceeded") == (param == "prompt")


LONG = "x" * 3_900_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a", LONG: 1, "n": 0}),
        (COMPLETIONS, {"prompt": "a", "temperature": LONG}),
        (COMPLETIONS, {"prompt": "a", "stream_options": {LONG: 1}}),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {LONG: 1}}),
        (COMPLETIONS, {"prompt": "a", "stop": LONG}),
        (COMPLETIONS, {"prompt": "a", "model": LONG}),
        (CHAT, {"messages": [{"role": LONG, "content": "a"}]}),
        (CHAT, {"messages": [{LONG: 1}]}),
        (CHAT, {"messages": USER, "tools": LONG}),
        ("/debug/speculation", {"setting": LONG}),
        ("/debug/speculation", {LONG: 1}),
    ],
)
def test_errors_quote_little(client, path, body):
    response = client.post(path, json=body)
    assert response.status_code in (400, 404)
    assert len(response.content) + sum(map(len, response.headers.values())) < 4_000


def test_long_texts_and_bodies_are_what_short_ones_are(client, tokenizer):
    """They are parsed elsewhere, and by another way."""
    text = 'def f(x):\n    return "é😀"\n' * 4_000
    made = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    ids = tokenizer(text).input_ids
    assert (made["count"], made["tokens"]) == (len(ids), ids)
    assert made["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
    bad = client.post("/detokenize", content=b'{"tokens": [' + b"1, " * 99_999 + b"NaN]}",
                      headers={"content-type": "application/json"})  # fmt: skip
    assert bad.json()["error"]["message"] == "The body cannot be read: NaN is no number of JSON."


# A worker.


@contextlib.contextmanager
def workers_of(tokenizer, **options):
    made = Workers(tokenizer, **({"count": 1, "seconds": 30.0, "memory_bytes": 1 << 28} | options))
    try:
        yield made
    finally:
        made.close()


def render(workers: Workers, variables: dict, **options):
    return workers.run("render", TEMPLATE, USER, variables, None, **options)


def test_a_client_that_leaves_frees_its_worker_and_a_server_that_ends_all(tokenizer):
    async def leave(workers) -> None:
        assert await render(workers, {}) == "hi"
        tasks = [asyncio.create_task(render(workers, ENDLESS, long=True)) for _ in range(3)]
        await asyncio.sleep(0.5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(10):  # the limit is 30 seconds, and two of three did run
            assert await render(workers, {}, long=True) == "hi"
        last = asyncio.create_task(render(workers, ENDLESS, long=True))
        await asyncio.sleep(0.3)
        workers.close()
        with pytest.raises(WorkersClosedError):
            async with asyncio.timeout(10):
                await last

    with workers_of(tokenizer) as workers:
        asyncio.run(leave(workers))


def failing(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose file is an attack."""
    made = byte_tokenizer()
    if kind == "multiplies":
        grow = normalizers.Replace("a", "a" * 1_000)
        made.normalizer = normalizers.Sequence([grow] * 4)
    else:
        made.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+(?=[bc])"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_a_tokenizer_that_multiplies_text():
    """It would take 30 TB; its worker has 256 MiB and five seconds."""
    with (
        workers_of(failing("multiplies"), seconds=5.0) as workers,
        pytest.raises((RefusedError, WorkerLostError, TimeoutError)),
    ):
        asyncio.run(workers.run("encode", "a" * 30, True, 100, "prompt"))


def test_a_tokenizer_that_panics():
    """Its library's panic is no `Exception`; a client gets a 400 for it, and the next a text."""
    tokenizer = failing("panics")
    with (
        serving(ScriptedEngine(ready=True), tokenizer) as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        error = error_of(client, COMPLETIONS, {"prompt": "a" * 60})
        assert error["param"] == "prompt"
        assert "retry-limit" in error["message"]
        assert client.post(COMPLETIONS, json={"prompt": "b"}).status_code == 200


def test_other_errors_of_a_tokenizer():
    with workers_of(Letters()) as workers, pytest.raises(RefusedError, match="prompt") as refused:
        asyncio.run(workers.run("encode", "É", True, 100, "prompt"))
    assert refused.value.param == "prompt"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="asks Linux for processes")
def test_workers_end_with_a_server_that_is_killed():
    script = (
        "import asyncio, sys\nfrom specjax.server.workers import Workers\n"
        "from tests.letters import Letters\n"
        "workers = Workers(Letters(), count=1, seconds=9.0, memory_bytes=1 << 28)\n"
        "print(asyncio.run(workers.run('encode', 'abc', True, 9, 'prompt')), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "[1, 2, 3]\n"
        (source,) = children(server.pid)
        (worker,) = children(source)
        server.kill()
    until(lambda: not (alive(source) or alive(worker)))


def children(process: int) -> list[int]:
    return [*map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False


def test_workers_load_little():
    heavy = "{'jax', 'numpy', 'transformers', 'fastapi', 'pydantic', 'asyncio'}"
    check = f"import sys, specjax.server.worker; print(sorted({heavy} & {{*sys.modules}}))"
    made = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"


def test_a_tokenizer_that_cannot_be_sent():
    tokenizer = Letters()
    tokenizer.lock = threading.Lock()
    with pytest.raises(ValueError, match="cannot be sent to a process"):
        Workers(tokenizer, count=1, seconds=1.0, memory_bytes=1 << 28)


# How long texts can be.


def tokenizer_with(**parts) -> PreTrainedTokenizerFast:
    made = byte_tokenizer()
    for name, part in parts.items():
        setattr(made, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_what_a_token_stands_for_at_most(tokenizer):
    most = most_bytes_of_tokens(tokenizer)
    assert most == max(map(len, tokenizer.get_vocab()))
    text = (" " * 999 + "\n\t" * 99 + "return é你😀 ") * 9
    assert len(text.encode()) <= most * len(tokenizer(text).input_ids)


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.Replace(Regex(" +"), " ")},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"pre_tokenizer": pre_tokenizers.Split(" ", "removed")},
    ],
)
def test_tokenizers_that_drop_text_have_no_bound(parts):
    assert most_bytes_of_tokens(tokenizer_with(**parts)) is None


def test_json_in_pieces_is_the_same():
    value = {"a": [{"b": [*range(200)]}, {}, [], "é\n"], "": [["x"] * 65] * 130, "c": None}
    assert rendered(value) == dumps(value).encode()
