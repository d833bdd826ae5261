"""The user's own corpus: what is read, how it is split, and what is refused."""

import json
from pathlib import Path

import pytest

from specjax.measure import prompts
from train.config import Corpus
from train.corpus import read_corpus
from train.documents import SPLITS, Document, fingerprint


def documents_in(tmp_path: Path, **files: str) -> list[Document]:
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_corpus(Corpus(files=(str(tmp_path),)))


def test_folders_files_and_lines_become_documents(tmp_path):
    many = {f"src__n{i}_py": f"x = {i}\n" for i in range(9)}
    lines = '{"prompt": "say"}\n\n{"text": "said", "id": 3}\n'
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\x00\xff")
    found = documents_in(tmp_path, **many, lines_jsonl=lines, empty_txt=" \n", n10_py="x = 3\n",
                         log_jsonl='{"step": 1}\n')  # fmt: skip
    assert len(found) == 11
    assert {d.split for d in found} == set(SPLITS)
    assert [d.text for d in found if d.is_prompt] == ["say"]
    assert "said" in {d.text for d in found}
    assert found == documents_in(tmp_path)


def test_a_single_file_is_cut_so_that_some_can_be_held_out(tmp_path):
    text = "".join(f"line {i}\n" for i in range(100))
    found = documents_in(tmp_path, book_txt=text)
    assert "".join(d.text for d in found) == text
    assert {d.split for d in found} == set(SPLITS)
    assert sum(d.split == "train" for d in found) > len(found) / 2


@pytest.mark.parametrize(
    ("files", "sentence"),
    [({}, "holds no text"), ({"a_txt": " \n"}, "holds no text"),
     ({"a_txt": "one\ntwo\n"}, "has 2 lines of text; at least 3"),
     ({"a_jsonl": '{"txt": "x"}\n'}, "holds no text")],
)  # fmt: skip
def test_a_corpus_without_enough_text_is_refused(tmp_path, files, sentence):
    with pytest.raises(ValueError, match=sentence):
        documents_in(tmp_path, **files)


def test_missing_and_unreadable_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        read_corpus(Corpus(files=(str(tmp_path / "none.txt"),)))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 text: byte 3"):
        read_corpus(Corpus(files=(str(tmp_path / "latin.txt"),)))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [('{"text": "x"}\n{"txt": "x"}\n', 'line 2 of .*jsonl has neither a "text" nor a "prompt"'),
     ('{"text": 3}\n', 'line 1 of .*jsonl has neither a "text"'),
     ('{"turns": ["x", 3]}\n', 'line 1 of .*jsonl has neither .* nor "turns" that are a list'),
     ("{\n", "line 1 of .*jsonl is not JSON"),
     ("[" * 100_000, "line 1 of .*jsonl is not JSON"),
     ('{"text": "a\\ud800"}', r"line 1 of .*jsonl is not UTF-8 text: character 1 is '\\ud800'")],
)  # fmt: skip
def test_wrong_lines_are_named(tmp_path, text, sentence):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_corpus(Corpus(files=(str(tmp_path / "a.jsonl"),)))


def test_lines_end_at_line_feeds_alone(tmp_path):
    texts = ["a\u2028b", "c\x85d", *map(str, range(12))]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found = read_corpus(Corpus(files=(str(tmp_path / "a.jsonl"),)))
    assert sorted(d.text for d in found) == sorted(texts)


def test_a_runs_own_folder_is_no_part_of_its_corpus(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine\n")
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
    found = read_corpus(Corpus(files=(str(tmp_path),)), (tmp_path / "run",))
    assert "".join(d.text for d in found) == "one\ntwo\nthree\n"


def test_equal_texts_are_in_one_split(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        for number in range(20):
            (tmp_path / folder / f"{number}.py").write_text(f"x = {number}\n")
    found = read_corpus(Corpus(files=(str(tmp_path), str(tmp_path / "one"))))
    assert len(found) == 20


def test_a_fingerprint_changes_with_any_text_and_split():
    one = [Document("a", "x", "train"), Document("b", "y", "dev")]
    others = [
        [one[0], one[1]._replace(text="z")],
        [one[0], one[1]._replace(split="heldout")],
        [one[0]],
    ]
    assert fingerprint(one) == fingerprint(list(one))
    assert len({fingerprint(each) for each in [one, *others]}) == 4


def test_every_turn_of_a_talk_is_a_prompt_as_it_is_for_bench(tmp_path):
    lines = [{"id": f"{n}", "category": "x", "turns": [f"Say {n}.", f"Again {n}."]}
             for n in range(8)]  # fmt: skip
    file = tmp_path / "spec_bench.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    found = read_corpus(Corpus(files=(str(file),)))
    assert [d.text for d in found] == [text for _, text in prompts.read(str(file))]
    assert all(document.is_prompt for document in found)
    assert {document.split for document in found} == {"train", "dev", "heldout"}
