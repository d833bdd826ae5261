"""Which names a server answers to, which origins' pages may read it, and HEAD."""

import socket

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from specjax.cli.options import Serve
from specjax.cli.serve import serve, served_name
from specjax.server.hosts import HostCheck
from specjax.server.options import ServerOptions
from tests.scripted_engine import Letters, ScriptedEngine, serving

ORIGIN = "https://app.example"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


def status(headers, **options) -> int:
    """The status of a GET behind the check."""
    checked = HostCheck(PlainTextResponse("text"), ServerOptions(served_model_name="m", **options))
    return TestClient(checked).get("/debug/requests", headers=headers).status_code


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.8.9.1", "[::1]:8000", "localhost."],
)
def test_localhosts_names_are_answered(host):
    assert status({"Host": host}) == 200


@pytest.mark.parametrize(
    ("host", "refused"),
    [
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("192.168.0.7", 403),
        ("[::2]", 403),
        ("localhost@evil.example", 400),
        ("localhost, evil.example", 400),
        ("http://localhost", 400),
        ("", 400),
    ],
)
def test_a_name_that_a_page_let_point_here_is_refused(host, refused):
    assert status({"Host": host}) == refused


def test_other_names_where_they_are_allowed_or_keys_are_asked_for():
    far = {"Host": "models.example:80"}
    assert status(far, allowed_hosts=("Models.example",)) == 200
    assert status({"Host": "localhost"}, allowed_hosts=("models.example",)) == 200
    assert status({"Host": "evil.example"}, allowed_hosts=("models.example",)) == 403
    assert status({"Host": "evil.example"}, allowed_hosts=("*",)) == 200
    assert status(far, host="0.0.0.0") == 200
    assert status(far, host="0.0.0.0", allowed_hosts=("other.example",)) == 403
    assert status(far | {"Authorization": "Bearer k"}, api_keys=("k",)) == 200


def raw(port: int, request: bytes) -> bytes:
    """What a server answers to these bytes, as far as its status line."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(request)
        return connection.recv(1 << 16).split(b"\r\n")[0]


@pytest.fixture(scope="module")
def server():
    options = {"allowed_origins": (ORIGIN,)}
    with serving(ScriptedEngine(ready=True), Letters(), **options) as running:
        yield running


@pytest.mark.parametrize(
    "head",
    [
        b"GET /debug/requests HTTP/1.1\r\n\r\n",
        b"GET /debug/requests HTTP/1.0\r\n\r\n",
        b"GET /debug/requests HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"GET /debug/requests HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
    ],
)
def test_a_missing_or_doubled_host_is_refused(server, head):
    assert b" 400 " in raw(server.port, head)


def test_a_refusal_has_openais_shape(server):
    found = httpx.get(f"{server.url}/v1/models", headers={"Host": "evil.example"})
    assert found.json()["error"] == {
        "message": "The Host header names 'evil.example', which is none of this server's hosts; "
        "--allowed-hosts adds some.",
        "type": "invalid_request_error",
        "param": None,
        "code": "host_not_allowed",
    }


def test_pages_of_allowed_origins_may_use_the_api(server):
    before = httpx.options(f"{server.url}/v1/chat/completions", headers=PREFLIGHT)
    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in before.headers["access-control-allow-methods"]
    assert "x-stainless-os" in before.headers["access-control-allow-headers"]
    for path in ("/v1/models", "/v1/nothing"):  # a page sees errors, too
        found = httpx.get(f"{server.url}{path}", headers={"Origin": ORIGIN})
        assert found.headers["access-control-allow-origin"] == ORIGIN


def test_pages_of_other_origins_may_not(server):
    other = PREFLIGHT | {"Origin": "https://evil.example"}
    assert httpx.options(f"{server.url}/v1/models", headers=other).status_code == 400
    found = httpx.get(f"{server.url}/v1/models", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in found.headers


def test_by_default_no_page_may():
    with serving(ScriptedEngine(ready=True), Letters()) as running:
        assert httpx.options(f"{running.url}/v1/models", headers=PREFLIGHT).status_code == 405
        found = httpx.get(f"{running.url}/v1/models", headers={"Origin": ORIGIN})
        assert "access-control-allow-origin" not in found.headers


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/version", "/metrics", "/v1/models"])
def test_head_is_get_without_a_body(server, path):
    found, whole = httpx.head(server.url + path), httpx.get(server.url + path)
    assert (found.status_code, found.content) == (200, b"")
    assert found.headers["content-type"] == whole.headers["content-type"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("allowed_origins", "app.example"),
        ("allowed_origins", "https://app.example/path"),
        ("allowed_origins", "https://app.example/"),
        ("allowed_origins", '["*"]'),
        ("allowed_hosts", "https://models.example"),
        ("allowed_hosts", "models.example:80"),
        ("allowed_hosts", "a b"),
    ],
)
def test_what_is_no_origin_or_host_is_refused(option, value):
    with pytest.raises(ValueError, match=f"--{option.replace('_', '-')} has '"):
        serve(Serve(**{option: f"*, {value}"}))


def test_a_model_is_served_by_its_folders_name(tmp_path, monkeypatch):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    snapshot = tmp_path / "models--org--some--name" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    names = {
        str(folder): "my-model",
        f"{folder}/": "my-model",
        str(folder / "model.safetensors"): "my-model",
        str(snapshot): "org/some--name",
        "org/name": "org/name",
        "org/name@main": "org/name",
        "bundled": "bundled",
    }
    assert {name: served_name(name) for name in names} == names
    monkeypatch.chdir(folder)
    assert served_name(".") == "my-model"
