"""The targets of generated input: each takes bytes, makes an input of them, and asserts what must hold of the answer."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fathom_eval.errors import UserError

_JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2**63, 10**400, 1e308, float("nan"), "", " ", "\x00", "\ud800", "\u202e\x1b[2J", "ä" * 300, "</s>", "<s>"),
    *(
        "[Error occurred in processing last action]",
        "<tool_call>",
        "]]></script><script>",
        "../../etc/passwd",
        "{}",
        "[",
        '{"a": ',
        "1e999",
    ),
    *(
        [],
        {},
        [[]],
        [None],
        {"": None},
        {"role": "assistant"},
        {"kind": "ActionEvent"},
        {"id": 0},
        {"action": "run"},
        {"observation": "run"},
    ),
)


class Choices:
    """Decisions read from bytes; zeros where they have run out."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def below(self, limit: int) -> int:
        """A number from 0 to ``limit`` - 1."""
        size = 1 if limit <= 256 else 4
        part = self._data[self._at : self._at + size]
        self._at += size
        return int.from_bytes(part, "little") % limit

    def rest(self) -> bytes:
        """The bytes that are left."""
        return self._data[self._at :]

    def pick(self, options: Sequence[Any]) -> Any:
        """One of them."""
        return options[self.below(len(options))]


@cache
def valid_rows() -> tuple[str, ...]:
    """A valid row of each format."""
    from tests.sessions import rows

    call = rows.v0_call(2)
    made = [
        rows.rebench_row(rows.chat_messages(2)),
        rows.gym_row(rows.chat_messages(2)),
        rows.v0_row([*rows.v0_head(), call, rows.v0_result(3, call)]),
        rows.v1_row([*rows.v1_head(), rows.v1_call("a1"), rows.v1_result("o1")]),
        rows.flat_row(),
    ]
    return tuple(json.dumps(row) for row in made)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from _places(item)


def _changed(row: Any, choices: Choices) -> Any:
    """The row after up to eight changes: a value replaced, removed, doubled, or exchanged with another."""
    for _ in range(1 + choices.below(8)):
        places = list(_places(row))
        if not places:
            return row
        holder, key = choices.pick(places)
        what = choices.below(4)
        if what == 0:
            holder[key] = copy.deepcopy(choices.pick(_JUNK))
        elif what == 1:
            del holder[key]
        elif what == 2 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        else:
            other, name = choices.pick(places)
            with contextlib.suppress(KeyError, IndexError):
                holder[key] = copy.deepcopy(other[name])
    return row


def rows(data: bytes, folder: Path) -> None:
    """A row of a known format, changed: read and rendered."""
    from fathom_eval.sessions.rendering import PlainRenderer
    from fathom_eval.tool_calls import STATES, tool_call_state

    choices = Choices(data)
    row = _changed(json.loads(choices.pick(valid_rows())), choices)
    for trajectory in _read(folder / "rows.jsonl", json.dumps(row).encode(), choices):
        rendering = PlainRenderer().render(trajectory)
        for target in rendering.targets:
            assert 0 <= target.start <= target.end <= len(rendering.text)
            text = rendering.text[target.start : target.end]
            assert tool_call_state(text, {"execute_bash"}, plain=choices.below(2) == 0, cut=False) in STATES


def files(data: bytes, folder: Path) -> None:
    """A file of any content, or with valid lines and some bytes changed, under any name."""
    choices = Choices(data)
    name = choices.pick(("a.jsonl", "a.json", "a.ndjson", "a.parquet", "a.jsonl.gz", "a", "a.txt"))
    if choices.below(2):
        content = choices.rest()
    else:
        lines = bytearray("\n".join(choices.pick(valid_rows()) for _ in range(1 + choices.below(3))).encode())
        for _ in range(choices.below(6)):
            at, what = choices.below(len(lines)), choices.below(3)
            if what == 0:
                lines[at] = choices.below(256)
            elif what == 1:
                del lines[at : at + 1 + choices.below(40)]
            else:
                lines[at:at] = bytes(choices.below(256) for _ in range(choices.below(5)))
            lines = lines or bytearray(b"{")
        content = bytes(lines)
    for _ in _read(folder / name, content, choices):
        pass


def _read(file: Path, content: bytes, choices: Choices) -> Iterator[Any]:
    from fathom_eval.sessions.reading import read_trajectories
    from fathom_eval.sessions.report import ReadReport

    file.write_bytes(content)
    report = ReadReport()
    try:
        yield from read_trajectories(str(file), report, condensation=choices.pick(("full", "condensed")))
    except UserError as error:
        _one_line(error)
    finally:
        file.unlink()
    assert all(line.isprintable() for line in report.lines())


def _one_line(error: UserError) -> None:
    assert str(error)
    assert "\n" not in str(error)


def run_files(data: bytes, folder: Path) -> None:
    """A run whose manifest and records were damaged: read, and written on."""
    from fathom_eval.run import Run, record_key

    choices = Choices(data)
    manifest, records = _run_content()
    target, other = (manifest, records) if choices.below(2) else (records, manifest)
    damaged = bytearray(target)
    if choices.below(4) == 0:
        damaged = bytearray(choices.rest())
    else:
        for _ in range(1 + choices.below(6)):
            at = choices.below(len(damaged) + 1)
            what = choices.below(3)
            if what == 0:
                damaged[at:] = damaged[at + 1 + choices.below(300) :]
            elif what == 1:
                damaged[at:at] = choices.pick((b"\n", b"\x00", b"{", b'{"unit": [1, 9]}\n', b"\xff\xfe", b"]", b'"', b"1e999"))
            else:
                del damaged[at:]
    path = folder / "run"
    path.mkdir(exist_ok=True)
    (path / "manifest.json").write_bytes(damaged if target is manifest else other)
    (path / "records.jsonl").write_bytes(damaged if target is records else other)
    try:
        run = Run.load(path)
        found = run.records()
        assert len(found) == len(run)
        assert {record_key(record) for record in found} == run.keys()
        with Run.open(path, identity={"seed": 0}, details={"kind": "ruler"}) as opened:
            opened.append([valid_record(9)])
            assert opened.records() == [*(record for record in found if record["sample"] != 9), valid_record(9)]
        assert Run.load(path).records()[-1] == valid_record(9)
    except UserError as error:
        _one_line(error)


def valid_record(sample: int) -> dict[str, Any]:
    """A record of RULER with text that only escapes can hold."""
    key = {"kind": "ruler", "task": "vt", "context": 64, "sample": sample, "k": 48, "method": "fathom", "options": {}, "method_version": 1}
    return {**key, "score": 1.0, "generation": "é\u2028\ud800"}


@cache
def _run_content() -> tuple[bytes, bytes]:
    from fathom_eval.run import Run

    with tempfile.TemporaryDirectory() as folder:
        with Run.open(Path(folder), identity={"seed": 0}, details={"kind": "ruler"}) as run:
            for start in (0, 2):
                run.append([valid_record(start), valid_record(start + 1)])
        return (Path(folder) / "manifest.json").read_bytes(), (Path(folder) / "records.jsonl").read_bytes()


def planes(data: bytes, folder: Path) -> None:
    """Keys of any finite size through the plane store: every plane comes back, and codes are within half a step."""
    import torch

    from fathom_eval.kernels.pack import BLOCK, block_scales, pack_planes, quantise, unpack_plane

    choices = Choices(data)
    heads, channels, blocks, bits = 1 + choices.below(2), 1 + choices.below(5), 1 + choices.below(3), 1 + choices.below(4)
    kind = choices.pick((torch.float32, torch.float16, torch.bfloat16))
    count = heads * blocks * BLOCK * channels
    raw = torch.frombuffer(bytearray(choices.rest() or b"\0"), dtype=torch.uint8)
    scale = 10.0 ** (choices.below(9) - 5)
    keys = (raw.repeat(count // len(raw) + 1)[:count].view(heads, -1, channels).float() - 128).mul(scale / 128).to(kind)
    scales = block_scales(keys)
    codes = quantise(keys, scales, bits)
    packed = pack_planes(codes, bits)
    assert torch.isfinite(scales).all()
    back = sum(unpack_plane(packed[..., plane, :]).long() << (bits - 1 - plane) for plane in range(bits))
    assert torch.equal(back.flatten(-2) if back.ndim > codes.ndim else back, codes.long().reshape(back.shape))


def calls(data: bytes, folder: Path) -> None:
    """A generated step of any text: whether it calls a tool, and what of it is printed."""
    from fathom_eval.console import csv_safe, printable, shorten
    from fathom_eval.tool_calls import STATES, tool_call_state

    choices = Choices(data)
    pieces = (
        "<tool_call>",
        "</tool_call>",
        '{"name": "ls", "arguments": {',
        "}}",
        "{",
        "<function=ls>",
        "[TOOL_CALLS]",
        "\x1b]0;",
        "\x1b[31m",
        "=",
    )
    text = "".join(
        choices.pick((*pieces, choices.rest()[:7].decode(errors="replace"), chr(choices.below(0x110000)))) for _ in range(choices.below(30))
    )
    assert tool_call_state(text, {"ls"}, plain=choices.below(2) == 0, cut=choices.below(2) == 0) in STATES
    for shown in (printable(text), csv_safe(text), shorten(text, 20)):
        assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in shown)
    assert csv_safe(text).lstrip()[:1] not in set("=+-@")


def command_line(data: bytes, folder: Path) -> None:
    """Arguments of any kind, of commands that cannot get far: an exit code, and one line of error at most."""
    from fathom_eval.cli import main

    choices = Choices(data)
    words = (
        *("--model", "--k", "--context", "--tasks", "--methods", "--limit", "--output", "--workers", "--ray", "--seed", "--json", "--help"),
        *(
            "/nowhere",
            "0",
            "-1",
            "64,128",
            "9" * 40,
            "sparq:r=D/8",
            "fathom:budget=x",
            "dense",
            "dense:k=",
            "niah_single,vt",
            "--",
            "-",
            "=",
            ":",
        ),
        *(
            "--device=tpu",
            "--dtype=int4",
            "inspect",
            "show",
            "--format=x",
            "--session-tokens=9:1",
            "--rope-scaling=yarn:0",
            "é\ud800",
            "\x00",
        ),
    )
    command = choices.pick(("ruler", "fidelity", "sessions", "rulr", ""))  # the others need no model, and so would run
    arguments = [command, "--model=/nowhere", "--offline", *(choices.pick(words) for _ in range(choices.below(9)))]
    output, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
        try:
            code = main(arguments)
        except SystemExit as end:  # argparse, after --help
            code = int(end.code or 0)
    assert code in (0, 2), (arguments, code)
    assert (code == 0) == ("usage: " in output.getvalue()), arguments
    lines = [line for line in error.getvalue().splitlines() if line.startswith("error:")]
    assert len(lines) == (code == 2), arguments


TARGETS: dict[str, tuple[Callable[[bytes, Path], None], int]] = {
    "rows": (rows, 40),
    "files": (files, 20),
    "run_files": (run_files, 15),
    "planes": (planes, 10),
    "calls": (calls, 10),
    "command_line": (command_line, 5),
}
"""Each target with its share of the inputs, in percent."""
