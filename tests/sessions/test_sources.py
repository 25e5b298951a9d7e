"""Files of every kind, whole and broken."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from fathom_eval.errors import UserError
from fathom_eval.sessions import json_stream
from fathom_eval.sessions.json_stream import split_lines, split_values
from tests.sessions.rows import (
    chat_messages,
    flat_row,
    gym_row,
    read_all,
    rebench_row,
    shape,
    v0_call,
    v0_head,
    v0_result,
    v0_row,
    v1_row,
    write_jsonl,
)

ROWS: dict[str, dict[str, Any]] = {
    "swe-rebench": rebench_row(),
    "swe-gym": gym_row(),
    "openhands-v0": v0_row(),
    "openhands-v1": v1_row(),
    "openhands-2024": flat_row(),
}


def rows(count: int) -> list[dict[str, Any]]:
    return [rebench_row(trajectory_id=f"t{number}") for number in range(count)]


@pytest.mark.parametrize("name", ROWS)
def test_detected_and_forced(tmp_path: Path, name: str) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [ROWS[name]])
    [detected], report = read_all(path)
    [forced], _ = read_all(path, format_name=name)
    assert detected.format == name
    assert report.formats == {name: 1}
    assert shape(detected) == shape(forced)


def test_forced_format_that_does_not_fit(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [rebench_row()])
    with pytest.raises(UserError, match=r"holds no trajectory of format openhands-v1: rows.jsonl, line 1: a conversation without events"):
        read_all(path, format_name="openhands-v1")
    with pytest.raises(UserError, match="unknown trajectory format 'swe-gim'; did you mean 'swe-gym'"):
        read_all(path, format_name="swe-gim")


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "rows.json", "rows.jsonl.gz", "rows.json.gz", "rows.parquet", "rows.parquet.gz", "rows.data"]
)
def test_same_rows_in_every_kind_of_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    bare = name.removesuffix(".gz")
    if bare.endswith(".parquet"):
        import pandas

        pandas.DataFrame(rows(20)).to_parquet(tmp_path / "plain", index=False)
        content = (tmp_path / "plain").read_bytes()
    elif bare.endswith(".json"):
        content = json.dumps(rows(20), indent=1).encode()
    else:
        content = "".join(json.dumps(row) + "\n" for row in rows(20)).encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    trajectories, report = read_all(path)
    assert [trajectory.id for trajectory in trajectories] == [f"t{number}" for number in range(20)]
    assert shape(trajectories[19]) == shape(read_all(write_jsonl(tmp_path / "one.jsonl", rows(1)))[0][0])
    assert report.records == report.trajectories == 20
    assert report.lines() == []


def test_one_object_and_bare_lists(tmp_path: Path) -> None:
    (tmp_path / "row.json").write_text(json.dumps(v1_row(), indent=2))
    assert read_all(tmp_path / "row.json")[0][0].format == "openhands-v1"
    (tmp_path / "messages.json").write_text(json.dumps(chat_messages()))
    assert len(read_all(tmp_path / "messages.json")[0][0].steps) == 6
    (tmp_path / "events.json").write_text(json.dumps(v1_row()["events"]))
    assert read_all(tmp_path / "events.json")[0][0].format == "openhands-v1"
    (tmp_path / "history.json").write_text(json.dumps(v0_row()["history"]))
    assert read_all(tmp_path / "history.json")[0][0].format == "openhands-v0"


def test_broken_line_is_named_and_the_rest_used(tmp_path: Path) -> None:
    lines = [json.dumps(row).encode() for row in rows(4)]
    broken = [lines[0], lines[1][:-20], b"", b'"text"', b"\xff\xfe{", b"[" * 100_000, lines[2], b"not json", lines[3]]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(broken) + b"\n")
    trajectories, report = read_all(tmp_path / "rows.jsonl")
    assert [trajectory.id for trajectory in trajectories] == ["t0", "t2", "t3"]
    assert [line.split(":")[0] for line in report.broken] == [f"rows.jsonl, line {number}" for number in (2, 4, 5, 6, 8)]
    assert report.reasons["broken records"] == 5


def test_broken_element_of_an_array(tmp_path: Path) -> None:
    texts = [json.dumps(row) for row in rows(3)]
    texts[1] = texts[1].replace('"t1"', "t1")
    (tmp_path / "rows.json").write_text(f"[{', '.join(texts)}]")
    trajectories, report = read_all(tmp_path / "rows.json")
    assert [trajectory.id for trajectory in trajectories] == ["t0", "t2"]
    assert report.broken[0].startswith("rows.json, element 2: broken JSON")


def test_json_array_that_ends_early(tmp_path: Path) -> None:
    text = json.dumps(rows(3))
    (tmp_path / "rows.json").write_text(text[: len(text) - 100])
    trajectories, report = read_all(tmp_path / "rows.json")
    assert [trajectory.id for trajectory in trajectories] == ["t0", "t1"]
    assert report.broken == ["rows.json, element 3: the file ends within it"]


def test_gzip_cut_short(tmp_path: Path) -> None:
    # Noise, so that the cut does not fall into the first kilobytes.
    noisy = [rebench_row(trajectory_id=f"t{number}", model_patch=random.Random(number).randbytes(4_000).hex()) for number in range(20)]
    whole = gzip.compress("".join(json.dumps(row) + "\n" for row in noisy).encode())
    (tmp_path / "rows.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    trajectories, report = read_all(tmp_path / "rows.jsonl.gz")
    assert 5 <= len(trajectories) <= 12
    assert report.cut == ["rows.jsonl.gz: the gzip file is cut short; what came before is used"]
    assert report.broken[0].startswith(f"rows.jsonl.gz, line {len(trajectories) + 1}: broken JSON")
    (tmp_path / "rows.jsonl.gz").write_bytes(whole[:15])
    with pytest.raises(UserError, match="holds nothing: the gzip file is cut short"):
        read_all(tmp_path / "rows.jsonl.gz")


def test_gzip_cut_short_before_anything_usable(tmp_path: Path) -> None:
    noisy = rebench_row(model_patch=random.Random(0).randbytes(40_000).hex())
    for start, message in (
        ("", "holds no usable trajectory: rows.jsonl.gz: the gzip file is cut short before the first whole record"),
        ('{"x": 1}\n{"instance_id": "a__b-1", "trajectory": []}\n', "is cut short; before that, rows.jsonl.gz, line 1: no known format"),
    ):
        whole = gzip.compress((start + json.dumps(noisy) + "\n").encode())
        (tmp_path / "rows.jsonl.gz").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(UserError, match=message) as caught:
            read_all(tmp_path / "rows.jsonl.gz")
        assert "is used" not in str(caught.value)


def test_gzip_damaged_in_the_middle(tmp_path: Path) -> None:
    noisy = [rebench_row(trajectory_id=f"t{number}", model_patch=random.Random(number).randbytes(4_000).hex()) for number in range(20)]
    content = bytearray(gzip.compress("".join(json.dumps(row) + "\n" for row in noisy).encode()))
    content[-4:] = b"\0\0\0\0"  # the recorded length
    (tmp_path / "rows.jsonl.gz").write_bytes(bytes(content))
    trajectories, report = read_all(tmp_path / "rows.jsonl.gz")
    assert len(trajectories) == 20
    assert "damaged" in report.cut[0]


def test_parquet_cut_short(tmp_path: Path) -> None:
    import pandas

    pandas.DataFrame(rows(3)).to_parquet(tmp_path / "rows.parquet", index=False)
    content = (tmp_path / "rows.parquet").read_bytes()
    (tmp_path / "rows.parquet").write_bytes(content[:-100])
    with pytest.raises(UserError, match=r"rows.parquet cannot be read as parquet, it is cut short or damaged"):
        read_all(tmp_path / "rows.parquet")
    (tmp_path / "rows.parquet").write_text("{}")
    with pytest.raises(UserError, match=r"rows.parquet is no parquet file"):
        read_all(tmp_path / "rows.parquet")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "a.jsonl is empty"),
        ("a.jsonl", b" \n\n", "a.jsonl is empty"),
        ("a.json.gz", gzip.compress(b""), "a.json.gz holds nothing: its content is empty"),
        ("a.jsonl", b"id,text\n1,a\n", "a.jsonl is no JSON: it starts with 'id,text"),
        ("a.jsonl", b"PK\x03\x04rest", "a.jsonl is a zip file"),
        (
            "a.jsonl",
            b'{"question": "2+2", "answer": "4"}\n',
            r"has no known format: the keys are question, answer; known are swe-rebench \(trajectory",
        ),
        ("a.jsonl", b'{"messages": []}\n', "holds no usable trajectory: a.jsonl, line 1: no messages or events in 'messages'"),
        ("a.jsonl", b'{"messages": null, "instance_id": "x"}\n', "no messages or events in 'messages'"),
        ("a.json", b"[1, 2]", "holds no usable trajectory: it is empty"),
        ("a.jsonl", b'{"\x1b[31mred": 1}\n', "broken JSON"),
        ("a.jsonl", b'{"\\u001b[31mred": 1}\n', r"the keys are \\x1b\[31mred;"),
    ],
)
def test_files_without_trajectories(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_all(tmp_path / name)
    assert str(caught.value).isprintable()


def test_row_without_messages_among_others(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [rebench_row(trajectory=[]), {"x": 1}, rebench_row(), v0_row(history=[])])
    trajectories, report = read_all(path)
    assert len(trajectories) == 1
    assert report.skipped == [
        "rows.jsonl, line 1: no messages or events in 'trajectory'",
        "rows.jsonl, line 2: no known format (keys: x)",
        "rows.jsonl, line 4: no messages or events in 'history'",
    ]


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no file or folder '.*missing.jsonl'"):
        read_all(tmp_path / "missing.jsonl")
    with pytest.raises(UserError, match=r"there is no file or folder 'a/b.jsonl.gz'"):
        read_all("a/b.jsonl.gz")
    with pytest.raises(UserError, match="holds no jsonl, json, parquet or event files"):
        read_all(tmp_path)
    path = write_jsonl(tmp_path / "rows.jsonl", rows(1))
    with pytest.raises(UserError, match="a revision is for sets of the hub"):
        read_all(path, revision="main")


def test_hub_offline() -> None:
    with pytest.raises(
        UserError, match="'owner/no-such-set' is no local file or folder, and the hub set of that name at revision 'abc' cannot be"
    ):
        read_all("owner/no-such-set", revision="abc")


def test_hub_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(name: str, *, revision: str | None, streaming: bool) -> dict[str, Any]:
        assert (name, revision, streaming) == ("owner/set", "v1", True)
        return {"train": iter(rows(2)), "test": iter(rows(1))}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    trajectories, _ = read_all("owner/set", revision="v1")
    assert [(trajectory.id, trajectory.source) for trajectory in trajectories] == [
        ("t0", "owner/set, test row 1"),
        ("t0#2", "owner/set, train row 1"),
        ("t1", "owner/set, train row 2"),
    ]


def test_folder_of_files_and_conversations(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", rows(1))
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "notes.txt").write_text("not read")
    events = tmp_path / "conversations" / "c7" / "events"
    events.mkdir(parents=True)
    (events.parent / "base_state.json").write_text("{}")
    recorded = v1_row()["events"]
    # More than ten, so that an order by name differs from the order by number; one is missing.
    for number, event in enumerate(recorded):
        (events / f"event-{number * 5 if number else 0:01d}-{event['id']}.json").write_text(json.dumps(event))
    (events / "event-12-x.json").write_text("{broken")
    trajectories, report = read_all(tmp_path)
    assert sorted((trajectory.id, trajectory.format) for trajectory in trajectories) == [("c7", "openhands-v1"), ("t0", "swe-rebench")]
    conversation = next(trajectory for trajectory in trajectories if trajectory.id == "c7")
    assert [type(step).__name__ for step in conversation.steps] == ["System", "User", "Assistant", "ToolResult"]
    assert report.broken[0].startswith("c7/event-12-x.json: no readable event")
    assert report.skipped == ["empty.jsonl: empty.jsonl is empty"]


def test_links_out_of_a_folder_are_not_followed(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "secret.jsonl", rows(1))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    with pytest.raises(UserError, match="holds no jsonl"):
        read_all(tmp_path / "folder")


def test_ids_are_made_unique(tmp_path: Path) -> None:
    call = v0_call(2)
    path = write_jsonl(tmp_path / "rows.jsonl", [v0_row(), v0_row([*v0_head("Other."), call, v0_result(3, call)]), flat_row(issue=None)])
    assert [trajectory.id for trajectory in read_all(path)[0]] == ["owner__project-1", "owner__project-1#2", "rows.jsonl, line 3"]


def test_repository_from_what_there_is(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "rows.jsonl",
        [
            v0_row(instance_id="alibaba__fastjson2-2775", instance={"repo": "mswebench/x"}),
            v0_row(instance_id="x", instance={"repo": "o/n"}),
            v1_row(repo=None),
        ],
    )
    assert [trajectory.repo for trajectory in read_all(path)[0]] == ["alibaba/fastjson2", "o/n", ""]
    assert read_all(path, default_repo="mine")[0][2].repo == "mine"


def pieces_of(content: bytes, size: int, split: Any = split_values) -> list[tuple[int, bytes | None, bool]]:
    chunks = [content[start : start + size] for start in range(0, len(content), size)]
    return [(piece.number, piece.content, piece.complete) for piece in split(chunks)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_values_are_split_at_any_chunk_size(size: int) -> None:
    values: list[Any] = [{"a": 'quote " and \\ and ]}['}, {"b": [[], {}, "\\"]}, [1, {"é": "🙂"}], {"c": '\\"'}]
    content = json.dumps(values, ensure_ascii=False).encode()
    found = pieces_of(content, size)
    assert [json.loads(piece or b"") for _, piece, _ in found] == values
    assert all(complete for _, _, complete in found)
    concatenated = b"\n".join(json.dumps(value).encode() for value in values[:2])
    assert [json.loads(piece or b"") for _, piece, _ in pieces_of(concatenated, size)] == values[:2]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_lines_are_split_at_any_chunk_size(size: int) -> None:
    content = "é\r\n\n\u2028x\nlast".encode()
    assert [piece for _, piece, _ in pieces_of(content, size, split_lines)] == ["é\r".encode(), b"", "\u2028x".encode(), b"last"]


def test_overlong_record_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream.split_lines, "__defaults__", (5_000,))
    path = write_jsonl(tmp_path / "rows.jsonl", [rebench_row(), rebench_row(model_patch="x" * 10_000), rebench_row()])
    trajectories, report = read_all(path)
    assert len(trajectories) == 2
    assert report.broken[0].startswith("rows.jsonl, line 2: longer than")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_memory_is_bounded(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    line = json.dumps(rebench_row(model_patch="x" * 100_000))
    with path.open("w") as handle:
        handle.write("[" if name.endswith(".json") else "")
        for _ in range(300):
            handle.write(line + (",\n" if name.endswith(".json") else "\n"))
        handle.write(line + ("]" if name.endswith(".json") else "\n"))
    tracemalloc.start()
    from fathom_eval.sessions.reading import read_trajectories
    from fathom_eval.sessions.report import ReadReport

    count = sum(1 for _ in read_trajectories(str(path), ReadReport()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 301
    assert peak < path.stat().st_size / 3
