"""Windows of bytes: sizes, splits, the user's own files, and what is told when there is too little of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from whale_trainer.data import PydocText, TextFiles
from whale_trainer.data.datasets import VOCAB_SIZE, TextWindows, pydoc_text, text_files
from whale_trainer.errors import ConfigError, Problem


def problem_of(call: Any, *args: Any, **options: Any) -> Problem:
    with pytest.raises(ConfigError) as error:
        call(*args, **options)
    (problem,) = error.value.problems
    return problem


def text_of(data: TextWindows) -> bytes:
    return b"".join(bytes(data[i]["tokens"].tolist()) for i in range(len(data)))


def test_pydoc_is_the_manual_of_this_python() -> None:
    train, validation = PydocText(128), PydocText(128, split="validation")
    assert len(pydoc_text()) > 300_000
    assert len(train) >= 2_500
    assert len(validation) >= 250
    assert text_of(validation) in pydoc_text()  # validation windows neither overlap nor leave gaps
    text = text_of(train)
    assert b"while" in text
    assert max(text) < VOCAB_SIZE


def test_a_target_is_the_next_token() -> None:
    item = PydocText(32)[5]
    assert {k: (v.dtype, v.shape) for k, v in item.items()} == dict.fromkeys(
        ("tokens", "targets"), (torch.int64, (32,))
    )
    assert torch.equal(item["tokens"][1:], item["targets"][:-1])


def test_training_windows_overlap_by_an_eighth_and_never_reach_the_validation_text() -> None:
    text = bytes(range(200))
    train = TextWindows(text, 16, "train", 0.1, "data")
    starts = [int(train[i]["tokens"][0]) for i in range(len(train))]
    assert starts[:3] == [0, 14, 28]
    assert int(train[len(train) - 1]["targets"][-1]) < 180
    validation = TextWindows(text, 16, "validation", 0.1, "data")
    assert [int(validation[i]["tokens"][0]) for i in range(len(validation))] == [180]
    with pytest.raises(IndexError, match="sample 1 of 1"):
        validation[1]


@pytest.mark.parametrize(("size", "windows"), [(17, 1), (18, 1), (30, 1), (31, 2), (45, 3)])
def test_the_last_window_ends_with_the_text(size: int, windows: int) -> None:
    assert len(TextWindows(bytes(size), 16, "train", 0.01, "data")) == windows


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files, one of them hidden, in a folder below the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes" / "deep").mkdir(parents=True)
    (tmp_path / "notes" / "b.txt").write_text("b" * 90)
    (tmp_path / "notes" / "deep" / "a.md").write_text("a" * 90)
    (tmp_path / "notes" / ".hidden").write_text("h" * 90)
    return tmp_path / "notes"


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("notes", ["b.txt", "deep/a.md"]),
        ("notes/b.txt", ["b.txt"]),
        ("notes/*.txt", ["b.txt"]),
        ("notes/**/*.md", ["deep/a.md"]),
        ("notes/**", ["b.txt", "deep/a.md"]),
        ("notes/.hidden", [".hidden"]),
    ],
)
def test_files_folders_and_patterns(notes: Path, path: str, names: list[str]) -> None:
    assert [str(f.relative_to("notes")) for f in text_files(path)] == names
    assert [str(f.relative_to(notes)) for f in text_files(str(notes.parent / path))] == names


def test_a_file_named_like_a_pattern_is_that_file(notes: Path) -> None:
    (notes / "b[1].txt").write_text("x")
    assert text_files("notes/b[1].txt") == [Path("notes/b[1].txt")]


def test_text_files_are_joined_and_split(notes: Path) -> None:
    train = TextFiles("notes", context=8)
    assert set(text_of(train)) == {ord("a"), ord("b"), ord("\n")}
    assert set(text_of(TextFiles("notes", context=8, split="validation"))) == {ord("a")}


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere.txt", ["'nowhere.txt' matches no file from", "give a file, a folder, or a pattern"]),
        ("notes/*.rst", ["'notes/*.rst' matches no file from"]),
        ("empty", ["'empty' is a folder without files", "put text there"]),
        ("short.txt", ["12 bytes leave 11 for split train", "one window takes 129", "give more text"]),
        ("blank.txt", ["0 bytes leave 0 for split train"]),
    ],
)
def test_missing_empty_and_short_text_is_refused(notes: Path, path: str, words: list[str]) -> None:
    Path("empty").mkdir()
    Path("short.txt").write_text("twelve bytes")
    Path("blank.txt").touch()
    problem = problem_of(TextFiles, path, context=128)
    assert problem.path == "data.path"
    for word in words:
        assert word in problem.message


def test_a_file_that_must_not_be_read_is_refused(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(file: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "read_bytes", deny)  # a mode would not keep root from reading
    problem = problem_of(TextFiles, "notes", context=8)
    assert problem.path == "data.path"
    assert "'notes/b.txt' cannot be read (Permission denied)" in problem.message


@pytest.mark.parametrize(
    ("options", "path", "message"),
    [
        ({"context": 0}, "data.context", "0 is below 1"),
        ({"context": 8, "split": "valid"}, "data.split", "'valid' is not one of train, validation"),
        ({"context": 8, "validation_fraction": 1.0}, "data.validation_fraction", "1.0 is not between 0 and 1"),
        ({"context": 10**7}, "data", "one window takes 10,000,001"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], path: str, message: str) -> None:
    problem = problem_of(PydocText, **options)
    assert problem.path == path
    assert message in problem.message
