"""`specjax batch`: a file of requests is answered once each, however often it is begun."""

import json

import pytest

from specjax.cli.main import main

OPTIONS = ["--model", "bundled", "--method", "chain", "--rows", "2", "--max-model-len", "256"]


def line(custom_id: str, body: dict, url: str = "/v1/completions", **more) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body} | more)


def prompt(number: int, **more) -> dict:
    return {"prompt": f"def f{number}(", "max_tokens": 6, "temperature": 0} | more


def run(tmp_path, *lines: str, file: str = "in.jsonl") -> int:
    (tmp_path / file).write_text("\n".join(lines) + "\n", "utf-8")
    return main(["batch", str(tmp_path / file), str(tmp_path / "out.jsonl"), *OPTIONS])


def answers(tmp_path) -> dict[str, dict]:
    texts = (tmp_path / "out.jsonl").read_text("utf-8").splitlines()
    found = [json.loads(text) for text in texts]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


def test_requests_are_answered_and_what_is_there_is_kept(tmp_path, capsys):
    lines = [line(f"a{n}", prompt(n)) for n in range(7)]
    assert run(tmp_path, *lines[:4]) == 0
    first = answers(tmp_path)
    assert first.keys() == {"a0", "a1", "a2", "a3"}
    for own in first.values():
        assert own["error"] is None
        assert own["response"]["status_code"] == 200
        assert own["response"]["request_id"]
        assert own["response"]["body"]["usage"]["completion_tokens"] == 6
    text = (tmp_path / "out.jsonl").read_text()
    (tmp_path / "out.jsonl").write_text(text + '{"id": "batch_req_cut off by a k')
    assert run(tmp_path, *lines) == 0
    assert "4 of 7 requests are answered" in capsys.readouterr().err
    second = answers(tmp_path)
    assert second.keys() == {f"a{n}" for n in range(7)}
    assert {name: second[name] for name in first} == first
    assert run(tmp_path, *lines) == 0
    assert answers(tmp_path) == second


def test_what_is_wrong_is_said_in_its_line(tmp_path, capsys):
    lines = [
        line("right", prompt(0)),
        line("schema", prompt(1, max_tokens=64, guided_regex="[ab]{3}")),
        line("bad value", prompt(2, temperature=-1)),
        line("other url", prompt(3), url="/v1/embeddings"),
        line("stream", prompt(4, stream=True)),
        line("no template", {"messages": [{"role": "user", "content": "a"}]},
             url="/v1/chat/completions"),
        line("method", prompt(5), method="GET"),
        "{",
        "[]",
        json.dumps({"url": "/v1/completions", "body": {}}),
    ]  # fmt: skip
    assert run(tmp_path, *lines) == 1
    assert "8 were refused or failed" in capsys.readouterr().err
    found = answers(tmp_path)
    assert len(found) == len(lines)
    assert found["right"]["error"] is None
    assert set(found["schema"]["response"]["body"]["choices"][0]["text"]) <= {"a", "b"}
    for name, said in (
        ("bad value", "temperature"), ("other url", "must be one of"), ("stream", "whole answers"),
        ("no template", "no chat template"), ("method", "'POST'"), ("line-8", "no JSON"),
        ("line-9", "no object"), ("line-10", "custom_id is missing"),
    ):  # fmt: skip
        assert said in found[name]["error"]["message"]
    assert found["bad value"]["response"]["status_code"] == 400
    assert found["method"]["response"] is None


@pytest.mark.parametrize(
    ("lines", "out", "said"),
    [
        ([line("a", prompt(0)), line("a", prompt(1))], None, "lines 1 and 2"),
        ([""], None, "has no request"),
        ([line("a", prompt(0))], "text\n", "is no answer"),
    ],
)
def test_files_that_are_refused(lines, out, said, tmp_path, capsys):
    if out is not None:
        (tmp_path / "out.jsonl").write_text(out)
    assert run(tmp_path, *lines) == 2
    assert said in capsys.readouterr().err
    assert main(["batch", str(tmp_path / "none.jsonl"), "out.jsonl", *OPTIONS]) == 2
