"""Which options each ``bench`` takes, and what is said of one that another takes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fathom_eval.cli import build_parser, main
from fathom_eval.commands import bench, bench_arguments
from fathom_eval.commands.bench_arguments import ACTIONS, take_options
from fathom_eval.errors import UserError
from fathom_eval.offload.gatherer import GATHERERS

ROOT = Path(__file__).parents[2]
OF_A_STEP = {
    "--methods": "sparq",
    "--k": "512",
    "--batch": "1",
    "--sessions": "1",
    "--lanes": "auto",
    "--last-lane": "1",
    "--rows": "gpu",
    "--gather-threads": "2",
    "--rerank": "1",
    "--index": "host",
    "--host-pages": "auto",
    "--host-memory": "1",
    "--model": "qwen3-8b-shape",
    "--dtype": "float16",
    "--revision": "main",
    "--rope-scaling": "yarn:4",
    "--trust-remote-code": None,
}


@pytest.mark.parametrize("what", [action for action in ACTIONS if action != "step"])
@pytest.mark.parametrize("flag", OF_A_STEP)
def test_an_option_of_a_step_is_refused_elsewhere_even_at_its_default(
    what: str, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = OF_A_STEP[flag]
    assert main(["bench", what, "--output", str(tmp_path / "run"), flag, *([] if value is None else [value])]) == 2
    found = capsys.readouterr()
    assert (found.out, found.err) == ("", f"error: {flag}: no meaning in '{what}'; {flag} is of 'bench step'\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("link --contexts 4096", "--contexts: no meaning in 'link'; --contexts is of 'bench kernels' and 'bench step'"),
        ("link --rows cpu --lanes 2", "--lanes, --rows: no meaning in 'link'; --lanes, --rows are of 'bench step'"),
        (
            "kernels --errors runs/a --k 64",
            "--k, --errors: no meaning in 'kernels'; --k is of 'bench step', --errors is of 'bench equal-error'",
        ),
        ("step --reference full", "--reference: no meaning in 'step'; --reference is of 'bench equal-error'"),
        ("equal-error --device cpu", "--device is of 'bench link', 'bench kernels' and 'bench step'"),
        ("step --dtype float16", "--dtype: no meaning in a step of qwen3-8b-shape, random weights of a shape"),
        ("step --model tiny-shape --revision main --rope-scaling yarn:4", "--revision, --rope-scaling: no meaning in a step of tiny-shape"),
        ("step --model smollm2 --host-memory 4", "--host-memory: no meaning in a step of smollm2, a model with keys of its own"),
        ("step --model smollm2 --spread 1", "--spread: no meaning in a step of smollm2"),
        ("steps", "bench cannot time 'steps'; did you mean 'step'?"),
    ],
)
def test_what_has_no_meaning_is_said_with_who_takes_it(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words.split()]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_values_that_no_action_takes_are_found_before_torch_is_imported() -> None:
    commands = {
        "step --contexts 0": "--contexts: '0' is not",
        "step --model tiny-shape --rows disk": "--rows: no 'disk'; choose from both, cpu, gpu",
        "step --model tiny-shape --index hbn": "--index: no 'hbn'; did you mean 'hbm'?",
        "step --lanes two": "--lanes: 'two' is not",
        "step --k 0": "--k 0 must be at least 1",
        "step --last-lane 0": "--last-lane 0 must be at least 1",
        "step --host-memory nan": "--host-memory nan must be above 0",
        "step --rerank 1,nan": "--rerank: '1,nan' is not",
        "kernels --spread -1": "--spread -1 must be at least 0",
        "link --repeats 0": "--repeats 0 must be at least 1",
    }
    program = "import sys; from fathom_eval.cli import main; codes = [main(['bench', *line.split()]) for line in sys.argv[1:]]"
    told = subprocess.run(
        [sys.executable, "-c", f"{program}; print(set(codes), 'torch' in sys.modules)", *commands],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "{2} False\n"
    for line, said in zip(told.stderr.splitlines(), commands.values(), strict=True):
        assert line.startswith(f"error: {said}")
    assert bench_arguments._WORDS == {"rows": GATHERERS, "index": ("host", "hbm")}


def test_defaults_are_set_of_what_is_taken_alone() -> None:
    for what, context, spread, rows in (("link", None, None, None), ("kernels", "131072", 1.0, None), ("step", "131072", 1.0, "gpu")):
        args = build_parser().parse_args(["bench", what])
        take_options(args)
        assert (args.contexts, args.spread, args.rows) == (context, spread, rows)
    args = build_parser().parse_args(shlex.split("bench step --rows both --spread 0"))
    take_options(args)
    assert (args.rows, args.spread, args.k, args.host_pages) == ("both", 0.0, 512, "auto")


def test_the_manifest_lists_what_was_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> object:
        return iter(())

    monkeypatch.setattr("fathom_eval.offload.bench.link.measure", stop)
    assert main(["bench", "link", "--device", "cpu", "--repeats", "3", "--output", str(tmp_path / "run")]) == 0
    settings = json.loads((tmp_path / "run/manifest.json").read_text(encoding="utf-8"))["settings"]
    assert (settings["what"], settings["repeats"], settings["device"]) == ("link", 3, "cpu")
    assert not {"methods", "contexts", "k", "errors"} & settings.keys()


def commands() -> list[str]:
    """Every ``bench`` that a page names, with the variables of a page's shell left out."""
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
    pages += [*(ROOT / "docs").glob("*.md"), *(ROOT / "reports/published").glob("*/README.md")]
    found = {bench.EXAMPLE}
    for page in pages:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        found |= {command.partition("#")[0] for command in re.findall(r"fathom-eval (bench [a-z-]+ --[^\n`]*)", text)}
    # One that a page's shell keeps in a variable ends with the quote that the variable began with.
    found = {command if command.count('"') % 2 == 0 else command.rpartition('"')[0] for command in found}
    return sorted(command.removeprefix("fathom-eval ") for command in found)


@pytest.mark.parametrize("command", commands())
def test_the_commands_of_the_pages_give_no_option_without_a_meaning(command: str) -> None:
    take_options(build_parser().parse_args(shlex.split(command)))


def test_there_are_commands_on_the_pages() -> None:
    assert {command.split()[1] for command in commands()} == set(ACTIONS)


def test_a_dtype_of_its_own_is_for_a_model() -> None:
    args = build_parser().parse_args(shlex.split("bench step --model ./folder --dtype float16"))
    take_options(args)
    with pytest.raises(UserError, match="no meaning"):
        take_options(build_parser().parse_args(shlex.split("bench step --model tiny-shape --dtype float16")))
