"""Damaged lines of a run: which are told, and until when; and which records failed."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from fathom_eval.run import RECORDS, Run, record_key
from tests.made_records import open_run, record, unit


def damaged(path: Path, changes: dict[int, bytes]) -> None:
    """Put other content in place of lines, given by number from 1."""
    lines = (path / RECORDS).read_bytes().splitlines(keepends=True)
    for number, content in changes.items():
        lines[number - 1] = content + b"\n"
    (path / RECORDS).write_bytes(b"".join(lines))


def numbers_of(run: Run) -> list[int]:
    """The lines that problems name."""
    return [int(problem.split(": line ")[1].split()[0]) for problem in run.problems]


@pytest.mark.parametrize("line", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("content", [b"\x00\xff", b'{"kind": "ruler", "task": "niah_single", "context": 2048, "sample": 0, "k": 12\x00'])
def test_a_damaged_line_is_no_problem_once_its_record_is_there_again(tmp_path: Path, line: int, content: bytes) -> None:
    records = unit(0) + unit(1)
    with open_run(tmp_path) as run:
        run.append(records[:3])
        run.append(records[3:])
    damaged(tmp_path, {line: content.replace(b'"sample": 0', b'"sample": %d' % records[line - 1]["sample"])})
    size = (tmp_path / RECORDS).stat().st_size
    with open_run(tmp_path) as run:
        assert numbers_of(run) == [line]
        # Another method's record of the same sample does not stand for it.
        run.append([record(records[line - 1]["sample"], "loki")])
    assert numbers_of(Run.load(tmp_path)) == [line]
    (tmp_path / RECORDS).write_bytes((tmp_path / RECORDS).read_bytes()[:size])
    with open_run(tmp_path) as run:
        run.append([records[line - 1]])
    loaded = Run.load(tmp_path)
    assert (loaded.problems, loaded.keys()) == ([], {record_key(one) for one in records})


def test_every_damaged_line_of_a_sample_must_be_there_again(tmp_path: Path) -> None:
    with open_run(tmp_path) as run:
        run.append(unit(0))
        run.append(unit(1))
    damaged(tmp_path, {4: b"x", 5: b"y"})
    for again in ("dense", "exact"):
        with open_run(tmp_path) as run:
            assert numbers_of(run) == [4, 5]
            run.append([record(1, again)])
    assert Run.load(tmp_path).problems == []


def test_a_sample_that_is_lost_whole_stays_a_problem_until_it_is_there(tmp_path: Path) -> None:
    with open_run(tmp_path) as run:
        for sample in (0, 1, 2):
            run.append(unit(sample))
    damaged(tmp_path, {4: b"x", 5: b"y", 6: b"z"})
    assert numbers_of(Run.load(tmp_path)) == [4, 5, 6]
    with open_run(tmp_path) as run:
        run.append(unit(3))
        assert numbers_of(run) == [4, 5, 6]
        run.append(unit(1))
    assert Run.load(tmp_path).problems == []


WRONG = [
    ({"score": "x"}, "'score' must be a number, not str"),
    ({"score": True}, "'score' must be a number, not bool"),
    ({"score": float("nan")}, "'score' must be finite"),
    ({"bits": [1]}, "'bits' must be a number, not list"),
    ({"k": -1}, "'k' must be a whole number of at least 1, not -1"),
    ({"k": True}, "'k' must be a whole number of at least 1, not bool"),
    ({"context": "2048"}, "'context' must be a whole number of at least 1, not str"),
    ({"sample": None}, "'sample' must be a whole number of at least 0, not null"),
    ({"options": []}, "'options' must be an object, not list"),
    ({"finish": 3}, "'finish' must be text, not 3"),
    ({"hits": "11"}, "'hits' must be a list, not str"),
    ({"depths": ["deep"]}, "'depths' lists what it should not"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_a_field_of_a_wrong_type_damages_its_record(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with open_run(tmp_path) as run:
        run.append(unit(0))
        run.append(unit(1))
        before = (tmp_path / RECORDS).read_bytes()
        with pytest.raises(ValueError, match=re.escape(message) if "finite" not in message else "JSON|finite"):
            run.append([{**record(2), **wrong}])
        assert (tmp_path / RECORDS).read_bytes() == before
    damaged(tmp_path, {2: json.dumps({**unit(0)[1], **wrong, "unit": [2, 3]}).encode()})
    with open_run(tmp_path) as run:
        assert numbers_of(run) == [2]
        assert message in run.problems[0]
        assert run.keys() == {record_key(one) for one in [*unit(0), *unit(1)]} - {record_key(unit(0)[1])}
        run.append([unit(0)[1]])
    assert Run.load(tmp_path).problems == []


def test_records_of_other_kinds_are_not_held_to_it(tmp_path: Path) -> None:
    with open_run(tmp_path) as run:
        run.append([record(0, kind="step", k=0, rows="host")])
    assert (Run.load(tmp_path).problems, len(Run.load(tmp_path))) == ([], 1)


def test_random_bytes_are_told(tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(300).replace(b"\n", b"-")
    open_run(tmp_path).close()
    for content in (noise, noise[:100] + b"\n" + noise[100:]):
        (tmp_path / RECORDS).write_bytes(content)
        assert numbers_of(Run.load(tmp_path)) == list(range(1, content.count(b"\n") + 2))
        with open_run(tmp_path) as run:
            assert len(run.problems) == content.count(b"\n") + 1
    with open_run(tmp_path) as run:
        run.append(unit(0))
        run.append(unit(1))
    assert Run.load(tmp_path).problems == []


def test_failed_keys_are_those_of_the_records_in_force(tmp_path: Path) -> None:
    with open_run(tmp_path) as run:
        run.append([record(0, finish="error", score=None), record(1, finish="error", score=None), record(2, finish="length")])
        run.append([record(0, finish="length")])
        assert run.failed_keys() == {record_key(record(1))}
