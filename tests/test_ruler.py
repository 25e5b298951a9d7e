"""The ruler command from end to end on a tiny model: what it records, how it resumes, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fathom_eval.ruler as ruler_module
from fathom_eval.cli import main
from fathom_eval.run import Run
from tests.tiny import save_tiny

METHODS = "dense,exact,fathom,sparq,landmark"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("ruler") / "model", layers=2, query_heads=4, kv_heads=2, head_dim=16, max_positions=4096)


@pytest.fixture(scope="module")
def haystack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text(
        "\n".join(f"The boat number {word} left the old harbour early. Nobody saw it go." for word in range(400)), encoding="utf-8"
    )
    return path


@pytest.fixture
def arguments(model: Path, haystack: Path, tmp_path: Path) -> Callable[..., list[str]]:
    def build(**changes: Any) -> list[str]:
        options = {
            "model": model,
            "haystack": haystack,
            "context": 900,
            "k": 64,
            "tasks": "niah_single,niah_multikey",
            "methods": METHODS,
            "limit": 2,
            "output": tmp_path / "run",
            **changes,
        }
        return ["ruler", "--offline", *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())]

    return build


def records(folder: Path) -> list[dict[str, Any]]:
    return Run.load(folder).records()


def test_records_report_and_resume(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefills: list[int] = []
    original = ruler_module.prefill
    monkeypatch.setattr(
        ruler_module, "prefill", lambda loaded, ids, **options: (prefills.append(len(ids)), original(loaded, ids, **options))[1]
    )

    assert main(arguments()) == 0
    run = tmp_path / "run"
    first = records(run)
    assert len(first) == 2 * 2 * 5
    assert len(prefills) == 4, "one dense prefill a sample"
    for record in first:
        assert record["fired"] == record["steps"] * 2
        assert record["prompt_tokens"] <= 900
        assert record["bits"] is None if record["control"] else record["bits"] == record["declared_bits"] > 0
        assert (record["k"] is None) == (record["method"] == "dense")
        assert 0 <= record["score"] <= 1
    output = capsys.readouterr()
    assert str(run / "report" / "report.html") in output.out
    assert (run / "report" / "results.csv").exists()
    manifest = json.loads((run / "manifest.json").read_text())
    assert "prose.txt" in manifest["haystack"]["name"]
    assert manifest["settings"]["limit"] == 2

    # A finished run does no model work; methods, k, samples and tasks that are added compute only themselves.
    assert main(arguments()) == 0
    assert len(prefills) == 4
    assert main(arguments(methods=f"{METHODS},loki")) == 0
    assert len(prefills) == 8
    assert len(records(run)) == len(first) + 4
    assert main(arguments(k="64,80")) == 0
    assert len(records(run)) == len(first) + 4 + 4 * 4
    assert main(arguments(limit=3)) == 0
    assert main(arguments(tasks="niah_single,vt")) == 0
    kept = {json.dumps(record, sort_keys=True) for record in records(run)}
    assert all(json.dumps(record, sort_keys=True) in kept for record in first), "what was measured is left as it was"


def test_methods_and_batches_in_another_order_give_the_same_results(arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    assert main(arguments()) == 0
    assert main(arguments(output=tmp_path / "other", methods="landmark,fathom,dense,sparq,exact", batch_size=2)) == 0

    def results(folder: Path) -> dict[Any, Any]:
        return {(r["task"], r["sample"], r["label"]): (r["token_ids"], r["bits"], r["rows"]) for r in records(folder)}

    assert results(tmp_path / "run") == results(tmp_path / "other")


@pytest.mark.parametrize("index", ["host", "hbm"])
def test_the_timed_step_gives_the_records_of_lock_step_decoding(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], index: str
) -> None:
    changes = {"methods": f"{METHODS},quest,fathom:rerank=2:attend=union", "k": "64,80", "limit": 1}
    assert main(arguments(**changes)) == 0
    assert "timed step" not in capsys.readouterr().out
    assert main(arguments(output=tmp_path / "step", runtime=index, **changes)) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("decoded by the timed step")]
    assert line.endswith("decoded in lock-step: dense, exact, quest page=16")
    own = ("seconds", "decoded_by")

    def by_branch(folder: Path) -> dict[Any, dict[str, Any]]:
        return {(r["task"], r["label"], r["k"]): {name: value for name, value in r.items() if name not in own} for r in records(folder)}

    assert by_branch(tmp_path / "step") == by_branch(tmp_path / "run")
    assert all("decoded_by" not in record for record in records(tmp_path / "run"))
    for record in records(tmp_path / "step"):
        assert record["decoded_by"] == ("lock-step" if record["method"] in ("dense", "exact", "quest") else "runtime")
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("run", "step")]
    assert "runtime" not in manifests[0]["identity"]
    assert manifests[1]["identity"] == {**manifests[0]["identity"], "runtime": index}
    assert (tmp_path / "step" / "report" / "report.html").exists()

    # Neither resumes the other, nor a run with its index elsewhere. Where no runtime is given, it is the run's.
    other = "hbm" if index == "host" else "host"
    for folder, asked, there in (("run", index, "no --runtime"), ("step", other, f"--runtime {index}")):
        assert main(arguments(output=tmp_path / folder, runtime=asked, **changes)) == 2
        assert f"{there} there, --runtime {asked} now" in capsys.readouterr().err
    assert main(arguments(output=tmp_path / "step", **changes)) == 0
    output = capsys.readouterr().out
    assert f"as in {tmp_path / 'step'}: --runtime {index}\n" in output
    assert "0 samples to do" in output
    assert main(arguments(output=tmp_path / "step", runtime=index, **{**changes, "limit": 2})) == 0
    assert len(records(tmp_path / "step")) == 2 * len(records(tmp_path / "run"))


def test_a_model_that_the_runtime_does_not_compute_is_refused_before_any_prefill(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ruler_module, "prefill", lambda *_: pytest.fail("a prefill was started"))
    folder = save_tiny(tmp_path / "mistral", "mistral", sliding_window=None)
    assert main(arguments(model=folder, runtime="hbm")) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert "computes llama, qwen2, qwen3 models, not 'mistral'" in line
    assert not (tmp_path / "run").exists()


def test_an_interrupted_run_goes_on_where_it_stopped(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = ruler_module.decode, []

    def interrupted(*args: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args, **named)

    monkeypatch.setattr(ruler_module, "decode", interrupted)
    assert main(arguments()) == 130
    assert "run the same command again to go on" in capsys.readouterr().err
    done = records(tmp_path / "run")
    assert len(done) == 2 * 5
    assert main(arguments()) == 0
    assert len(calls) == 3 + 2
    assert len(records(tmp_path / "run")) == 20
    assert records(tmp_path / "run")[:10] == done


def test_prompts_are_kept_on_request(arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    assert main([*arguments(methods="dense", tasks="niah_single"), "--log-samples"]) == 0
    [first, second] = sorted((tmp_path / "run" / "samples").iterdir())
    assert "One of the special magic numbers for" in first.read_text(encoding="utf-8")
    assert first.read_text(encoding="utf-8") != second.read_text(encoding="utf-8")


def test_json_is_one_document(arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments(methods="dense,exact", tasks="niah_single"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert Path(document["html"]).exists()
    assert {row["method"] for row in document["results"]} == {"dense", "exact"}
    assert all(0 <= row["score"] <= 1 for row in document["results"])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"methods": "fathm"}, "unknown method 'fathm'; did you mean 'fathom'"),
    ({"methods": "sparq:rr=4"}, "has no option 'rr'"),
    ({"tasks": "niah_singel"}, "unknown task 'niah_singel'; did you mean 'niah_single'"),
    ({"model": "smolm2"}, "did you mean 'smollm2'"),
    ({"k": "36"}, "k=36 leaves nothing to select"),
    ({"k": "x"}, "--k: 'x' is not a whole number from 1"),
    ({"k": ""}, "--k is empty"),
    ({"context": "4090"}, "exceed"),
    ({"context": "60"}, "too short for niah_single"),
    ({"limit": "0"}, "--limit 0 must be at least 1"),
    ({"haystack": "/no/such/file.txt"}, "/no/such/file.txt"),
    ({"methods": "sparq:r=D/7"}, "head_dim 16 is not a multiple of 7"),
    ({"methods": "sparq:dense_layers=5"}, "dense layer 5 is not in 0..1"),
    ({"device": "tpu"}, "tpu"),
    ({"runtime": "disk"}, "--runtime disk: the index lies in 'host' or in 'hbm'"),
    ({"dtype": "int4"}, "int4"),
    ({"decoys": "-1"}, "--decoys -1 must be at least 0"),
    ({"k": "9" * 5000}, "is not a whole number from 1 to"),
    ({"limit": str(10**30)}, "at most 999,999,999"),
    ({"methods": "dense:sink=8"}, "attends to everything, so sink=8 does nothing"),
    ({"methods": "exact:rerank=2"}, "rerank does nothing"),
    ({"methods": "sparq:rerank=inf"}, "at most 1000"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_input_is_one_line_and_exit_code_2_before_any_prefill(
    arguments: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr(ruler_module, "prefill", lambda *_: pytest.fail("a prefill was started"))
    assert main(arguments(**changes)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "run").exists(), "a run that could not start leaves no folder"


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "empty"), (b"\x00\x01\x02binary" * 100, "binary"), ("Früher war mehr Lametta. ".encode("latin-1") * 50, "UTF-8")],
)
def test_haystacks_that_are_no_text(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    (tmp_path / "hay.txt").write_bytes(content)
    assert main(arguments(haystack=tmp_path / "hay.txt")) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_option_of_the_command_is_refused(arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments(), "--contxt=5"]) == 2
    assert "'--contxt'; did you mean '--context'?" in capsys.readouterr().err


def test_a_folder_with_another_runs_identity_is_refused(arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(methods="dense", tasks="niah_single")) == 0
    capsys.readouterr()
    assert main([*arguments(methods="dense", tasks="niah_single"), "--seed=5"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error:")
    assert "seed" in error
    assert "5" in error


def test_a_folder_with_something_else_is_refused_before_the_model_is_loaded(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious", encoding="utf-8")
    assert main(arguments(model="/nowhere")) == 2
    assert "thesis.tex" in capsys.readouterr().err


def test_a_full_disk_is_seen_before_any_prefill(
    arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ruler_module, "prefill", lambda *_: pytest.fail("a prefill was started"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    assert main(arguments()) == 2
    assert "not enough disk space" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["truncated", "corrupt"])
def test_a_broken_gguf_is_refused(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" if damage == "truncated" else b"not a model at all" * 50)
    assert main(arguments(model=path)) == 2
    assert "GGUF" in capsys.readouterr().err


def test_a_tokenizer_that_is_missing_is_named(
    arguments: Callable[..., list[str]], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    for file in folder.glob("token*"):
        file.unlink()
    assert main(arguments(model=folder)) == 2
    assert "tokenizer" in capsys.readouterr().err


def test_every_field_of_the_identity_tells_runs_apart(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(arguments(methods="dense", tasks="niah_single", limit=1)) == 0
    recorded = json.loads((tmp_path / "run" / "manifest.json").read_text())["identity"]
    fields = {"protocol", "model", "tokenizer", "dtype", "device", "end_tokens", "prompts", "haystack", "seed", "decoys", "chat_template"}
    assert set(recorded) == fields
    original = ruler_module.run_identity
    for field in sorted(fields):
        capsys.readouterr()
        changed = {field: "other"}
        monkeypatch.setattr(ruler_module, "run_identity", lambda *given, changed=changed: {**original(*given), **changed})
        assert main(arguments(methods="dense", tasks="niah_single", limit=1)) == 2
        assert field in capsys.readouterr().err.replace("-", "_")
