"""Clients that go away, read slowly or send too much, and a process that is told to end."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from specjax.server import transport
from specjax.server.options import ServerOptions
from specjax.server.process import listen, raise_file_limit
from tests.letters import Letters
from tests.scripted_engine import ScriptedEngine, serving, until

LETTERS = (1, 2, 3)
ENDLESS = {"prompt": "abc", "max_tokens": 500}


@pytest.fixture(scope="module")
def server():
    with serving(ScriptedEngine(), Letters(), max_body_bytes=10_000, body_seconds=0.5) as running:
        yield running


@pytest.fixture
def engine(server):
    """The engine, giving letters for ever."""
    fresh = ScriptedEngine([LETTERS], endless=True, delay=0.005, ready=True)
    vars(server.engine).update(vars(fresh))
    return server.engine


def request(path: str, body: dict, *, headers: str = "") -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n{headers}\r\n"
    )
    return head.encode() + content


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reset", [True, False])
def test_a_client_that_goes_away_frees_its_rows(server, engine, stream, reset):
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(request("/v1/completions", ENDLESS | {"stream": stream, "n": 3}))
    until(lambda: len(engine.running) == 3)
    if stream:
        assert connection.recv(10_000)
    if reset:
        linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.close()
    assert until(lambda: not engine.running) < 1
    assert engine.aborted == 3


def test_a_client_that_sent_two_requests_at_once_and_goes_away(server, engine):
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(2 * request("/v1/completions", ENDLESS))
        until(lambda: engine.running)
    assert until(lambda: not engine.running) < 1


def test_a_client_that_goes_away_before_its_first_token(server, engine):
    engine.first_delay = 60
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(request("/v1/chat/completions", ENDLESS)[:-20])
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(request("/v1/completions", ENDLESS))
        until(lambda: engine.running)
    assert until(lambda: not engine.running) < 1


def test_a_slow_reader_keeps_nobody_waiting_and_gets_all(server, engine):
    engine.max_model_len, engine.delay = 200_000, 0.0
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", server.port))
    slow.sendall(request("/v1/completions", ENDLESS | {"stream": True, "max_tokens": 15_000}))
    until(lambda: engine.running)
    with httpx.Client(base_url=server.url) as client:
        for _ in range(2):
            assert client.post("/v1/completions", json=ENDLESS).status_code == 200
    until(lambda: not engine.running, 30)  # its row is free though nothing has been read
    received = b""
    while not received.endswith(b"\r\n0\r\n\r\n"):
        received += slow.recv(1 << 20)
    slow.close()
    parts = [json.loads(line[6:]) for line in received.split(b"\n") if line[:7] == b"data: {"]
    assert "".join(part["choices"][0]["text"] for part in parts) == "abc" * 5_000
    assert len(parts) < 5_000  # of 7,500 events: the others were merged


def chunked(size: int, pause: float = 0.0):
    yield b'{"prompt": "'
    for _ in range(size):
        time.sleep(pause)
        yield b"a" * 1000
    yield b'"}'


def test_bodies_that_are_too_large_or_too_slow(server, engine):
    json_type = {"content-type": "application/json"}
    with httpx.Client(base_url=server.url, timeout=10) as client:

        def status(content) -> int:
            response = client.post("/v1/completions", content=content, headers=json_type)
            assert "message" in response.json()["error"] or response.status_code == 200
            return response.status_code

        assert status(b"a" * 10_001) == 413
        assert status(chunked(20)) == 413
        assert status(chunked(3)) == 400  # only its tokens are too many
        assert status(chunked(6, pause=0.15)) == 408
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(request("/v1/completions", ENDLESS, headers="expect: 100-continue\r\n"))
        assert connection.recv(1000).startswith(b"HTTP/1.1 100")
    head = b"POST /detokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head + b"content-length: 99999\r\nexpect: 100-continue\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection,
        contextlib.suppress(ConnectionError),
    ):
        connection.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(20_000):  # it never ends, and is cut
            connection.sendall(b"400\r\n" + b"a" * 1024 + b"\r\n")
        raise AssertionError("20 MB were taken.")


def test_a_large_body_that_comes_in_one_piece(server, engine):
    """Its last piece is the one that passes the limit."""
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    body = f"transfer-encoding: chunked\r\n\r\n{10_001:x}\r\n{'a' * 10_001}\r\n0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall((head + body).encode())
        assert b" 413 " in connection.recv(10_000).split(b"\r\n")[0]


@pytest.mark.parametrize(
    "rest", [b"x: " + 30 * b"aaaaaaaa", b"x: aaaaaaaaaaaaaaaaaaaa\r\n"], ids=["one", "many"]
)
def test_headers_are_bounded(server, engine, rest):
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(20):
                connection.sendall(rest[:3] + rest[3:] * 400)
        with contextlib.suppress(ConnectionResetError):
            line = connection.recv(10_000).split(b"\r\n")[0]
            assert line.split()[1] in (b"431", b"400")
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_trailers_are_bounded(server, engine):
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    body = "transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n" + "x: a\r\n" * 40_000
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall((head + body).encode())
        with contextlib.suppress(ConnectionResetError):
            assert b" 400 " in connection.recv(10_000).split(b"\r\n")[0]


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nx: "], ids=["none", "some"])
def test_headers_that_do_not_come_end_their_connection(server, engine, sent, monkeypatch):
    monkeypatch.setattr(transport, "HEADER_SECONDS", 1.0)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(5)
        connection.sendall(sent)
        assert connection.recv(100) == b""
    with httpx.Client(base_url=server.url) as client:  # one that asks again and again stays
        for _ in range(3):
            assert client.get("/health").status_code == 200
            time.sleep(0.2)


def test_connections_that_send_nothing_cost_no_requests(server, engine):
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    with httpx.Client(base_url=server.url) as client:
        assert client.post("/v1/completions", json=ENDLESS | {"max_tokens": 3}).status_code == 200
    for connection in idle:
        connection.close()


def test_many_clients_of_which_some_go_away(server, engine):
    engine.delay, engine.room = 0.001, 10_000
    texts = []

    def ask(number: int) -> None:
        size = 3 * (number % 20 + 1)
        with httpx.Client(base_url=server.url, timeout=60, verify=False) as client:
            body = ENDLESS | {"max_tokens": size, "stream": number % 2 == 0}
            with client.stream("POST", "/v1/completions", json=body) as response:
                if number % 3:
                    texts.append((number, size, response.read().decode()))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: not engine.running)
    assert len(texts) == 40
    for number, size, text in texts:
        if number % 2:
            assert json.loads(text)["choices"][0]["text"] == "abc" * (size // 3)
        else:
            assert text.endswith("data: [DONE]\n\n")


# The process.


@contextlib.contextmanager
def process(script: dict, **options):
    """A server's process and its address; what it says on standard error is in `said`."""
    names = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "tests.scripted_engine", json.dumps(script), *names]
    started = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONWARNINGS": "error"}
    )
    assert started.stderr is not None
    started.said = [started.stderr.readline()]
    url = started.said[0].rsplit(" ", 1)[-1].strip().rstrip(".")
    reader = threading.Thread(target=lambda: started.said.extend(started.stderr))
    reader.start()
    try:
        yield started, url
    finally:
        started.kill()
        started.wait()
        reader.join()
        started.stderr.close()


ENDLESS_SCRIPT = {"replies": [LETTERS], "endless": True, "delay": 0.01}


def test_a_signal_lets_requests_finish_and_ends_the_rest():
    with (
        process(ENDLESS_SCRIPT, **{"drain-seconds": 2.0}) as (server, url),
        httpx.Client(base_url=url, timeout=10) as client,
        httpx.Client(base_url=url, timeout=10) as other,
    ):
        until(lambda: client.get("/ready").status_code == 200)
        short, long = ENDLESS | {"max_tokens": 40, "stream": True}, ENDLESS | {"stream": True}
        with (
            client.stream("POST", "/v1/completions", json=short) as first,
            client.stream("POST", "/v1/completions", json=long) as second,
        ):
            start = time.monotonic()
            server.send_signal(signal.SIGTERM)
            until(lambda: other.get("/ready").status_code == 503)
            assert time.monotonic() - start < 1.5
            assert other.get("/health").status_code == 200
            refused = other.post("/v1/completions", json=ENDLESS)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                503, "server_shutting_down",
            )  # fmt: skip
            finished, cut = first.read().decode(), second.read().decode()
        assert finished.endswith("data: [DONE]\n\n")
        assert finished.count("abc"[0]) > 10
        last = json.loads(cut.removesuffix("\n\n").split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["code"] == "server_shutting_down"
        assert server.wait(5) == 0
        assert 1.9 < time.monotonic() - start < 6
    lines = [json.loads(line) for line in server.said if line.startswith("{")]
    assert {line["message"] for line in lines} == {"request"}
    streams = [line for line in lines if "ttft_s" in line]
    assert sorted(line["finish_reasons"][0] for line in streams) == ["abort", "length"]
    assert not any(line["client_aborted"] for line in streams)


def test_a_second_signal_ends_at_once():
    with (
        process(ENDLESS_SCRIPT | {"delay": 1}, **{"drain-seconds": 60}) as (server, url),
        httpx.Client(base_url=url) as client,
    ):
        until(lambda: client.get("/ready").status_code == 200)
        with client.stream("POST", "/v1/completions", json=ENDLESS | {"stream": True}):
            server.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(f"{url}/ready").status_code == 503)
            server.send_signal(signal.SIGTERM)
            assert server.wait(2) == 128 + signal.SIGTERM


def test_a_signal_while_the_engine_starts():
    with process({"start_seconds": 60}) as (server, url):
        until(lambda: httpx.get(f"{url}/health").status_code == 200)
        waiting = httpx.get(f"{url}/v1/models")
        assert (waiting.status_code, waiting.headers["retry-after"]) == (503, "5")
        assert httpx.get(f"{url}/ready").json()["status"] == "starting"
        server.send_signal(signal.SIGINT)
        assert server.wait(5) == 0


def test_a_signal_while_settings_are_compiled():
    """It waits for no compilation: closing the engine would."""
    with process({"settings_compiling": ["specexec:7"], "close_seconds": 60}) as (server, url):
        until(lambda: httpx.get(f"{url}/ready").status_code == 200)
        assert httpx.get(f"{url}/ready").json()["settings_compiling"] == ["specexec:7"]
        server.send_signal(signal.SIGTERM)
        assert server.wait(5) == 0


@pytest.mark.parametrize(
    "script",
    [{"start_error": "scripted trouble."}, {"replies": [LETTERS], "dies_after": 5.0}],
)
def test_an_engine_that_fails_ends_the_process(script):
    with process(script) as (server, url):
        if "dies_after" in script:
            until(lambda: httpx.get(f"{url}/ready").status_code == 200)
        assert server.wait(10) == 1
    assert "scripted trouble." in server.said[-1]
    assert not any("Traceback" in line for line in server.said)


def test_an_address_that_is_taken():
    with (
        listen("127.0.0.1", 0) as listener,
        pytest.raises(ValueError, match=r"cannot listen at 127.0.0.1, port \d+: .*in use"),
    ):
        listen("127.0.0.1", listener.getsockname()[1])
    with pytest.raises(ValueError, match="cannot listen"):
        listen("127.0.0.1", 70_000)


def test_the_server_loads_neither_jax_nor_transformers():
    heavy = "{'jax', 'transformers', 'numpy'}"
    check = f"import sys, specjax.server.app; print(sorted({heavy} & {{*sys.modules}}))"
    made = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"


def test_options_have_safe_defaults():
    options = ServerOptions(served_model_name="m")
    assert options.host == "127.0.0.1"
    assert options.max_body_bytes == 4 << 20


@pytest.mark.parametrize("soft", [256, None])
def test_a_server_may_hold_as_many_connections_as_the_system_lets_it(soft):
    """The limit of open files is raised as far as it may be, and never lowered."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if soft is None else soft, hard))
        raise_file_limit()
        found, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert found == hard if soft is None else found >= min(hard, 1 << 16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
