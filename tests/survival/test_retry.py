"""``--retry-failed``: what failed is measured again once its cause is mended, and a kill leaves the old record or the new one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fathom_eval.cli import main
from fathom_eval.reports.failed import find_failures
from fathom_eval.run import RECORDS, Run, record_key
from fathom_eval.stores import LandmarkStore
from tests.survival.conftest import Arguments, Capture
from tests.survival.kills import HOST_FACTS, records, tables_of


def break_landmark(patch: pytest.MonkeyPatch) -> None:
    """Let the scan of landmarks raise."""

    def broken(self: LandmarkStore, *args: Any) -> Any:
        raise RuntimeError("the scan is broken")

    patch.setattr(LandmarkStore, "scan", broken)


def by_key(found: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    return {record_key(record): record for record in found}


def loud(arguments: list[str], *more: str) -> list[str]:
    return [*(argument for argument in arguments if argument != "--quiet"), *more]


@pytest.mark.parametrize("kind", ["ruler", "sessions", "fidelity"])
def test_what_failed_is_measured_again(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    arguments: Arguments = request.getfixturevalue(kind)
    changes = {"methods": "sparq,landmark", **({"limit": 2} if kind == "ruler" else {})}
    noun = {"ruler": "sample", "sessions": "session", "fidelity": "window"}[kind]
    assert main(arguments("whole", **changes)) == 0
    with monkeypatch.context() as patch:
        break_landmark(patch)
        assert main(loud(arguments(**changes))) == 0
    printed = capsys.readouterr().err
    reason = r"layer 0: RuntimeError: the scan is broken \(test_retry\.py, line \d+\)"
    assert re.search(rf"^warning: landmark size=8 at k=\d+ failed in \d+ {noun}s: {reason}$", printed, re.MULTILINE)
    assert "once the cause is mended, the same command with --retry-failed measures it again" in printed
    last = printed.strip().splitlines()[-1]
    assert re.fullmatch(rf"warning: no result of landmark size=8 at k=\d+: every {noun} of it failed; see --retry-failed", last)
    whole, failed = (by_key(records(tmp_path / name)) for name in ("whole", "run"))
    assert {record["method"] for record in failed.values() if record["finish"] == "error"} == {"landmark"}

    # Without the option it stays as it is.
    assert main(arguments(**changes)) == 0
    assert by_key(records(tmp_path / "run")) == failed

    assert main(loud(arguments(**changes), "--retry-failed")) == 0
    printed = capsys.readouterr().err
    assert "failed" not in printed
    mended = by_key(records(tmp_path / "run"))
    assert set(mended) == set(whole)
    assert not [record for record in mended.values() if record["finish"] == "error"]
    for key, record in mended.items():
        # What had not failed is not touched.
        assert record["method"] == "landmark" or record == failed[key]
        assert set(record) == set(whole[key])
        assert record.get("token_ids") == whole[key].get("token_ids")
        assert record.get("score") == whole[key].get("score")
        if kind == "fidelity":
            assert record["error_dense"] == pytest.approx(whole[key]["error_dense"], rel=1e-4)
    tables = [tables_of(tmp_path / name / "report") for name in ("whole", "run")]
    assert set(tables[0]) == set(tables[1])
    assert [row[:3] for row in sorted(tables[0]["results.csv"])] == [row[:3] for row in sorted(tables[1]["results.csv"])]

    # And what did not fail is not measured again.
    size = (tmp_path / "run" / RECORDS).stat().st_size
    assert main([*arguments(**changes), "--retry-failed"]) == 0
    assert (tmp_path / "run" / RECORDS).stat().st_size == size


def test_a_retry_that_is_killed_leaves_the_old_record_or_the_new_one(
    ruler: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"methods": "sparq,landmark", "limit": 1}
    with monkeypatch.context() as patch:
        break_landmark(patch)
        assert main(ruler(**changes)) == 0
    file = tmp_path / "run" / RECORDS
    failed, before = by_key(records(tmp_path / "run")), file.stat().st_size
    assert main([*ruler(**changes), "--retry-failed"]) == 0
    whole, mended = file.read_bytes(), by_key(records(tmp_path / "run"))
    assert mended != failed
    for size in [*range(before, len(whole), 41), len(whole) - 1, len(whole)]:
        file.write_bytes(whole[:size])
        run = Run.load(tmp_path / "run")
        found = [{name: value for name, value in record.items() if name not in HOST_FACTS} for record in run.records()]
        assert len(found) == len(run) == len(failed)
        assert by_key(found) == (mended if size == len(whole) else failed)
        assert run.problems == []
    file.write_bytes(whole[: len(whole) - 9])
    assert main([*ruler(**changes), "--retry-failed"]) == 0
    assert by_key(records(tmp_path / "run")) == mended


def test_a_session_whose_reference_failed_is_compared_anew(sessions: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fathom_eval.agent_sessions as module

    changes = {"methods": "sparq", "sessions": 1}
    assert main(sessions("whole", **changes)) == 0
    decode_all = module.decode_all

    def without_exact(*args: Any, **options: Any) -> Any:
        return [
            (module.unmeasured(result.branch, "no memory"), seconds) if result.branch.spec.method.name == "exact" else (result, seconds)
            for result, seconds in decode_all(*args, **options)
        ]

    with monkeypatch.context() as patch:
        patch.setattr(module, "decode_all", without_exact)
        assert main(sessions(**changes)) == 0
    [sparq] = [record for record in records(tmp_path / "run") if record["method"] == "sparq"]
    assert (sparq["finish"] != "error", sparq["score"]) == (True, None)
    assert main([*sessions(**changes), "--retry-failed"]) == 0
    whole, mended = (by_key(records(tmp_path / name)) for name in ("whole", "run"))
    assert {key: record["score"] for key, record in mended.items()} == {key: record["score"] for key, record in whole.items()}


def test_failures_of_older_versions_are_not_named() -> None:
    def record(version: int, finish: str, sample: int = 0) -> dict[str, Any]:
        named = {"method": "mine", "options": {}, "method_version": version, "label": "mine", "k": 64, "sample": sample}
        return {**named, "finish": finish, "error": "ValueError: a\nb" if finish == "error" else None}

    found = find_failures([record(1, "error"), record(2, "length")], "sample")
    assert (found.lines, found.without_result) == ((), "")
    found = find_failures([record(1, "length"), record(2, "error"), record(2, "error", 1)], "sample")
    assert found.lines == ("mine at k=64 failed in 2 samples: ValueError: a b",)
    assert found.without_result == "no result of mine at k=64: every sample of it failed"
    assert find_failures([record(1, "error"), record(1, "length", 1)], "sample").without_result == ""
