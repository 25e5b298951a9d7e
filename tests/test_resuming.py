"""A start that goes on with a run takes over what is not given, and a folder that cannot hold the run is refused at once."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fathom_eval import workers
from fathom_eval.cli import build_parser, main
from fathom_eval.commands.resuming import take_over
from fathom_eval.errors import UserError
from fathom_eval.methods import parse_method
from fathom_eval.methods.possible import check_options
from fathom_eval.run import Run
from tests.sessions.rows import TOKENS, some_rows, write_jsonl
from tests.tiny import save_tiny

Start = Callable[..., list[str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("resuming") / "model", layers=1, query_heads=2, kv_heads=1, head_dim=16, max_positions=2048)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a text.txt"
    path.write_text(" ".join(f"The boat number {word} left the old harbour." for word in range(300)), encoding="utf-8")
    return path


@pytest.fixture
def first(model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Of each command, options of a small run that are not the defaults."""
    monkeypatch.setenv("FATHOM_EVAL_CACHE", str(tmp_path / "cache"))
    rows = write_jsonl(tmp_path / "rows.jsonl", some_rows())
    shared, of_text = [f"--model={model}", "--seed=3", "--methods=sparq"], [f"--haystack={text}", "--context=600", "--k=64"]
    return {
        "ruler": [*shared, *of_text, "--tasks=niah_single", "--limit=1", "--decoys=3"],
        "fidelity": [*shared, *of_text, "--windows=1", "--positions=9", "--full-window"],
        "sessions": [
            *(*shared, f"--trajectories={rows}", "--k=400", "--sessions=1", f"--session-tokens={TOKENS}"),
            *("--max-new-tokens=3", "--no-recorded-text", "--plain"),
        ],
    }


def recorded(run: Path) -> list[dict[str, Any]]:
    return Run.load(run).records()


@pytest.mark.parametrize("command", ["ruler", "fidelity", "sessions"])
def test_a_method_is_added_to_what_the_run_measured(
    command: str, first: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main([command, "--offline", f"--output={run}", *first[command]]) == 0
    before = recorded(run)
    capsys.readouterr()
    assert main([command, "--offline", f"--output={run}", "--methods=landmark"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("as in ")]
    told = line.removeprefix(f"as in {run}: ").replace("'", "").replace("--", " --")
    for option in first[command]:
        assert ("methods" in option) != (f" {option.replace('=', ' ')}" in f" {told}"), option
    after = recorded(run)
    assert after[: len(before)] == before
    added = after[len(before) :]
    assert added
    assert {record["method"] for record in added} <= {"landmark", "dense", "exact"}
    places = {(record["task"], record["context"], record["sample"], record["k"]) for record in before}
    assert {(record["task"], record["context"], record["sample"], record["k"]) for record in added} <= places

    # The start after it goes on with the last one, and what is given wins.
    assert main([command, "--offline", f"--output={run}"]) == 0
    assert "--methods landmark" in capsys.readouterr().out
    assert recorded(run) == after
    more = {"ruler": "--limit=2", "fidelity": "--windows=2", "sessions": "--sessions=2"}[command]
    assert main([command, "--offline", f"--output={run}", more]) == 0
    assert {record["sample"] for record in recorded(run)} == {0, 1}
    assert {record["method"] for record in recorded(run) if record["sample"] == 1} - {"dense", "exact"} == {"landmark"}


def manifest_of(run: Path, start: Any, kind: str = "ruler", **facts: Any) -> Path:
    run.mkdir(exist_ok=True)
    manifest = {"schema": 1, "kind": kind, "identity": {}, "invocations": start, **facts}
    (run / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return run


def taken(run: Path, *given: str, kind: str = "ruler") -> tuple[argparse.Namespace, list[str]]:
    said: list[str] = []
    args = build_parser().parse_args([kind, f"--output={run}", *given])
    take_over(args, kind, said.append)
    return args, said


def test_without_a_run_the_defaults_stand(tmp_path: Path) -> None:
    for kind in ("ruler", "fidelity", "sessions"):
        args, said = taken(tmp_path / "new", kind=kind)
        assert (args.model, args.seed, args.dtype, args.rope_scaling) == ("smollm2", 0, "auto", None)
        assert said == []
    assert (taken(tmp_path / "new")[0].limit, taken(tmp_path / "new", "--limit=3")[0].limit) == (8, 3)


def test_a_run_of_an_earlier_version_gives_its_settings(tmp_path: Path) -> None:
    methods = ["dense", "sparq r=D/8 per head", "fathom budget=40 basis=klt", "loki r=D/4 rerank=2.0", "of another version x=1"]
    settings = {"tasks": ["vt", "gone"], "context": [512, 1024], "k": [64], "methods": methods, "limit": 2, "chat_template": True}
    run = manifest_of(tmp_path / "run", [{"settings": {"limit": 1}}, {"settings": settings}], haystack={"name": "python-docs"})
    args, said = taken(run, "--k=32")
    assert (args.tasks, args.context, args.k, args.limit, args.chat_template, args.decoys) == ("vt", "512,1024", "32", 2, True, 7)
    assert args.methods == "dense,sparq:r=D/8:per_head=true,fathom:budget=40:basis=klt,loki:r=D/4:rerank=2.0"
    assert args.haystack == "python-docs"
    options = f"--tasks vt --methods {args.methods} --context 512,1024 --limit 2 --haystack python-docs --chat-template"
    assert said == [f"as in {run}: {options}"]


@pytest.mark.parametrize(
    "starts",
    [
        None,
        "no list",
        [3, None],
        [{}],
        [{"settings": [1]}],
        [{"settings": {"tasks": [[], 3], "context": ["x"], "k": {}, "limit": -1, "methods": [None, "gone"], "seed": "0", "decoys": -2}}],
        [{"arguments": 5}],
        [{"arguments": {"limit": True, "tasks": "gone", "k": 64, "dtype": "int8", "runtime": "disk", "chat_template": 1, "offline": True}}],
        [{"arguments": {"trust_remote_code": True, "workers": 7, "batch_size": 1, "rope_scaling": "x", "methods": ",", "model": ""}}],
    ],
)
def test_what_is_no_value_of_its_option_is_passed_over(tmp_path: Path, starts: Any) -> None:
    args, said = taken(manifest_of(tmp_path / "run", starts, haystack=["wikitext"]))
    assert said == []
    assert args == taken(tmp_path / "new", f"--output={tmp_path / 'run'}")[0]


def test_a_suite_stands_for_its_methods_context_and_k(tmp_path: Path) -> None:
    own = {"suite": "rerank", "calibration": [], "methods": None, "context": "8192", "k": None, "windows": 2}
    settings = {"suite": "rerank", "methods": ["dense"], "context": [8192], "k": [128]}
    run = manifest_of(tmp_path / "run", [{"arguments": own, "settings": settings}], "fidelity")
    args, _ = taken(run, kind="fidelity")
    assert (args.suite, args.methods, args.context, args.k, args.windows) == ("rerank", None, "8192", None, 2)
    args, _ = taken(run, "--methods=quest", kind="fidelity")
    assert (args.suite, args.methods, args.context, args.k) == (None, "quest", "8192", "128")
    args, _ = taken(run, "--suite=union", kind="fidelity")
    assert (args.suite, args.methods, args.context, args.k, args.windows) == ("union", None, None, None, 2)


def test_what_contradicts_an_option_that_is_given_is_not_taken(tmp_path: Path) -> None:
    run = manifest_of(tmp_path / "run", [{"arguments": {"trajectories": "builtin", "default_repo": "a", "seed": 4}}], "fidelity")
    args, _ = taken(run, "--haystack=python-docs", kind="fidelity")
    assert (args.trajectories, args.default_repo, args.seed) == (None, "", 4)
    run = manifest_of(run, [{"arguments": {"plain": True, "methods": "sparq,loki", "baseline": "loki"}}], "sessions")
    args, _ = taken(run, "--chat-template", "--methods=sparq", kind="sessions")
    assert (args.plain, args.chat_template, args.baseline) == (False, True, None)


def test_inspecting_a_file_has_defaults_of_its_own() -> None:
    args = build_parser().parse_args(["sessions", "inspect", "file.jsonl"])
    assert (args.seed, args.condensation, args.default_repo, args.chat_template) == (0, "full", "", False)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(workers.ModelRequest, "load", load)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("command", ["ruler", "fidelity", "sessions"])
def test_what_needs_no_model_is_refused_before_one_is_loaded(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fathom_eval.tasks.haystack.load_haystack", lambda *args, **options: pytest.fail("a text was waited for"))
    (tmp_path / "file.txt").write_text("")
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    run = manifest_of(tmp_path / "run", [], "bench")
    for given, expected in (
        (f"--output={run}", f"error: {run} is a bench run; give {command} another folder"),
        ("--output=", "error: --output is empty: name a folder for the run, such as runs/first"),
        (
            f"--output={tmp_path / 'file.txt/sub'}",
            f"cannot write {tmp_path / 'file.txt/sub'}: {tmp_path / 'file.txt'} is a file, not a fold",
        ),
        (f"--output={tmp_path / 'lost'}", "is a link that leads nowhere"),
        (f"--output={tmp_path / 'loop'}", "is a link that leads nowhere"),
        (f"--output={tmp_path / ('x' * 300)}", "File name too long"),
        ("--dtype=int8", "unknown dtype 'int8'"),
        ("--device=tpu", "unknown device 'tpu'"),
        ("--rope-scaling=foo:4", "unknown rope scaling 'foo:4'"),
        ("--methods=fathom:budget=-1", "budget=-1 must lie in 1..512"),
        ("--methods=sparq:r=D/0", "r=D/0 is not a number of channels"),
    ):
        assert expected in refused(capsys, command, "--offline", given)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.txt", "loop", "lost", "run"]


@pytest.mark.usefixtures("no_model")
def test_a_folder_in_which_none_can_be_made_is_no_matter_of_space(capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/proc/self").exists():
        pytest.skip("needs /proc")
    assert "cannot write /proc/x: " in refused(capsys, "ruler", "--offline", "--output=/proc/x")


@pytest.mark.parametrize("text", ["loki:bits=5", "quest:page=3", "thumbnail:depth=9", "sparq_published:r=x"])
def test_options_that_no_model_takes_need_none(text: str) -> None:
    with pytest.raises(UserError, match=text.partition(":")[2]):
        check_options(parse_method(text), [64])


@pytest.mark.parametrize("text", ["sparq:r=200", "sparq:r=D/7", "self_indexing:group=3", "quest:bits=4:page=64", "sparq", "dense"])
def test_options_that_some_model_may_take_wait_for_it(text: str) -> None:
    check_options(parse_method(text), [64])
