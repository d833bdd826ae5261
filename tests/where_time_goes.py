"""A table at the end of a run: seconds of each file's tests, and seconds of compiling.

Threads that compile side by side add up; what other processes compile is not counted.
"""

from collections import defaultdict

import jax
import pytest

_SHOWN = 25
"""Files that have a line of their own."""
_COMPILING = ("jaxpr_to_mlir_module_duration", "backend_compile_duration")
"""Ends of the names of what jax reports; tracing is left out, as a trace holds others."""

_compiled = [0.0]


def pytest_configure() -> None:
    """Adds up what jax says of this process' compilations."""

    def add(event: str, seconds: float, **_: object) -> None:
        _compiled[0] += seconds * event.endswith(_COMPILING)

    jax.monitoring.register_event_duration_secs_listener(add)


def pytest_collection_finish() -> None:
    """Forgets what importing the tests' modules compiled, which is of no file alone."""
    _compiled[0] = 0.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """Notes the seconds since the last report, which a worker sends along."""
    del item
    report = yield
    report.user_properties = [*report.user_properties, ("compiling", _compiled[0])]
    _compiled[0] = 0.0
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Writes the table."""
    seconds, compiling = defaultdict[str, float](float), defaultdict[str, float](float)
    for report in (each for kind in terminalreporter.stats.values() for each in kind):
        if isinstance(report, pytest.TestReport):
            file = report.nodeid.partition("::")[0]
            seconds[file] += report.duration
            compiling[file] += dict(report.user_properties).get("compiling", 0.0)
    if not seconds:
        return
    ordered = sorted(seconds, key=seconds.__getitem__, reverse=True)
    lines = [(file, seconds[file], compiling[file]) for file in ordered[:_SHOWN]]
    rest = ordered[_SHOWN:]
    if rest:
        lines.append((f"{len(rest)} other files",
                      sum(map(seconds.get, rest)), sum(map(compiling.get, rest))))  # fmt: skip
    lines.append(("all", sum(seconds.values()), sum(compiling.values())))
    terminalreporter.section("seconds of tests by file, and of compiling")
    for name, own, made in lines:
        terminalreporter.write_line(f"{own:8.1f} {made:8.1f}  {name}")
