"""`specjax serve` in a process of its own, and what is asked of it beside requests for text."""

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_ADDRESS = re.compile(r"^specjax: .* at http://127\.0\.0\.1:(\d+)\.$", re.MULTILINE)
_READY = re.compile(r"^specjax: every setting .*has joined, after \d+ s\.$", re.MULTILINE)
_SAID = re.compile(r"^specjax: (.*)$", re.MULTILINE)
_POLL_SECONDS, _END_SECONDS = 0.05, 20.0
_COUNTERS = {
    "steps": "specjax:spec_decode_num_drafts_total",
    "drafted": "specjax:spec_decode_num_draft_tokens_total",
    "accepted": "specjax:spec_decode_num_accepted_tokens_total",
    "generated": "specjax:generation_tokens_total",
}
_GAUGES = ("specjax:num_requests_running", "specjax:num_requests_waiting")


class Server:
    """A server that runs.

    Args:
      process: of the server.
      log: the file that takes what it writes.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self._process, self._log = process, log
        self.port = 0

    def wait(self) -> None:
        """Waits until all its settings have joined, however long it compiles.

        Raises:
          ValueError: it ended before.
        """
        while not _READY.search(text := self._text()):
            if self._process.poll() is not None:
                raise ValueError(f"the server did not start: {self._last_words()}")
            time.sleep(_POLL_SECONDS)
        found = _ADDRESS.search(text)
        assert found is not None
        self.port = int(found[1])

    def fix(self, setting: str) -> None:
        """Lets it draft with one setting from the next step on; `auto` lets it choose.

        Raises:
          ValueError: it has no such setting.
          OSError: it does not answer.
        """
        status, body = self._ask("POST", "/debug/speculation", {"setting": setting})
        if status != 200:
            message = json.loads(body).get("error", {}).get("message", f"status {status}")
            raise ValueError(f"the server refuses the setting {setting}: {message}")

    def counts(self) -> dict[str, float]:
        """Steps of rows, and drafted, accepted and generated tokens, since it started."""
        metrics = self._metrics()
        return {name: metrics[metric] for name, metric in _COUNTERS.items()}

    def report(self) -> dict[str, Any]:
        """What its choice of settings believes and does."""
        return json.loads(self._ask("GET", "/debug/speculation")[1])

    def chosen(self, since: float) -> dict[str, int]:
        """Steps by setting since a time (`time.time`), as far back as the server remembers."""
        found: dict[str, int] = {}
        for span in self.report()["history"]:
            if span["time"] >= since:
                found[span["setting"]] = found.get(span["setting"], 0) + span.get("steps", 1)
        return found

    def wait_until_idle(self) -> None:
        """Waits until no request runs or waits for a row."""
        while any(self._metrics()[name] for name in _GAUGES):
            time.sleep(_POLL_SECONDS)

    def _metrics(self) -> dict[str, float]:
        """Metrics without labels but the model's."""
        lines = self._ask("GET", "/metrics")[1].decode().splitlines()
        values = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.partition("{")[0]: float(value) for name, value in values}

    def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        headers = {} if body is None else {"content-type": "application/json"}
        sent = None if body is None else json.dumps(body)
        try:
            connection.request(method, path, sent, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
                raise ConnectionError(f"the server has ended: {self._last_words()}") from error
            raise ConnectionError(f"the server does not answer: {error!r}") from error
        finally:
            connection.close()

    def _text(self) -> str:
        return self._log.read_text("utf-8", errors="replace")

    def _last_words(self) -> str:
        said = _SAID.findall(self._text())
        return said[-1] if said else f"exit code {self._process.returncode}."


@contextlib.contextmanager
def serving(flags: Sequence[str], log: Path) -> Iterator[Server]:
    """A server whose settings have all joined; its process is ended when the context is left.

    Args:
      flags: of `specjax serve`, but for the address; `--settings` is among them.
      log: a file for what it writes.

    Raises:
      ValueError: it could not start.
    """
    command = [sys.executable, "-m", "specjax", "serve", *flags]
    own = {name: value for name, value in os.environ.items() if name != "SPECJAX_API_KEY"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", "0", "--drain-seconds", "0"],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=own,
        )  # fmt: skip
    try:
        server = Server(process, log)
        server.wait()
        yield server
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
