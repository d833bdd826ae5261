"""`specjax.server.ray:app` with Ray Serve of its own, in a process of its own.

    python -m benchmarks.serving.ray_process '{"model": "bundled", "num_replicas": 2}' 8000

serves until its standard input ends, of which a line is a command: `replicas` gives the names of
those that Ray has, `kill NAME` ends one as a machine that fails does.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

_STORE_BYTES = 80 << 20
"""Of Ray's object store: bodies and events are small."""
_ACTOR = "SERVE_REPLICA::default#Engine#"
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_worker_niceness": "0",  # by default 15: what else a machine does would come first
}
"""Of Ray's processes."""


class RayServer:
    """The process, from outside.

    Attributes:
      url: where it listens.
    """

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._process = process

    def replicas(self) -> list[str]:
        """The names of the replicas that Ray has, also of those that are being made."""
        return self._asked("replicas")

    def kill(self, replica: str) -> None:
        """Ends a replica's process at once."""
        self._asked(f"kill {replica}")

    def answer(self) -> Any:
        """The next line of its standard output.

        Raises:
          RuntimeError: the process has ended.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("= "):
                return json.loads(line[2:])
        raise RuntimeError("Ray's process has ended.")

    def _asked(self, command: str) -> Any:
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)
        return self.answer()


@contextlib.contextmanager
def serving_with_ray(
    environment: Mapping[str, str] = os.environ, **options: Any
) -> Iterator[RayServer]:
    """Ray Serve with replicas, once they take requests; all of it ends in the end.

    Args:
      environment: of all its processes.
      options: of `specjax.server.ray:app`.

    Raises:
      RuntimeError: they do not start; the end of standard error is in the text.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.serving.ray_process", json.dumps(options)]
    own = dict(environment) | _SETTINGS
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            text=True, env=own,
        )  # fmt: skip
        try:
            server = RayServer(process, port)
            try:
                server.answer()
            except RuntimeError as error:
                errors.seek(0)
                raise RuntimeError(f"Ray did not start: {errors.read()[-3000:]}") from error
            yield server
        finally:
            process.communicate()


def main() -> None:
    """Serves until standard input ends."""
    import ray  # pyright: ignore[reportMissingImports]
    from ray import serve  # pyright: ignore[reportMissingImports]

    from specjax.server.ray import app

    options, port = json.loads(sys.argv[1]), int(sys.argv[2])
    replicas = options.get("max_replicas") or options.get("num_replicas", 1)
    ray.init(
        num_cpus=max(replicas, 1), include_dashboard=False, log_to_driver=False,
        object_store_memory=_STORE_BYTES,
    )  # fmt: skip
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app(options))
    print("= null", flush=True)
    for line in sys.stdin:
        command, _, name = line.strip().partition(" ")
        if command == "kill":
            ray.kill(ray.get_actor(_ACTOR + name, namespace="serve"))
            print("= null", flush=True)
        else:
            every: Any = ray.util.list_named_actors(all_namespaces=True)
            actors = (each["name"] for each in every)
            names = [each.removeprefix(_ACTOR) for each in actors if each.startswith(_ACTOR)]
            print(f"= {json.dumps(sorted(names))}", flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
