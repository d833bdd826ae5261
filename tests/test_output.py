"""Files that are written: checked by opening, replaced whole, and lost by nobody."""

import json
import math
import os
import stat
from pathlib import Path

import pytest

from specjax.base import output
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
