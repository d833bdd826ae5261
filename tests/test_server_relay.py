"""Requests that another process answers, who gets them, and how many replicas there are."""

import asyncio
import contextlib
import json

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware

from specjax.server.affinity import PrefixIndex, ranked, replicas_for
from specjax.server.app import create_app
from specjax.server.metrics import merged
from specjax.server.options import ServerOptions
from specjax.server.relay import (
    NO_PROMPT,
    Front,
    RelayedRequest,
    ReplicaLostError,
    answered,
    beginning,
)
from specjax.server.stored import replica_of, response_id
from tests.letters import Letters
from tests.scripted_engine import ScriptedEngine

COMPLETION = {"prompt": "abc", "max_tokens": 6, "model": "scripted"}
ENDLESS = COMPLETION | {"max_tokens": 500, "stream": True}


class Replicas:
    """A front, and the applications behind it, which get requests in turn."""

    def __init__(self, count: int = 1, **script) -> None:
        self.engines = [ScriptedEngine([(1, 2, 3, 0)], ready=True, **script) for _ in range(count)]
        options = ServerOptions(served_model_name="scripted", max_body_bytes=10_000)
        self.apps = [create_app(engine, Letters(), options) for engine in self.engines]
        self.seen: list[RelayedRequest] = []
        self.lost_after: int | None = None
        middleware = Middleware(
            Front, answers=self.answers, expositions=self.expositions, options=options
        )
        self.front = Starlette(middleware=[middleware])

    async def answers(self, request):
        app = self.apps[len(self.seen) % len(self.apps)]
        self.seen.append(request)
        count = 0
        async with contextlib.aclosing(answered(app, request)) as answers:
            async for messages in answers:
                if count == self.lost_after:
                    raise ReplicaLostError
                count += 1
                yield messages

    async def expositions(self):
        return {
            f"r{number}": app.state.service.metrics.exposition().decode()
            for number, app in enumerate(self.apps)
        }

    def close(self) -> None:
        for app in self.apps:
            app.state.service.close()


@pytest.fixture
def replicas():
    made = []

    def make(count: int = 1, **script) -> Replicas:
        made.append(Replicas(count, **script))
        return made[-1]

    yield make
    for each in made:
        each.close()


def ask(app, method: str, path: str, **more) -> httpx.Response:
    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **more)

    return asyncio.run(asked())


def same(text: str) -> str:
    """A body without what differs from one answer to the next."""
    lines = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            value = json.loads(line.removeprefix("data: "))
            for name in ("id", "created", "now"):
                value.pop(name, None)
            line = json.dumps(value)
        lines.append(line)
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/completions", COMPLETION),
        ("POST", "/v1/completions", COMPLETION | {"stream": True, "n": 2}),
        ("POST", "/v1/completions", {"prompt": 5}),
        ("POST", "/v1/completions", COMPLETION | {"model": "other"}),
        ("POST", "/v1/completions", COMPLETION | {"user": "x" * 20_000}),
        ("POST", "/nowhere", {}),
        ("GET", "/v1/models", None),
        ("GET", "/ready", None),
        ("DELETE", "/v1/completions", None),
    ],
    ids=[
        "whole",
        "stream",
        "a wrong field",
        "another model",
        "too large",
        "no route",
        "models",
        "ready",
        "another method",
    ],
)
def test_what_comes_back_is_what_the_application_says(replicas, method, path, body):
    own = replicas()
    direct = ask(own.apps[0], method, path, json=body)
    relayed = ask(own.front, method, path, json=body)
    assert relayed.status_code == direct.status_code
    assert same(relayed.text) == same(direct.text)
    assert relayed.headers.keys() | {"x-request-id"} == direct.headers.keys()


def test_a_body_of_another_kind_is_refused_before_it_goes_anywhere(replicas):
    own = replicas()
    assert ask(own.front, "POST", "/v1/completions", content=b"{}").status_code == 415
    assert not own.seen


def test_a_request_that_has_an_id_keeps_it(replicas):
    got = ask(replicas().front, "GET", "/ready", headers={"x-request-id": "theirs"})
    assert "x-request-id" not in got.headers, "who gave it an id answers with that"


async def until(holds) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.005)


def scope_of(body: bytes) -> dict:
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": "/v1/completions", "raw_path": b"/v1/completions",
        "query_string": b"", "root_path": "", "client": ("127.0.0.1", 1), "server": ("x", 1),
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json"),
                    (b"content-length", str(len(body)).encode())],
    }  # fmt: skip


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_row(replicas, stream):
    own = replicas(endless=True, delay=0.005)
    engine, sent = own.engines[0], []

    async def leaves() -> None:
        body = json.dumps(ENDLESS | {"stream": stream}).encode()
        came: asyncio.Queue = asyncio.Queue()
        came.put_nowait({"type": "http.request", "body": body, "more_body": False})

        async def send(message) -> None:
            sent.append(message)

        task = asyncio.create_task(own.front(scope_of(body), came.get, send))
        await until(lambda: engine.running and (sent or not stream))
        came.put_nowait({"type": "http.disconnect"})
        await until(lambda: not engine.running)
        await task

    asyncio.run(leaves())
    assert engine.aborted == 1


def test_a_request_whose_replica_ends_is_told_so(replicas):
    own = replicas(endless=True, delay=0.002)
    own.lost_after = 0
    lost = ask(own.front, "POST", "/v1/completions", json=COMPLETION)
    assert lost.status_code == 503
    assert (lost.json()["error"]["code"], lost.headers["retry-after"]) == ("replica_lost", "1")
    own.lost_after = 3
    stream = ask(own.front, "POST", "/v1/completions", json=ENDLESS)
    events = [line for line in stream.text.splitlines() if line.startswith("data: ")]
    assert stream.status_code == 200
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert "[DONE]" not in stream.text
    own.lost_after = 0
    assert ask(own.front, "POST", "/v1/messages", json={}).json()["type"] == "error"
    assert not own.engines[0].running


def test_metrics_are_those_of_every_replica(replicas):
    text = ask(replicas(2).front, "GET", "/metrics").text
    name = "vllm:num_requests_waiting"
    assert f'{name}{{replica="r0",model_name="scripted"}} 3.0' in text
    assert f'{name}{{replica="r1",model_name="scripted"}} 3.0' in text
    assert text.count(f"# TYPE {name} gauge") == 1
    kinds = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds))
    assert merged({}) == ""


def test_a_response_that_is_kept_names_its_replica():
    assert response_id("ab12", "") == "resp_ab12"
    kept = response_id("ab12", "x7")
    assert (replica_of(kept), replica_of("resp_ab12"), replica_of("other-x")) == ("x7", "", "")


def test_requests_say_how_they_begin_and_which_replica_they_mean(replicas):
    own = replicas()
    for body in (
        {"prompt": "abc"},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"input": "go on", "instructions": "be brief. ", "previous_response_id": "resp_x7-ab"},
    ):
        ask(own.front, "POST", "/v1/responses", json=body)
    ask(own.front, "GET", "/v1/responses/resp_x8-ab")
    chat = '[{"role": "user", "content": "hi"}]'
    assert [each.prompt for each in own.seen] == ["abc", chat, "be brief. go on", NO_PROMPT]
    assert [each.replica for each in own.seen] == ["", "", "x7", "x8"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"[" * 100_000, b'{"prompt": null}', b"\xff"])
def test_a_body_that_is_no_request_begins_with_nothing(body):
    assert beginning(body) == ("", "")


def test_what_begins_alike_goes_where_it_is_known():
    index, shared = PrefixIndex(), "s" * 640
    running = {"a": 0, "b": 0}
    index.add(shared + "first", "b")
    assert ranked(shared + "second", index, running, 8)[0] == "b"
    assert ranked("t" + shared, index, {"a": 0, "b": 1}, 8) == ["a", "b"], "it begins otherwise"
    assert ranked(shared + "u" * 700, index, {"a": 0, "b": 1}, 8)[0] == "a", "less than half"
    assert ranked(shared + "x", index, {"a": 0, "b": 7}, 8)[0] == "b"
    assert ranked(shared + "x", index, {"a": 0, "b": 8}, 8)[0] == "a", "it is too far ahead"
    for count in range(3):
        assert ranked(shared + "x", index, {"a": count}, 8) == ["a"], "b is no more"
    assert ranked(shared, index, {}, 8) == []
    index.add("p" * 2000, "a")
    assert ranked("p" * 1100 + "q" * 9000, index, running, 8)[0] == "a", "as much is worth it"


def test_an_index_forgets_what_was_of_use_longest_ago():
    index = PrefixIndex(blocks=2)
    for prompt in ("one", "two", "one", "three"):
        index.add(prompt, "a")
    assert index.matched("one") == {"a": 3}
    assert index.matched("two") == {}


@pytest.mark.parametrize(
    ("running", "waiting", "there", "wanted"),
    [
        (0, 0, 2, 0),  # Ray keeps the least number
        (8, 0, 2, 1),
        (16, 0, 2, 2),
        (16, 4, 2, 2),  # as many as may wait
        (16, 12, 2, 3),
        (16, 100, 2, 14),
    ],
)
def test_there_are_as_many_replicas_as_have_rows_for_all(running, waiting, there, wanted):
    assert replicas_for(running, waiting, there, 8, 2.0) == wanted
