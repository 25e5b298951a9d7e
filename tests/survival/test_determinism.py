"""What of a run is bit-equal to what, in fp32 on a CPU: the logits of every branch and step, not only the tokens that they give.

``docs/durability.md`` says so in words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import fathom_eval.ruler as ruler_module
from fathom_eval.branches import Branch, batch_order
from fathom_eval.cli import main
from tests.survival.conftest import Arguments
from tests.survival.kills import records

pytestmark = pytest.mark.slow
Logits = dict[tuple[str, str, int | None], torch.Tensor]
ROUNDING = 1e-4
"""More than fp32 rounding moves a logit of the tiny model, whose logits are of the order of 1."""


@contextmanager
def logits_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Logits]:
    """All logits of every branch, ``[steps, vocabulary]``, by prompt, method and k."""
    found: Logits = {}
    decode = ruler_module.decode

    def listening(loaded: Any, prefix: Any, part: Sequence[Branch], *rest: Any, **named: Any) -> Any:
        steps: list[torch.Tensor] = []
        hook = loaded.model.register_forward_hook(lambda module, given, output: steps.append(output.logits[:, -1].clone()))
        try:
            results = decode(loaded, prefix, part, *rest, **named)
        finally:
            hook.remove()
        prompt = hashlib.sha256(str(prefix.token_ids).encode()).hexdigest()
        # Rows of the batch stand in the order of batch_order; a branch that has ended is carried along and not looked at.
        for row, branch in enumerate(part[at] for at in batch_order(part, loaded.facts)):
            own = [logits[row] for logits in steps[: results[list(part).index(branch)].steps]]
            found[prompt, branch.spec.label, branch.k] = torch.stack(own)
        return results

    with monkeypatch.context() as patch:
        patch.setattr(ruler_module, "decode", listening)
        yield found


def by_branch(path: Path) -> list[dict[str, Any]]:
    return sorted(records(path), key=lambda record: (record["task"], record["sample"], record["label"]))


def difference(one: Logits, other: Logits) -> float:
    """The largest of any logit; 0 where all are bit-equal."""
    assert one.keys() <= other.keys()
    return max(float((one[key] - other[key]).abs().max()) for key in one)


K = "48,64"


@pytest.fixture(scope="module")
def whole(_ruler: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Logits]:
    """An undisturbed run on one thread, and its logits."""
    path = tmp_path_factory.mktemp("determinism") / "whole"
    with pytest.MonkeyPatch.context() as monkeypatch, threads_of_torch(1), logits_of(monkeypatch) as found:
        assert main([*_ruler, f"--k={K}", f"--output={path}"]) == 0
    assert len(found) == 4 * 9
    return path, found


@contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


STARTS: dict[str, list[dict[str, Any]]] = {
    "the same run twice": [{}],
    "methods in another order": [{"methods": "landmark,exact,sparq,dense,fathom"}],
    "resumed between samples": [{"limit": 1}, {"limit": 3}, {}],
}


@pytest.mark.parametrize("starts", STARTS.values(), ids=STARTS.keys())
def test_bit_equal(
    starts: list[dict[str, Any]], whole: tuple[Path, Logits], ruler: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with threads_of_torch(1), logits_of(monkeypatch) as found:
        for start in starts:
            assert main(ruler(k=K, **start)) == 0
    assert found.keys() == whole[1].keys()
    assert difference(found, whole[1]) == 0
    assert by_branch(tmp_path / "run") == by_branch(whole[0])


OTHER_BATCHES: dict[str, list[dict[str, Any]]] = {
    "batches of one": [{"batch_size": 1}],
    "batches of two": [{"batch_size": 2}],
    "methods added later": [{"methods": "landmark"}, {"methods": "fathom,sparq,landmark"}],
}


@pytest.mark.parametrize("starts", OTHER_BATCHES.values(), ids=OTHER_BATCHES.keys())
def test_another_batch_differs_by_rounding(
    starts: list[dict[str, Any]], whole: tuple[Path, Logits], ruler: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with threads_of_torch(1), logits_of(monkeypatch) as found:
        for start in starts:
            assert main(ruler(k=K, **start)) == 0
    assert difference(found, whole[1]) < ROUNDING
    assert by_branch(tmp_path / "run") == by_branch(whole[0]), "no near-tie stands in these samples"


def test_another_number_of_threads_differs_by_rounding(
    whole: tuple[Path, Logits], ruler: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Logits] = []
    for output in ("one", "again"):
        with threads_of_torch(2), logits_of(monkeypatch) as logits:
            assert main(ruler(output, k=K, limit=1)) == 0
        found.append(logits)
    assert difference(found[0], found[1]) == 0, "the same number of threads"
    assert difference(found[0], whole[1]) < ROUNDING
    assert by_branch(tmp_path / "one") == [record for record in by_branch(whole[0]) if record["sample"] == 0]
