"""A server under abuse over real sockets: nothing leaks, nobody gets another's text.

    python -m tests.serve_abuse --requests 10000 --connections 1000

A tiny model with a tiny draft is served. Clients ask for texts that are known; a third ask for
texts that match a grammar of their own: a schema, an expression, one of some texts, Lark's rules,
calls of a tool that must be made. Of both kinds three in ten leave at any moment, some read more
slowly than a socket holds, some send half a head or half a body, some ask for as much as fits or
one token more. Some attack: with a chat template that never ends, very many messages or token ids,
megabytes of spaces, a field's name of megabytes, schemas and expressions that are too much for any
compiler. In the end no row, no place in the queue and no matcher of a grammar may be taken, no text
may have been wrong or of another's grammar, no status may be 500 or more, and memory may not have
grown. How long the server's event loop was held is asked of the server, and seen from outside by a
process that asks for `/health` all the time.

Then the draft's folder is removed while the server runs, a signal comes in mid-stream and one
while a template runs, a server that was killed is started again at the same port, and one has a
draft that gives NaN. A fault makes the exit status 1.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import tyro

import specjax
from benchmarks.serving.process import serving
from specjax.checkpoints.detokenizer import Detokenizer, TokenTexts
from specjax.checkpoints.huggingface import save_model
from specjax.models.transformer import forward
from tests.folders import pair_folder
from tests.pairs import broken

TEXTS, NEW, CONTEXT, CHOICES = 48, 24, 256, 4
KINDS = {
    "whole": 0.17, "stream": 0.17, "leaves": 0.17, "matching": 0.12, "matching_stream": 0.12,
    "matching_leaves": 0.10, "slow": 0.03, "half": 0.03, "limit": 0.03, "chat": 0.03,
    "attack": 0.03,
}  # fmt: skip
PATH, CHAT = "/v1/completions", "/v1/chat/completions"
TAGS, LONGEST = 400, 200
"""Grammars of each kind, and the tokens that texts which match one may have."""
TEMPLATE = (
    "{# tools #}{% for a in range(n | default(0)) %}{% for b in range(n) %}{% for c in range(n) %}"
    "{% endfor %}{% endfor %}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
USER = [{"role": "user", "content": "hi"}]
BOMB = {"messages": USER, "chat_template_kwargs": {"n": 99_999}}
_MANY = 900_000


def _nested(levels: int, outer: Callable[[object], object]) -> object:
    """A schema within a schema within a schema."""
    schema: object = {"type": "integer"}
    for _ in range(levels):
        schema = outer(schema)
    return schema


def _must(schema: object) -> dict[str, object]:
    """A request whose text must match a schema."""
    made = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return {"prompt": "a", "max_tokens": 8, "response_format": made}


def _regex(text: str) -> dict[str, object]:
    return {"prompt": "a", "max_tokens": 8, "structured_outputs": {"regex": text}}


_ANY_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}
HOSTILE: dict[str, tuple[str, dict[str, object]]] = {
    "a schema of itself": (PATH, _must({"$ref": "#"})),
    "a schema that refers away": (PATH, _must({"$ref": "http://127.0.0.1:1/a"})),
    "300 levels of objects": (PATH, _must(_nested(300, lambda own: {"properties": {"a": own}}))),
    "300 levels of anyOf": (PATH, _must(_nested(300, lambda own: {"anyOf": [own]}))),
    "a schema that doubles 11 times": (
        PATH, _must(_nested(11, lambda own: {"anyOf": [own, {"type": "array", "items": own}]})),
    ),
    "an enum of 16,000": (PATH, _must({"enum": [f"{n:x}" * 3 for n in range(16_000)]})),
    "a billion characters": (PATH, _must({"type": "string", "minLength": 10**9})),
    "a billion items": (PATH, _must({"type": "array", "items": {}, "minItems": 10**9})),
    "900 fields that may be there": (
        PATH, _must({"type": "object", "properties": {f"f{n}": {} for n in range(900)}}),
    ),
    "a pattern of a million": (PATH, _must({"type": "string", "pattern": "^(a{1,999}){999}$"})),
    "half a pattern": (PATH, _must({"type": "string", "pattern": "(("})),
    "an expression of a million": (PATH, _regex("((a|b|ab){1,1000}c?){1,1000}")),
    "an expression with memory": (PATH, _regex("(.*a){25}.{25}b")),
    "an expression of 250 KB": (PATH, _regex("(ab|cd)" * 36_000)),
    "an expression that is none": (PATH, _regex("(?=a)\\1")),
    "16,000 choices": (PATH, {"prompt": "a", "guided_choice": ["a" * 12] * 16_000}),
    "a grammar without end": (PATH, {"prompt": "a", "max_tokens": 8, "grammar": "start: start"}),
    "a grammar of many meanings": (
        PATH, {"prompt": "a", "max_tokens": 200,
               "grammar": 'start: a\na: a a | b | ""\nb: /a*/ | /a+/ | "a" b | b "a"'},
    ),
    "a grammar that is none": (PATH, {"prompt": "a", "grammar": "start: %%%"}),
    "128 tools, each of itself": (
        CHAT, {"messages": USER, "tools": [_ANY_TOOL] * 128, "tool_choice": "required",
               "max_tokens": 8},
    ),
}  # fmt: skip
"""Grammars that must be refused, or be no more than they say."""
ATTACKS: dict[str, tuple[str, dict[str, object]]] = {
    "a template that never ends": (CHAT, BOMB),
    "100,000 messages": (CHAT, {"messages": [{"role": "user", "content": ""}] * 100_000}),
    "900,000 ids": (PATH, {"prompt": [5] * _MANY}),
    "900,000 ids of stops": (PATH, {"prompt": "a", "stop_token_ids": [5] * _MANY}),
    "200,000 names of tokens": (
        "/tokenize",
        {"prompt": "ab" * 100_000, "return_token_strs": True},
    ),
    "3.9 MB of spaces": (PATH, {"prompt": " " * 3_900_000}),
    "3.9 MB of spaces, tokenized": ("/tokenize", {"prompt": " " * 3_900_000}),
    "64 prompts of 16 choices": (PATH, {"prompt": ["a"] * 64, "n": 16, "max_tokens": 1}),
    "a field's name of 3.9 MB": (PATH, {"prompt": "a", "x" * 3_900_000: 1}),
    **HOSTILE,
}
"""Paths and bodies of what the tiny pair's server must answer quickly or give up."""


@dataclasses.dataclass(frozen=True)
class Abuse:
    """How much of it."""

    requests: int = 10_000
    """Requests in all."""
    connections: int = 1_000
    """Clients at once."""
    rows: int = 8
    """Rows of the server."""
    method: str = "chain"
    """What drafts."""
    page_size: int | None = None
    """Of its KV cache, which has room for three of the longest texts then."""


class Server:
    """`specjax serve` with the tiny pair, at a port that stays the same."""

    def __init__(self, abuse: Abuse, draft: Path, target: Path | None = None) -> None:
        self._flags = (
            "--model", str(target or pair_folder() / "target"), "--draft", str(draft),
            "--served-model-name", "m", "--method", abuse.method, "--rows", str(abuse.rows),
            "--drain-seconds", "10", "--max-waiting", "2048",
        )  # fmt: skip
        self._paged = bool(abuse.page_size)
        if abuse.page_size:
            room = str(3 * CONTEXT + abuse.page_size)
            self._flags += "--page-size", str(abuse.page_size), "--kv-cache-tokens", room
        self.url, self.port = "", 0

    @contextlib.contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        """The process, once it is ready."""
        with serving(*self._flags, "--port", str(self.port)) as (self.url, process):
            self.port = int(self.url.rsplit(":", 1)[1])
            yield process

    def gauge(self, name: str, label: str = "") -> float:
        """The value of a metric."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        lines = (each for each in text.splitlines() if each.startswith(f"specjax:{name}{{"))
        line = next(each for each in lines if f'="{label}' in each)
        return float(line.split()[-1])

    def left_behind(self, seconds: float = 30.0) -> list[float]:
        """Rows, places in the queue and matchers of grammars that are taken still, at the latest
        after `seconds`; and pages that have leaked, where there are any.
        """
        end = time.monotonic() + seconds
        while True:
            names = "num_requests_running", "num_requests_waiting", "grammar_matchers"
            found = [self.gauge(name) for name in names]
            found += [self.gauge("kv_cache_pages_leaked")] if self._paged else []
            if not any(found) or time.monotonic() > end:
                return found
            time.sleep(0.1)


def known() -> list[tuple[list[int], str]]:
    """Prompts and the greedy texts that follow them."""
    target, tokenizer = specjax.load(f"{pair_folder()}/target")
    noise, texts = np.random.default_rng(0), TokenTexts(tokenizer)
    prompts = [noise.integers(1, 272, noise.integers(1, 40)).tolist() for _ in range(TEXTS)]
    made = specjax.generate(
        jax.random.key(0), target, None, prompts, max_new_tokens=NEW, stop_at_eos=False
    )
    found = []
    for prompt, tokens in zip(prompts, made.tokens.tolist(), strict=True):
        shown = Detokenizer(texts, prompt)
        found.append((prompt, "".join(map(shown.add, tokens)) + shown.flush()))
    return found


def body_of(prompt: list[int], **more: object) -> dict[str, object]:
    """A greedy request."""
    asked = {"model": "m", "prompt": prompt, "max_tokens": NEW, "temperature": 0}
    return asked | {"ignore_eos": True} | more


class Wanted(NamedTuple):
    """A request whose text must match a grammar, and whether one does."""

    path: str
    body: dict[str, object]
    matches: Callable[[str], bool]


def wanted(kind: str, tag: int, more: dict[str, object]) -> Wanted:
    """A request with a grammar that is only this tag's: no other's text matches it."""
    body = {"model": "m", "max_tokens": LONGEST, **more}
    if kind == "calls":
        only = {"type": "object", "properties": {"tag": {"const": tag}}, "required": ["tag"],
                "additionalProperties": False}  # fmt: skip
        function = {"name": f"tool_{tag}", "parameters": only}
        tools = [{"type": "function", "function": function}]
        talk = {"messages": USER, "tools": tools, "tool_choice": "required"}
        written = f'tool_{tag}{{"tag":{tag}}}'
        return Wanted(CHAT, body | talk | {"parallel_tool_calls": False},
                      lambda text: "".join(text.split()) == written)  # fmt: skip
    body["prompt"] = [tag % 200 + 20, 7, 9]
    if kind == "schema":
        schema = {"name": "a", "schema": _schema_of(tag)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return Wanted(PATH, body, lambda text: _is_value(text, tag))
    if kind == "choice":
        texts = [f"{tag} yes", f"{tag} no", f"{tag} naïve"]
        return Wanted(PATH, body | {"guided_choice": texts}, lambda text: text in texts)
    if kind == "rules":
        rules = f'start: "<{tag}>" word ("," word){{0,4}}\nword: /[a-z]{{1,3}}/'
        expression = rf"<{tag}>[a-z]{{1,3}}(,[a-z]{{1,3}}){{0,4}}"
        fields = {"structured_outputs": {"grammar": rules}}
    else:
        expression = rf"{tag}-[a-f]{{2,6}}(x|yz)\.?"
        fields = {"structured_outputs": {"regex": expression}}
    return Wanted(PATH, body | fields, lambda text: re.fullmatch(expression, text) is not None)


def _of_calls(calls: list[dict[str, Any]]) -> str:
    """The names and arguments of calls."""
    own = [call["function"] for call in calls]
    return "".join((each.get("name") or "") + each["arguments"] for each in own)


def _schema_of(tag: int) -> dict[str, object]:
    fields = {"tag": {"const": tag}, "word": {"type": "string", "maxLength": 8},
              "on": {"type": "boolean"}}  # fmt: skip
    return {"type": "object", "properties": fields, "required": [*fields],
            "additionalProperties": False}  # fmt: skip


def _is_value(text: str, tag: int) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(value, dict) and [*value] == ["tag", "word", "on"] and value["tag"] == tag
        and len(value["word"]) <= 8 and isinstance(value["on"], bool)
    )  # fmt: skip


class Clients:
    """Clients of every kind, and what became of them."""

    def __init__(self, server: Server, client: httpx.AsyncClient, seed: int) -> None:
        self._server, self._client, self._texts = server, client, known()
        self._noise = np.random.default_rng(seed)
        self.outcomes: Counter[str] = Counter()
        self.chats: list[float] = []

    async def one(self) -> None:
        """A client of a random kind."""
        kind = str(self._noise.choice(list(KINDS), p=list(KINDS.values())))
        try:
            async with asyncio.timeout(300):
                outcome = await getattr(self, kind)()
        except (OSError, TimeoutError, httpx.HTTPError) as error:
            outcome = f"{kind}: {type(error).__name__}"
        self.outcomes[outcome] += 1

    def _some(self) -> tuple[list[int], str]:
        return self._texts[self._noise.integers(TEXTS)]

    async def whole(self) -> str:
        """Waits for a whole text."""
        prompt, text = self._some()
        response = await self._client.post(PATH, json=body_of(prompt))
        if response.status_code != 200:
            return f"status {response.status_code}"
        return _judged(response.json()["choices"][0]["text"], text)

    async def stream(self) -> str:
        """Reads a stream to its end."""
        prompt, text = self._some()
        body = body_of(prompt, stream=True)
        async with self._client.stream("POST", PATH, json=body) as response:
            if response.status_code != 200:
                return f"status {response.status_code}"
            pieces = [piece async for piece in _pieces(response)]
        return _judged("".join(pieces), text)

    def _some_grammar(self, **more: object) -> tuple[str, Wanted]:
        kind = str(self._noise.choice(["schema", "regex", "choice", "rules", "calls"]))
        drawn = {"temperature": float(self._noise.choice([0.0, 1.0]))}
        if self._noise.integers(2):
            drawn["seed"] = int(self._noise.integers(99))
        return kind, wanted(kind, int(self._noise.integers(TAGS)), drawn | more)

    async def matching(self) -> str:
        """Waits for a whole text that matches a grammar."""
        kind, asked = self._some_grammar()
        response = await self._client.post(asked.path, json=asked.body)
        if response.status_code != 200:
            return f"{kind}: status {response.status_code}"
        (choice,) = response.json()["choices"]
        if "message" in choice:
            choice["text"] = _of_calls(choice["message"].get("tool_calls") or [])
        return self._matched(kind, asked, choice["text"], choice["finish_reason"])

    async def matching_stream(self) -> str:
        """Reads a stream of such a text."""
        kind, asked = self._some_grammar(stream=True)
        text, reason = "", None
        async with self._client.stream("POST", asked.path, json=asked.body) as response:
            if response.status_code != 200:
                return f"{kind}: status {response.status_code}"
            async for choice in _choices(response):
                if "delta" in choice:
                    choice["text"] = _of_calls(choice["delta"].get("tool_calls") or [])
                text, reason = text + choice["text"], choice["finish_reason"]
        return self._matched(kind, asked, text, reason)

    def _matched(self, kind: str, asked: Wanted, text: str, reason: str | None) -> str:
        if reason == "length":
            return f"{kind}: cut off"
        if reason != ("tool_calls" if kind == "calls" else "stop") or not asked.matches(text):
            print(f"  {reason}, {text!r} to {asked.body}", flush=True)
            return f"{kind}: WRONG TEXT"
        return f"{kind}: right text"

    async def matching_leaves(self) -> str:
        """Leaves such a text, perhaps before its grammar is compiled."""
        _, asked = self._some_grammar(stream=bool(self._noise.integers(2)))
        return await self._left(asked.path, asked.body)

    async def slow(self) -> str:
        """Reads a stream of several choices with log probabilities, a little at a time."""
        prompt, text = self._some()
        content = json.dumps(body_of(prompt, stream=True, n=CHOICES, logprobs=20)).encode()
        with socket.socket() as own:
            own.setblocking(False)
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            loop, came = asyncio.get_running_loop(), bytearray()
            await loop.sock_connect(own, ("127.0.0.1", self._server.port))
            await loop.sock_sendall(own, _head(len(content)) + content)
            while piece := await loop.sock_recv(own, 8192):
                came += piece
                await asyncio.sleep(0.02)
        if b" 200 " not in came.split(b"\r\n")[0]:
            return f"status {int(came.split()[1])}"
        texts = [""] * CHOICES
        for line in came.split(b"\n"):
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["text"]
        return min(_judged(each, text) for each in texts)  # a wrong one, if any is

    async def leaves(self) -> str:
        """Leaves while it waits, or after some of a stream."""
        prompt, _ = self._some()
        body = body_of(prompt, stream=bool(self._noise.integers(2)), max_tokens=150)
        return await self._left(PATH, body)

    async def _left(self, path: str, body: dict[str, object]) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(float(self._noise.exponential(0.5))):
                async with self._client.stream("POST", path, json=body) as response:
                    if response.status_code not in (200, 429):
                        return f"left: status {response.status_code}"
                    async for _ in _choices(response):
                        pass
        return "left"

    async def half(self) -> str:
        """Sends some of a head or of a body, waits, and goes."""
        _, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        whole = _head(99) + b'{"prompt": "a'
        writer.write(whole[: self._noise.integers(1, len(whole) + 1)])
        await asyncio.sleep(float(self._noise.exponential(0.5)))
        writer.transport.abort()
        return "half a request"

    async def chat(self) -> str:
        """A short chat, which waits behind no attack; how long it took is kept."""
        start = time.perf_counter()
        body = {"messages": USER, "max_tokens": 1, "temperature": 0}
        response = await self._client.post(CHAT, json=body)
        self.chats.append(time.perf_counter() - start)
        return f"chat: {response.status_code}"

    async def attack(self) -> str:
        """Sends what would hold the server, and leaves one time in three."""
        name = str(self._noise.choice(list(ATTACKS)))
        path, body = ATTACKS[name]
        patience = None if self._noise.integers(3) else float(self._noise.exponential(1.0))
        try:
            async with asyncio.timeout(patience):
                response = await self._client.post(path, json=body)
        except TimeoutError:
            return f"{name}: left"
        if response.status_code == 400 and len(response.content) > 4_000:
            return f"{name}: AN ERROR OF {len(response.content)} BYTES"
        return f"{name}: {response.status_code}"

    async def limit(self) -> str:
        """Asks for as much as the context holds, or one token more."""
        more = int(self._noise.integers(2))
        body = body_of([5] * (CONTEXT - 2 + more), max_tokens=2)
        response = await self._client.post(PATH, json=body)
        wanted = (400,) if more else (200, 429)
        return "limit kept" if response.status_code in wanted else f"limit: {response.status_code}"


def _head(length: int, path: str = PATH) -> bytes:
    """That of a request with a body of so many bytes, after which the connection ends."""
    lines = f"POST {path} HTTP/1.1", "host: localhost", "connection: close"
    return "\r\n".join((
        *lines, "content-type: application/json", f"content-length: {length}", "", ""
    )).encode()  # fmt: skip


async def _choices(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                yield choice


async def _pieces(response: httpx.Response) -> AsyncIterator[str]:
    async for choice in _choices(response):
        yield choice["text"]


def _judged(text: str, wanted: str) -> str:
    return "right text" if text == wanted else "WRONG TEXT"


def resident(process: int) -> float:
    """Memory of a process in MiB."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


_FAULT = re.compile(r"WRONG|AN ERROR OF|(status|:) 5[0-9][0-9]$")
"""Of outcomes that there may not be."""


async def sent(server: Server, abuse: Abuse, process: int) -> int:
    """Sends all requests, and prints what became of them and of the server's memory; how many had
    an outcome that there may not be.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        clients, room = Clients(server, client, 0), asyncio.Semaphore(abuse.connections)
        memory: list[float] = []

        async def one(number: int) -> None:
            async with room:
                await clients.one()
            if number % (abuse.requests // 10) == 0:
                memory.append(resident(process))

        start = time.perf_counter()
        with asked_for_health(server) as health:
            await asyncio.gather(*map(one, range(abuse.requests)))
        seconds = time.perf_counter() - start
    print(f"{abuse.requests} requests, {abuse.connections} at once, {seconds:.0f} s")
    for outcome, count in sorted(clients.outcomes.items()):
        print(f"  {outcome}: {count}")
    print(f"  memory, MiB: {', '.join(f'{each:.0f}' for each in memory)}")
    print(f"  /health, ms: {health[0]}")
    if clients.chats:
        chats = np.quantile(clients.chats, (0.5, 0.9, 1.0))
        print("  short chats, s (median, 90 %, longest):", ", ".join(f"{t:.2f}" for t in chats))
    held = [1000 * server.gauge("event_loop_held_seconds_max", by) for by in ("clock", "processor")]
    print(
        f"  the event loop was held for at most {held[0]:.1f} ms; at most {held[1]:.1f} ms of them "
        "were its own thread's",
        flush=True,
    )
    return sum(count for outcome, count in clients.outcomes.items() if _FAULT.search(outcome))


@contextlib.contextmanager
def asked_for_health(server: Server) -> Iterator[list[str]]:
    """Asks for `/health` meanwhile; what it found is in the list behind it."""
    found: list[str] = []
    command = [sys.executable, "-m", "tests.health_watch", server.url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as watching:
        yield found
        found.append(watching.communicate()[0].strip())


def in_mid_stream(server: Server, process: subprocess.Popen[str]) -> str:
    """A signal while a stream runs."""
    body = body_of([3, 4], stream=True, max_tokens=200)
    with httpx.stream("POST", f"{server.url}{PATH}", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        last = [line for line in lines if line][-1]
    return f"last line {last!r}, exit code {process.wait(60)}"


def in_a_template(server: Server, process: subprocess.Popen[str]) -> str:
    """One signal while chat templates run that never end."""
    sockets = []
    content = json.dumps(BOMB).encode()
    for _ in range(4):
        own = socket.create_connection(("127.0.0.1", server.port))
        own.sendall(_head(len(content), CHAT) + content)
        sockets.append(own)
    time.sleep(1)
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = process.wait(60)
    for own in sockets:
        own.close()
    return f"exit code {code} after {time.monotonic() - start:.1f} s"


def _save_broken(draft: Path) -> None:
    """Another model in the draft's place, whose weights are finite and whose logits are not."""
    model, tokenizer = specjax.load(str(draft))
    worse = broken(model, 3e38)
    tokens = jnp.asarray([[5, 6, 7]], jnp.int32)
    logits, _ = forward(worse, tokens, jnp.arange(3, dtype=jnp.int32)[None], None, None)
    assert not np.isfinite(np.asarray(jax.nn.softmax(logits))).any()
    shutil.rmtree(draft)
    save_model(worse, draft, tokenizer=tokenizer, dtype="float32")


def main() -> None:
    """Abuses, and prints what came of it."""
    abuse = tyro.cli(Abuse, config=(tyro.conf.FlagCreatePairsOff,))
    draft = Path(tempfile.mkdtemp()) / "draft"
    shutil.copytree(pair_folder() / "two", draft)
    target = shutil.copytree(pair_folder() / "target", draft.parent / "target")
    (target / "chat_template.jinja").write_text(TEMPLATE)
    server = Server(abuse, draft, target)
    with server.running() as process:
        faults = asyncio.run(sent(server, abuse, process.pid))
        left = server.left_behind()
        print("  rows, places in the queue, matchers (and pages) taken in the end:", left)
        faults += sum(map(bool, left))
        shutil.copytree(draft, draft.parent / "kept")
        shutil.rmtree(draft)
        faults += asyncio.run(sent(server, dataclasses.replace(abuse, requests=100), process.pid))
        print("  (that was without the draft's folder)")
        print("a signal in mid-stream:", in_mid_stream(server, process))
    shutil.move(draft.parent / "kept", draft)
    with server.running() as process:
        print("a signal while templates run:", in_a_template(server, process))
    with server.running() as process:
        process.kill()
        process.wait()
    with server.running():
        answer = httpx.post(f"{server.url}{PATH}", json=body_of([3, 4]), timeout=60)
        print("killed, and started again at the same port: status", answer.status_code)
    _save_broken(draft)
    with server.running() as process:
        faults += asyncio.run(sent(server, dataclasses.replace(abuse, requests=200), process.pid))
        left = server.left_behind()
        print("  (that was with a draft that gives NaN); taken in the end:", left)
    faults += sum(map(bool, left))
    print(f"{faults} faults")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
