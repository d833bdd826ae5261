"""Messages that are made of the standard library."""

import json

from train import messages
from train.files import read_files


def test_messages_are_of_every_kind_and_the_same_every_time(tmp_path, capsys):
    made = messages.messages(60)
    assert len(set(made)) == 60
    begun = [text for text in made if text.startswith("def ")]
    assert 12 <= len(begun) <= 21
    assert all('"""' in text or "'''" in text or text.count('"') >= 2 for text in begun)
    assert len([text for text in made if "```python\n" in text]) == 6
    assert len([text for text in made if text.startswith("Summarize")]) >= 6
    assert len([text for text in made if text.startswith("Translate")]) == 3
    assert not [text for text in made if "{" in text.partition("\n")[0]]
    file = tmp_path / "asked.jsonl"
    assert messages.main([str(file), "--count", "60"]) == 0
    assert [json.loads(line)["prompt"] for line in file.read_text().splitlines()] == made
    assert all(document.is_prompt for document in read_files([str(file)], 20))
    assert not capsys.readouterr().err


def test_that_there_are_no_more_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(messages, "_functions", lambda: iter([("def a():\n", "def a():\n pass")]))
    monkeypatch.setattr(messages, "_passages", lambda: iter(["A text."]))
    monkeypatch.setattr(messages, "beginnings", lambda _: ("Why is that?", "Why is"))
    for name in ("_BEGUN", "_SOLVE", "_TRANSLATE"):
        monkeypatch.setattr(messages, name, "What is 1 + 1?")
    file = tmp_path / "asked.jsonl"
    assert messages.main([str(file), "--count", "9"]) == 0
    assert "there are 4 messages, 9 were asked for" in capsys.readouterr().err
    assert len(file.read_text().splitlines()) == 4
