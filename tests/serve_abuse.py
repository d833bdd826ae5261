"""A server under abuse over real sockets: nothing leaks, nobody gets another's text.

    python -m tests.serve_abuse --requests 10000 --connections 1000

A tiny model with a tiny draft is served. Clients ask for texts that are known; three in ten leave
at any moment, some read more slowly than a socket holds, some send half a head or half a body, some
ask for as much as fits or one token more. Some attack: with a chat template that never ends, very
many messages or token ids, megabytes of spaces, a field's name of megabytes. In the end no row and
no place in the queue may be taken, no text may have been wrong, and memory may not have grown. How
long the server's event loop was held is asked of the server, and seen from outside by a process
that asks for `/health` all the time.

Then the draft's folder is removed while the server runs, a signal comes in mid-stream and one
while a template runs, a server that was killed is started again at the same port, and one has a
draft that gives NaN.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

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
    "whole": 0.28, "stream": 0.28, "leaves": 0.28, "slow": 0.04, "half": 0.03, "limit": 0.03,
    "chat": 0.03, "attack": 0.03,
}  # fmt: skip
PATH, CHAT = "/v1/completions", "/v1/chat/completions"
TEMPLATE = (
    "{% for a in range(n | default(0)) %}{% for b in range(n) %}{% for c in range(n) %}"
    "{% endfor %}{% endfor %}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
USER = [{"role": "user", "content": "hi"}]
BOMB = {"messages": USER, "chat_template_kwargs": {"n": 99_999}}
_MANY = 900_000
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
        """Rows and places in the queue that are taken still, at the latest after `seconds`; and
        pages that have leaked, where there are any.
        """
        end = time.monotonic() + seconds
        while True:
            found = [self.gauge("num_requests_running"), self.gauge("num_requests_waiting")]
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
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(float(self._noise.exponential(0.5))):
                async with self._client.stream("POST", PATH, json=body) as response:
                    async for _ in _pieces(response):
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


async def _pieces(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                yield choice["text"]


def _judged(text: str, wanted: str) -> str:
    return "right text" if text == wanted else "WRONG TEXT"


def resident(process: int) -> float:
    """Memory of a process in MiB."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def sent(server: Server, abuse: Abuse, process: int) -> None:
    """Sends all requests, and prints what became of them and of the server's memory."""
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
        asyncio.run(sent(server, abuse, process.pid))
        print("  rows, places in the queue (and pages) taken in the end:", server.left_behind())
        shutil.copytree(draft, draft.parent / "kept")
        shutil.rmtree(draft)
        asyncio.run(sent(server, dataclasses.replace(abuse, requests=100), process.pid))
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
        asyncio.run(sent(server, dataclasses.replace(abuse, requests=200), process.pid))
        print("  (that was with a draft that gives NaN); taken in the end:", server.left_behind())


if __name__ == "__main__":
    main()
