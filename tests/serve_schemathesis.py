"""Schemathesis over the OpenAPI document of a server that runs a model.

    pip install schemathesis && python -m tests.serve_schemathesis --cases 5000

Cases that follow the document and cases that break it are sent to `specjax serve` with a tiny model
and a tiny draft. Every check of schemathesis is made but one, that what the document allows is
accepted: it cannot say how large the vocabulary is, or that two fields exclude each other. A
response with a status of 500 or more, a time-out, a row that stays taken, or memory that grows
by more than a tenth once a fifth of the cases have run is a failure.
"""

import dataclasses
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import tyro

from tests.folders import pair_folder
from tests.serve_abuse import Abuse, Server, resident

TIMEOUT_SECONDS = 30
"""Of a response."""
_UNKNOWABLE = "positive_data_acceptance"


@dataclasses.dataclass(frozen=True)
class Cases:
    """How many."""

    cases: int = 5_000
    """At least so many are sent."""
    seed: int = 0
    """Names them."""


def sent(url: str, per_operation: int, seed: int) -> int:
    """Sends cases and prints what came of them; how many were sent."""
    command = (
        "schemathesis", "run", f"{url}/openapi.json", "--checks", "all",
        "--exclude-checks", _UNKNOWABLE, "--phases", "coverage,fuzzing", "--continue-on-failure",
        "--max-examples", str(per_operation), "--seed", str(seed), "--warnings", "off",
        "--request-timeout", str(TIMEOUT_SECONDS),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    found = re.search(r"^ +([\d,]+) generated(.*)", run.stdout, re.M)
    if run.returncode or not found:
        raise SystemExit(run.stdout + run.stderr)
    print(f"  {found[1]} cases with seed {seed}{found[2]}", flush=True)
    return int(found[1].replace(",", ""))


def main() -> None:
    """Sends them, and prints what came of it."""
    asked = tyro.cli(Cases, config=(tyro.conf.FlagCreatePairsOff,))
    if shutil.which("schemathesis") is None:
        raise SystemExit(
            "this needs schemathesis, which is not installed: pip install schemathesis."
        )
    with tempfile.TemporaryDirectory() as name:
        target, draft = Path(name) / "target", Path(name) / "draft"
        shutil.copytree(pair_folder() / "target", target)
        shutil.copytree(pair_folder() / "two", draft)
        template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        (target / "chat_template.jinja").write_text(template)  # or no chat comes to the model
        server = Server(Abuse(), draft, target)
        with server.running() as process:
            memory = [resident(process.pid)]
            total = seed = 0
            for share in (5, 1):
                while total < asked.cases // share:
                    total += sent(server.url, asked.cases // share // 4, asked.seed + seed)
                    seed += 1
                memory.append(resident(process.pid))
            left = server.left_behind()
    print(f"{total} cases; memory, MiB: {', '.join(f'{each:.0f}' for each in memory)}; rows, "
          f"places in the queue and matchers of grammars taken in the end: {left}")  # fmt: skip
    if any(left) or memory[-1] > 1.1 * memory[-2]:
        sys.exit(1)


if __name__ == "__main__":
    main()
