"""`specjax serve` in a process of its own."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping

import httpx


@contextlib.contextmanager
def serving(
    *flags: str, environment: Mapping[str, str] = os.environ
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server's address and its process, once it is ready; it is killed in the end."""
    command = [sys.executable, "-m", "specjax", "serve", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            url = ""
            for line in process.stderr:
                if " at http" in line:
                    url = line.split(" at ")[1].strip().rstrip(".")
                    assert httpx.get(f"{url}/ready").status_code in (200, 503)
                if "ready." in line:
                    break
            else:
                raise AssertionError(f"the server ended before it was ready: {' '.join(flags)}")
            reader = threading.Thread(target=process.stderr.read, daemon=True)
            reader.start()  # or its pipe fills up
            yield url, process
        finally:
            process.kill()
