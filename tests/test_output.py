"""Files that are written: checked by opening, replaced whole, and lost by nobody."""

import json
import math
import os
import re
import stat
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from specjax.base import output, progress
from specjax.cli.values import check_target_file


def test_a_file_that_is_there_stays_and_one_that_is_not_is_not_made(tmp_path):
    good, link = tmp_path / "good", tmp_path / "link"
    good.write_text("old")
    link.symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")  # whose opening would wait for a reader
    for name in ("good", "link", "new", "pipe"):
        check_target_file("--json", str(tmp_path / name))
    check_target_file("--json", "/dev/null")
    assert good.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["good", "link", "pipe"]


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("/proc/nope/x", "in a folder that does not exist"),
        ("/proc/x.json", "which cannot be written: No such file or directory"),
        ("/dev/full", "which cannot be written: No space left on device"),
        ("{folder}", "which is a folder"),
        ("{folder}/circle", "which cannot be written"),
        ("{folder}/" + "a" * 300, "which cannot be written: File name too long"),
    ],
)
def test_an_impossible_file_is_refused_in_a_sentence(file, sentence, tmp_path):
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(ValueError, match=f"--json is .*{sentence}"):
        check_target_file("--json", file.format(folder=tmp_path))


def test_a_folder_that_takes_no_file_is_refused(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(output.os, "open", refuse)  # permissions do not hold root back
    with pytest.raises(ValueError, match=r"x.json, which cannot be written: Permission denied"):
        check_target_file("FILE", str(tmp_path / "x.json"))


def test_a_file_is_the_old_one_or_the_new_one(tmp_path, monkeypatch):
    file, link = tmp_path / "report.json", tmp_path / "link"
    output.write_json(file, {"a": 1})
    file.chmod(0o640)
    link.symlink_to(file)
    output.write_json(link, {"a": 2})
    assert json.loads(file.read_text()) == {"a": 2}
    assert link.is_symlink()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        output.write_json(file, {"a": 3})
    assert json.loads(file.read_text()) == {"a": 2}
    assert sorted(os.listdir(tmp_path)) == ["link", "report.json"]


def test_a_file_in_a_folder_that_takes_no_other_is_overwritten(tmp_path, monkeypatch):
    """As one that is mounted alone into a container."""
    file = tmp_path / "report.json"
    file.write_text("old")

    def busy(*_):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(Path, "replace", busy)
    output.write_text(file, "new")
    assert file.read_text() == "new"
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_device_is_written_to_and_not_replaced(tmp_path):
    output.write_text("/dev/null", "x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert output.is_stream("/dev/null")
    assert not output.is_stream(tmp_path / "new")


def test_numbers_that_json_has_not_are_null(tmp_path):
    file = tmp_path / "x.json"
    output.write_json(file, {"a": math.nan, "b": (1.5, [math.inf, "NaN"])})
    assert json.loads(file.read_text()) == {"a": None, "b": [1.5, [None, "NaN"]]}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"[" * 200_000, "too deeply nested"),
        (b"\xff", "can't decode"),
        (b"9" * 5000, "4300 digits"),
        (b" " * 101, "more than 100 bytes"),
        (b"", "Expecting value"),
    ],
)
def test_a_damaged_json_file_is_a_value_error(content, sentence, tmp_path):
    file = tmp_path / "x.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        output.read_json(file, 100 if content.startswith(b" ") else 1 << 20)


@pytest.fixture
def often(monkeypatch):
    """Lines about what is at work come every few milliseconds."""
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.02)


def said(capsys, lines: list[str], pattern: str) -> bool:
    """Waits until a line on standard error fits; `lines` get all that were printed."""
    end = time.monotonic() + 10
    while time.monotonic() < end and not any(re.fullmatch(pattern, line) for line in lines):
        time.sleep(0.01)
        lines += capsys.readouterr().err.splitlines()
    return any(re.fullmatch(pattern, line) for line in lines)


def test_without_a_terminal_lines_say_what_is_at_work_and_how_much_is_left(capsys, often):
    lines: list[str] = []
    with progress.reporting("verify"):
        assert said(capsys, lines, r"specjax: verify, \d+ s")
        with progress.working("loading"), progress.counted("draws") as told:
            assert said(capsys, lines, r"specjax: verify: loading, \d+ s; draws, \d+ s")
            told(1000, 65536)
            assert said(capsys, lines, r".*; draws: 1,000 of 65,536, about \d.* left")
        compiled = jax.jit(lambda x: sum(jnp.sin(x * i) @ x for i in range(200)))
        compiled(jnp.ones((3, 3)))
        assert said(capsys, lines, r"specjax: verify: compiling <lambda>, \d+ s")
        assert said(capsys, lines, r"specjax: verify, \d+ s")
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_quick_work_and_work_that_is_hidden_print_nothing(capsys, often, monkeypatch):
    with progress.reporting("generate"), progress.hidden():
        time.sleep(0.1)
    monkeypatch.setattr(progress, "EVERY_SECONDS", 10.0)
    began = time.monotonic()
    with progress.reporting("generate"), progress.working("loading"):
        pass
    with progress.progress_bars() as bars:
        bars.advance(bars.add_task("load", total=1), 1)
    assert time.monotonic() - began < 5
    assert capsys.readouterr().err == ""


def test_a_server_that_is_ready_says_nothing(capsys, often):
    with progress.reporting(None):
        with progress.working("loading"):
            assert said(capsys, [], r"specjax: loading, \d+ s")
        capsys.readouterr()
        time.sleep(0.1)
        assert capsys.readouterr().err == ""


def test_a_terminal_shows_bars_and_no_lines(capsys, often, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.reporting("verify"), progress.counted("draws") as told:
        told(1, 2)
        time.sleep(0.2)
    shown = capsys.readouterr().err
    assert "draws" in shown
    assert "specjax:" not in shown


def test_what_is_left_goes_by_the_pace_after_the_first_part(monkeypatch):
    clock = [0.0]
    bars = progress.progress_bars()
    bars.get_time = lambda: clock[0]
    bars.start()
    try:
        task = bars.add_task("rows", total=10, began=2, completed=2)
        seen = []
        for clock[0], done in ((50.0, 2), (100.0, 3), (102.0, 4), (104.0, 5)):
            bars.update(task, completed=done)
            seen.append(progress._reporter.line())
    finally:
        bars.stop()
    assert seen[0] == "specjax: rows: 2 of 10, 50 s"
    assert seen[1] == "specjax: rows: 3 of 10, about 12 min left"  # 7 at 100 s, compilation too
    assert seen[3] == "specjax: rows: 5 of 10, about 10 s left"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (89.0, "89 s"), (120.0, "2 min"), (7.8e3, "2 h 10 min"), (7.2e4, "20 h")],
)
def test_durations_are_words(seconds, words):
    assert progress.duration(seconds) == words
