"""Record the built-in trajectories: a scripted agent works on small repositories, and what its commands really print is kept.

    python scripts/record_builtin_trajectories.py [--output FILE]

``builtin_trajectories/NAME.repository.txt`` holds a repository (``=== path`` before each file), ``NAME.tasks.txt`` what the agent says and
does. Each task starts from the repository's first commit, in a temporary folder that the agent sees as ``/workspace/NAME``. Commands run
in bash; edits are made to the files. Only places, the interpreter's own path and the seconds of test runs are rewritten, so that a
recording is the same on any machine with the same versions of Python and git.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MATERIAL = Path(__file__).parent / "builtin_trajectories"
OUTPUT = Path(__file__).parent.parent / "sessions" / "builtin" / "trajectories.jsonl.gz"
AGENT = "scripted; no model wrote these steps"
OWNER = "fathom-examples"
_DIRECTIVE = re.compile(r"@(task|think|bash|view|replace|with|create|finish)\b ?(.*)")
_DATE = "2024-03-01T12:00:00+00:00"

SYSTEM = """\
You are a programmer who works on a repository in a Linux sandbox, through tools.

How to work:
* Read before you write: find the files that matter, and reproduce the problem before you change anything.
* Make the smallest change that solves the whole problem. Keep to the style of the code around it.
* Add tests for what you change, and run the whole test suite at the end. The tests use unittest; there is no network.
* Say what you are about to do, and why, before every call of a tool. Call one tool at a time.
* If you find another defect, repair it only if the task needs it; otherwise mention it at the end.

Tools print at most 30,000 characters. A command that runs for more than 30 seconds is stopped. The sandbox keeps files between calls, but
not the shell's variables or its directory: every command starts in the root of the repository.
When the task is done, call `finish` with a summary for the person who gave it."""

TASK = """\
<repository>
/workspace/{name}
</repository>
The repository in /workspace/{name} has the following issue:

<issue>
{text}
</issue>

Solve the issue, so that the tests that its author has written for it pass. They are not shown to you. Python and git are installed; nothing
else needs to be."""


def _tool(name: str, description: str, required: list[str], **properties: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": "string", "description": text} for key, text in properties.items()},
        "required": required,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _tool(
        "execute_bash",
        "Run a command in bash, in the root of the repository. Gives standard output and standard error together, and the exit code.",
        ["command"],
        command="The command; several lines are allowed.",
    ),
    _tool(
        "str_replace_editor",
        "View, create and edit text files. `view` prints a file with line numbers, or the lines of view_range only. `create` writes a "
        "whole file. `str_replace` replaces old_str, which must occur exactly once in the file, by new_str.",
        ["command", "path"],
        command="One of view, create, str_replace.",
        path="Absolute path of the file.",
        file_text="Content of the file, for create.",
        old_str="What is replaced, for str_replace.",
        new_str="What takes its place, for str_replace.",
        view_range="First and last line, separated by a hyphen, for view; the whole file if left out.",
    ),
    _tool("finish", "The task is done, or cannot be done.", ["message"], message="What was done, for the person who gave the task."),
]


@dataclass(frozen=True)
class Action:
    """What the agent does in one response: its thought, the tool and its arguments."""

    thought: str
    tool: str
    arguments: dict[str, str]


@dataclass(frozen=True)
class Task:
    """One scripted task."""

    name: str
    text: str
    actions: tuple[Action, ...]


class Sandbox:
    """A fresh copy of a repository in a temporary folder, which the agent knows as ``/workspace/NAME``."""

    def __init__(self, name: str, files: dict[str, str], folder: Path) -> None:
        self._folder = folder
        self._root = folder / "workspace" / name
        self.place = f"/workspace/{name}"
        (folder / "tmp").mkdir()
        for path, text in files.items():
            (self._root / path).parent.mkdir(parents=True, exist_ok=True)
            (self._root / path).write_text(text, encoding="utf-8")
        self.bash("git init -q -b main && git add -A && git commit -q -m 'First version'")

    def bash(self, command: str) -> tuple[str, int]:
        """Run a command; what it printed, with the sandbox's places, and its exit code."""
        real = re.sub(r"(?<![\w/.])/(workspace|tmp)(?![\w-])", rf"{self._folder}/\1", command)
        done = subprocess.run(
            ["bash", "-c", real],
            cwd=self._root,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=30,
            check=False,
        )
        return self._shown(done.stdout.decode("utf-8", errors="replace")), done.returncode

    def file(self, path: str) -> Path:
        """The real place of a file that the agent names."""
        return self._root / Path(path).relative_to(self.place)

    def _shown(self, text: str) -> str:
        text = text.replace(f"{self._folder}/", "/").replace(sysconfig.get_path("stdlib"), "/usr/lib/python3")
        return re.sub(r"(Ran \d+ tests? in )\d+\.\d+s", r"\g<1>0.005s", text)

    def _environment(self) -> dict[str, str]:
        names = {f"GIT_{role}_{kind}": value for role in ("AUTHOR", "COMMITTER") for kind, value in _IDENTITY.items()}
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self._folder),
            "TMPDIR": str(self._folder / "tmp"),
            "LC_ALL": "C.UTF-8",
            "TZ": "UTC",
            "COLUMNS": "100",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_PAGER": "cat",
            **names,
        }


_IDENTITY = {"NAME": "Example Author", "EMAIL": "author@example.org", "DATE": _DATE}


def read_repository(name: str) -> dict[str, str]:
    """Path and content of every file of a repository."""
    parts = re.split(r"^=== (.+)\n", (MATERIAL / f"{name}.repository.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def read_tasks(name: str) -> Iterator[Task]:
    """The scripted tasks of a repository."""
    blocks: list[tuple[str, str, list[str]]] = []
    for line in (MATERIAL / f"{name}.tasks.txt").read_text(encoding="utf-8").splitlines():
        if match := _DIRECTIVE.fullmatch(line):
            blocks.append((match[1], match[2], []))
        else:
            blocks[-1][2].append(line)
    starts = [position for position, (kind, _, _) in enumerate(blocks) if kind == "task"]
    for start, end in zip(starts, [*starts[1:], len(blocks)], strict=True):
        _, title, lines = blocks[start]
        yield Task(title, "\n".join(lines), tuple(_actions(name, blocks[start + 1 : end])))


def _actions(name: str, blocks: list[tuple[str, str, list[str]]]) -> Iterator[Action]:
    thought = ""
    for position, (kind, argument, lines) in enumerate(blocks):
        text = "\n".join(lines)
        words = argument.split()
        path = f"/workspace/{name}/{words[0]}" if words else ""
        if kind == "think":
            thought = text
            continue
        if kind == "with":
            continue
        if kind == "bash":
            action = Action(thought, "execute_bash", {"command": text})
        elif kind == "view":
            span = {"view_range": "-".join(words[1:])} if words[1:] else {}
            action = Action(thought, "str_replace_editor", {"command": "view", "path": path, **span})
        elif kind == "create":
            action = Action(thought, "str_replace_editor", {"command": "create", "path": path, "file_text": f"{text}\n"})
        elif kind == "replace":
            new = "\n".join(blocks[position + 1][2])
            action = Action(thought, "str_replace_editor", {"command": "str_replace", "path": path, "old_str": text, "new_str": new})
        else:
            action = Action(thought, "finish", {"message": text})
        thought = ""
        yield action


def perform(sandbox: Sandbox, action: Action) -> str:
    """Do what the agent asks for, and say what it sees of it."""
    arguments = action.arguments
    if action.tool == "execute_bash":
        output, code = sandbox.bash(arguments["command"])
        return f"{output.rstrip()}\n[Current working directory: {sandbox.place}]\n[Command finished with exit code {code}]"
    path, file = arguments["path"], sandbox.file(arguments["path"])
    if arguments["command"] == "create":
        file.write_text(arguments["file_text"], encoding="utf-8")
        return f"The file {path} has been written."
    content = file.read_text(encoding="utf-8")
    if arguments["command"] == "view":
        first, last = (int(bound) for bound in arguments.get("view_range", f"1-{content.count(chr(10))}").split("-"))
        return f"Lines of {path}:\n{_numbered(content, first, last)}"
    old, new = arguments["old_str"], arguments["new_str"]
    if content.count(old) != 1:
        raise SystemExit(f"{path}: the script replaces what occurs {content.count(old)} times:\n{old}")
    file.write_text(content.replace(old, new), encoding="utf-8")
    line = content[: content.index(old)].count("\n") + 1
    shown = _numbered(content.replace(old, new), max(line - 4, 1), line + new.count("\n") + 4)
    return f"The file {path} has been edited. The lines around the change are now:\n{shown}\nCheck that this is what you meant."


def _numbered(content: str, first: int, last: int) -> str:
    lines = content.splitlines()[first - 1 : last]
    return "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, start=first))


def record(name: str, task: Task) -> dict[str, Any]:
    """Run one task and give its row."""
    with tempfile.TemporaryDirectory(prefix="trajectory-") as folder:
        sandbox = Sandbox(name, read_repository(name), Path(folder).resolve())
        messages: list[dict[str, Any]] = [
            _message("system", SYSTEM),
            _message("user", TASK.format(name=name, text=task.text)),
        ]
        for number, action in enumerate(task.actions, start=1):
            call = {
                "id": f"call_{number:02d}",
                "type": "function",
                "function": {"name": action.tool, "arguments": json.dumps(action.arguments, ensure_ascii=False)},
            }
            messages.append(_message("assistant", action.thought, tool_calls=[call]))
            if action.tool != "finish":
                messages.append(_message("tool", perform(sandbox, action), tool_call_id=call["id"], name=action.tool))
        patch, _ = sandbox.bash("git add -A && git diff --cached")
        tests, code = sandbox.bash("python3 -m unittest 2>&1")
        if code:
            raise SystemExit(f"{name}, {task.name}: the tests fail at the end:\n{tests}")
    return {
        "trajectory_id": f"scripted-{name}-{task.name}",
        "instance_id": f"{OWNER}__{name}-{task.name}",
        "repo": f"{OWNER}/{name}",
        "agent": AGENT,
        "trajectory": messages,
        "tools": TOOLS,
        "model_patch": patch,
        "exit_status": "submit",
        "resolved": 1,
    }


def _message(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, "name": None, "tool_call_id": None, "tool_calls": None, **fields}


def names() -> list[str]:
    """The repositories that there is material for."""
    return sorted(path.name.removesuffix(".repository.txt") for path in MATERIAL.glob("*.repository.txt"))


def main() -> None:
    """Record everything."""
    parser = argparse.ArgumentParser(description="Record the built-in trajectories.")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where to write (default: into the package)")
    output = parser.parse_args().output
    rows = [record(name, task) for name in names() for task in read_tasks(name)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    # No time and no name in the header: the same rows give the same file.
    output.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{len(rows)} trajectories, {len(text):,} bytes, {output.stat().st_size:,} compressed: {output}")


if __name__ == "__main__":
    main()
