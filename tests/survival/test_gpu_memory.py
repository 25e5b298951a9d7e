"""A GPU whose memory really runs out, at every point of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fathom_eval.agent_sessions as sessions_module
import fathom_eval.ruler as ruler_module
from fathom_eval.branches import Branch
from fathom_eval.cli import main
from tests.survival.conftest import Arguments
from tests.survival.kills import records

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MIB = 2**20


@pytest.fixture
def _all_memory_afterwards() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def names_of(folder: Path) -> list[tuple[Any, ...]]:
    """What was measured, without numbers: another batch rounds in another way."""
    return sorted((str(record["sample"]), record["label"], str(record["k"])) for record in records(folder))


@pytest.mark.parametrize("kind", ["ruler", "sessions"])
def test_a_batch_that_the_gpu_refuses_is_halved(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments: Arguments = request.getfixturevalue(kind)
    module: Any = ruler_module if kind == "ruler" else sessions_module
    assert main(arguments("whole", device="cuda")) == 0
    decode = module.decode

    def asks_too_much(loaded: Any, prefix: Any, part: Sequence[Branch], *rest: Any, **named: Any) -> Any:
        if len(part) > 2:
            torch.empty(torch.cuda.mem_get_info()[1], dtype=torch.uint8, device="cuda")
        return decode(loaded, prefix, part, *rest, **named)

    monkeypatch.setattr(module, "decode", asks_too_much)
    assert main([argument for argument in arguments("halves", device="cuda") if argument != "--quiet"]) == 0
    said = capsys.readouterr()
    assert "branches does not fit into memory: halved" in said.out + said.err
    assert names_of(tmp_path / "halves") == names_of(tmp_path / "whole")
    assert all(record["finish"] != "error" for record in records(tmp_path / "halves"))


@pytest.mark.usefixtures("_all_memory_afterwards")
def test_memory_that_ends_anywhere_is_one_error_and_the_run_goes_on(
    ruler: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"device": "cuda", "context": 2000, "methods": "fathom:basis=klt,sparq,landmark,quest"}
    assert main(ruler("whole", **changes)) == 0
    capsys.readouterr()
    total = torch.cuda.get_device_properties(0).total_memory
    codes = []
    for room in (1, 4, 10, 20, 40, 60, 80, 120, 240, 2000):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room * MIB) / total)
        codes.append(main(ruler(**changes)))
        printed = capsys.readouterr().err
        errors = [line for line in printed.splitlines() if line.startswith("error:")]
        assert "Traceback" not in printed
        assert codes[-1] in (0, 2)
        assert len(errors) == (codes[-1] == 2)
    assert (codes[0], codes[-1]) == (2, 0)
    assert names_of(tmp_path / "run") == names_of(tmp_path / "whole")
