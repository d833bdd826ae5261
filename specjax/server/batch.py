"""Requests of a file in OpenAI's batch format, through the routes of a server, without a socket."""

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from starlette.types import ASGIApp, Message

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""What a request may be for."""


class Line(NamedTuple):
    """A request of a file: the number of its line, its id, and itself or what is wrong with it."""

    number: int
    custom_id: str
    request: dict[str, Any] | None
    wrong: str = ""


def read(file: Path) -> list[Line]:
    """The requests of a file, also those that are wrong.

    Raises:
      ValueError: it cannot be read, two have one id, or it has none.
    """
    try:
        texts = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}.") from error
    lines = [_line(number, text) for number, text in enumerate(texts, 1) if text.strip()]
    if not lines:
        raise ValueError(f"{file} has no request.")
    seen: dict[str, int] = {}
    for line in lines:
        if line.custom_id in seen:
            raise ValueError(
                f"lines {seen[line.custom_id]} and {line.number} of {file} have one custom_id, "
                f"{line.custom_id!r}."
            )
        seen[line.custom_id] = line.number
    return lines


def _line(number: int, text: str) -> Line:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return Line(number, f"line-{number}", None, "the line is no JSON.")
    if not isinstance(value, dict):
        return Line(number, f"line-{number}", None, "the line is no object.")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return Line(number, f"line-{number}", None, "custom_id is missing.")
    if value.get("method", "POST") != "POST":
        return Line(number, custom_id, None, f"method is {value['method']!r}; it must be 'POST'.")
    if value.get("url") not in URLS:
        url = value.get("url")
        return Line(
            number, custom_id, None, f"url is {url!r}; it must be one of {', '.join(URLS)}."
        )
    if not isinstance(value.get("body"), dict):
        return Line(number, custom_id, None, "body is missing.")
    if value["body"].get("stream"):
        return Line(number, custom_id, None, "body.stream is true; a file has whole answers.")
    return Line(number, custom_id, value)


def answered(file: Path) -> set[str]:
    """The ids of requests that a file has answers to; a line that was cut off is taken out of it.

    Raises:
      ValueError: it holds something else, or cannot be read or written.
    """
    try:
        held = file.read_bytes()
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}.") from error
    whole = held[: held.rfind(b"\n") + 1]
    found = set()
    for number, text in enumerate(whole.splitlines(), 1):
        try:
            found.add(json.loads(text)["custom_id"])
        except (ValueError, KeyError, TypeError) as error:
            message = f"line {number} of {file} is no answer; name another file."
            raise ValueError(message) from error
    if len(whole) < len(held):
        file.write_bytes(whole)
    return found


async def answer_all(
    app: ASGIApp, lines: list[Line], out: TextIO, at_once: int, tell: Callable[[int, int], None]
) -> int:
    """Answers requests, so many at once, and writes each answer as it comes.

    Gives how many were refused or failed; `tell` is told how many of how many are done.
    """
    waiting, done, failed = iter(lines), 0, 0

    async def work(waiting: Iterator[Line]) -> None:
        nonlocal done, failed
        for line in waiting:
            made = await _answer(app, line)
            out.write(json.dumps(made, ensure_ascii=False) + "\n")
            out.flush()
            done += 1
            failed += made["error"] is not None
            tell(done, len(lines))

    await asyncio.gather(*(work(waiting) for _ in range(at_once)))
    return failed


async def _answer(app: ASGIApp, line: Line) -> dict[str, Any]:
    made: dict[str, Any] = {
        "id": f"batch_req_{secrets.token_hex(12)}", "custom_id": line.custom_id,
        "response": None, "error": None,
    }  # fmt: skip
    if line.request is None:
        return made | {"error": {"code": "invalid_request", "message": line.wrong}}
    status, identity, body = await _post(app, line.request["url"], line.request["body"])
    made["response"] = {"status_code": status, "request_id": identity, "body": body}
    if status != 200:
        wrong = body.get("error", {}) if isinstance(body, dict) else {}
        code = wrong.get("code") or wrong.get("type") or str(status)
        made["error"] = {"code": code, "message": wrong.get("message", "")}
    return made


async def _post(app: ASGIApp, path: str, body: dict[str, Any]) -> tuple[int, str, Any]:
    """The status, the request's id and the value of the response to a body."""
    content = json.dumps(body).encode()
    given = iter([{"type": "http.request", "body": content, "more_body": False}])
    status, pieces, headers = 500, bytearray(), {}
    never = asyncio.Event()

    async def receive() -> Message:
        message = next(given, None)
        if message is None:
            await never.wait()  # whoever waits for a disconnect waits until the response is there
        assert message is not None
        return message

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], dict(message["headers"])
        else:
            pieces.extend(message.get("body", b""))

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [
            (b"host", b"localhost"), (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
        ],
        "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 80), "root_path": "",
    }  # fmt: skip
    await app(scope, receive, send)
    identity = headers.get(b"x-request-id", b"").decode()
    return status, identity, json.loads(pieces) if pieces else None
