"""A table at the end of a run: seconds of each file's tests, of compiling, and programs compiled.

Threads that compile side by side add up; what other processes compile is not counted. Programs that
another process or this one compiled before and jax found in its folder are left out of the last
number; to find them takes a part of the seconds.
"""

from collections import defaultdict

import jax
import numpy as np
import pytest

_SHOWN = 25
"""Files that have a line of their own."""
_COMPILING = ("jaxpr_to_mlir_module_duration", "backend_compile_duration")
"""Ends of the names of what jax reports; tracing is left out, as a trace holds others."""

_FOUND = "/jax/compilation_cache/cache_hits"

_compiled = [0.0, 0]


def pytest_configure() -> None:
    """Adds up what jax says of this process' compilations."""

    def add(event: str, seconds: float, **_: object) -> None:
        _compiled[0] += seconds * event.endswith(_COMPILING)
        _compiled[1] += event.endswith(_COMPILING[1])

    def found(event: str, **_: object) -> None:
        _compiled[1] -= event == _FOUND

    jax.monitoring.register_event_duration_secs_listener(add)
    jax.monitoring.register_event_listener(found)


def pytest_collection_finish() -> None:
    """Forgets what importing the tests' modules compiled, which is of no file alone."""
    _compiled[:] = 0.0, 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """Notes the seconds since the last report, which a worker sends along."""
    del item
    report = yield
    report.user_properties = [*report.user_properties, ("compiling", tuple(_compiled))]
    _compiled[:] = 0.0, 0
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Writes the table."""
    files = defaultdict[str, np.ndarray](lambda: np.zeros(3))
    for report in (each for kind in terminalreporter.stats.values() for each in kind):
        if isinstance(report, pytest.TestReport):
            own = dict(report.user_properties).get("compiling", (0.0, 0))
            files[report.nodeid.partition("::")[0]] += (report.duration, *own)
    if not files:
        return
    ordered = sorted(files, key=lambda file: files[file][0], reverse=True)
    lines = [(file, files[file]) for file in ordered[:_SHOWN]]
    if rest := ordered[_SHOWN:]:
        lines.append((f"{len(rest)} other files", sum(files[file] for file in rest)))
    lines.append(("all", sum(files.values())))
    terminalreporter.section("seconds of tests by file, of compiling, and programs compiled")
    for name, (seconds, compiling, programs) in lines:
        terminalreporter.write_line(f"{seconds:8.1f} {compiling:8.1f} {programs:6.0f}  {name}")
