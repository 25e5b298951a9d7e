"""Methods that fail: each ends its own branches alone, and says why."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fathom_eval.branches import Branch
from fathom_eval.decode import decode
from fathom_eval.fidelity import Unit, evaluate
from fathom_eval.fidelity_layer import LayerComparison
from fathom_eval.methods import MethodSpec, parse_method
from fathom_eval.methods.sparq import SparQ
from fathom_eval.methods.step import Step
from fathom_eval.models import LoadedModel, ModelFacts
from fathom_eval.prefill import Prefix, PrefixLayer, prefill
from fathom_eval.stores import StoreSpec
from tests.extended_toys import (
    FACTS,
    Keys,
    Toy,
    toy,
)
from tests.made_windows import FixedWindows, structured_layer
from tests.tiny import tiny_model, token_ids


def failing(where: str, error: type[BaseException] = RuntimeError) -> MethodSpec:
    def fail(self: Any, *args: Any) -> Any:
        raise error(f"no {where}")

    return toy(type("Failing", (SparQ,), {"name": f"failing_{where}", where: fail})())


@pytest.fixture(scope="module")
def tiny() -> tuple[LoadedModel, Prefix]:
    loaded = tiny_model("llama", layers=2, query_heads=4, kv_heads=2, head_dim=16)
    return loaded, prefill(loaded, token_ids(loaded, 250))


HOOKS = ("index", "plan", "declared_bits", "rank", "log_weights", "remainder", "learn", "scan_query", "plan_step")


@pytest.mark.parametrize("where", HOOKS)
def test_a_method_that_raises_ends_its_own_branches_only(where: str, tiny: tuple[LoadedModel, Prefix]) -> None:
    loaded, prefix = tiny
    good = [Branch(parse_method(text), k) for text in ("sparq", "full", "exact", "threshold") for k in (60, 90)]
    spec = failing(where)
    branches = [good[0], Branch(spec, 60), *good[1:], Branch(spec, 90)]
    results = decode(loaded, prefix, branches, 6)
    expected = decode(loaded, prefix, good, 6)
    broken = [result for result in results if result.branch.spec == spec]
    assert [result for result in results if result.branch.spec != spec] == expected
    assert [result.finish for result in broken] == ["error", "error"]
    assert all(f"RuntimeError: no {where}" in (result.error or "") for result in broken)
    assert all(result.token_ids == () for result in broken)


@pytest.mark.parametrize("where", HOOKS)
def test_a_method_that_ends_the_process_ends_its_own_branches_only_and_an_interrupt_ends_all(
    where: str, tiny: tuple[LoadedModel, Prefix]
) -> None:
    loaded, prefix = tiny
    good, spec = Branch(parse_method("sparq"), 60), failing(where, SystemExit)
    [expected] = decode(loaded, prefix, [good], 3)
    result, broken = decode(loaded, prefix, [good, Branch(spec, 60)], 3)
    assert result == expected
    assert (broken.finish, broken.token_ids) == ("error", ())
    assert f"SystemExit: no {where}" in (broken.error or "")
    records = measured(good.spec, spec)
    assert records["sparq"]["finish"] == "complete"
    # Where in the method's own code, by the file's name alone.
    assert re.fullmatch(rf"layer 0: SystemExit: no {where} \(test_extended_failures\.py, line \d+\)", records[f"failing_{where}"]["error"])
    with pytest.raises(KeyboardInterrupt):
        decode(loaded, prefix, [good, Branch(failing(where, KeyboardInterrupt), 60)], 3)
    with pytest.raises(KeyboardInterrupt):
        measured(failing(where, KeyboardInterrupt))


def measured(*specs: MethodSpec) -> dict[str, dict[str, Any]]:
    """Records of a window of a tiny model, by name."""
    loaded = tiny_model("llama", layers=2, query_heads=4, kv_heads=2, head_dim=16)
    windows = FixedWindows(token_ids(loaded, 250))
    unit = Unit(250, 0, tuple(Branch(spec, 60) for spec in specs))
    [records] = evaluate(loaded, windows, [unit], positions=3, full_window=False)
    return {record["method"]: record for record in records}


@dataclass(frozen=True)
class Unordered(Toy):
    """Ranks one token of one row of the second layer by what is not a number: ``at`` counts from the last token."""

    name: ClassVar[str] = "unordered"
    at: int = 100

    def rank(self, scores: Tensor, step: Step) -> Tensor:
        scores = scores.clone()
        if step.layer == 1:
            scores[-1, 0, 0, -self.at] = torch.nan
        return scores


@dataclass(frozen=True)
class Remembering(Unordered):
    """The same of a method with memory, whose positions are computed one by one."""

    name: ClassVar[str] = "remembering"

    def learn(self, attended: Tensor, weights: Tensor, step: Step) -> None:
        step.state["seen"] = True


@pytest.mark.parametrize("kind", [Unordered, Remembering])
@pytest.mark.parametrize("policy", [{}, {"share": "group_sum"}, {"rerank": 2.0}])
def test_a_rank_that_is_not_a_number_fails_its_own_branch_and_is_allowed_where_nothing_competes(
    kind: type[Unordered], policy: dict[str, Any], tiny: tuple[LoadedModel, Prefix]
) -> None:
    loaded, prefix = tiny
    good, spec, kept = parse_method("sparq"), toy(kind(), **policy), toy(kind(at=1), **policy)
    [expected] = decode(loaded, prefix, [Branch(good, 60)], 3)
    result, broken, well = decode(loaded, prefix, [Branch(one, 60) for one in (good, spec, kept)], 3)
    assert result == expected
    assert (broken.finish, broken.token_ids) == ("error", ())
    assert broken.error == f"layer 1: {spec.label} gives scores that are not numbers"
    assert (well.finish, well.error) == ("length", None)
    records = measured(good, spec)
    assert records["sparq"]["finish"] == "complete"
    assert records[spec.method.name]["error"].startswith("layer 1: scores that are not a number")
    assert measured(kept)[spec.method.name]["finish"] == "complete"


def test_a_store_that_fails_ends_all_that_scan_it(tiny: tuple[LoadedModel, Prefix]) -> None:
    loaded, prefix = tiny

    @dataclass(frozen=True)
    class BrokenSpec(StoreSpec):
        def build(self, layer: PrefixLayer, tokens: int) -> Any:
            raise ValueError("cannot be built")

    @dataclass(frozen=True)
    class Broken(Toy):
        def store(self, facts: ModelFacts) -> StoreSpec | None:
            return BrokenSpec()

    good, bad = Branch(parse_method("sparq"), 60), [Branch(toy(Broken()), 60), Branch(toy(Broken()), 90)]
    [expected] = decode(loaded, prefix, [good], 6)
    first, second, result = decode(loaded, prefix, [*bad, good], 6)
    assert result == expected
    assert first.error == second.error
    assert re.fullmatch(r"layer 0: ValueError: cannot be built \(test_extended_failures\.py, line \d+\)", first.error or "")


@pytest.mark.parametrize(
    ("reads", "message"),
    [
        (lambda reads, store: dataclasses.replace(reads, tokens=3), "reads of 3 of 192 tokens"),
        (lambda reads, store: dataclasses.replace(reads, tokens=192, code_bits=reads.code_bits - 5), "less than nothing"),
        (
            lambda reads, store: dataclasses.replace(reads, tokens=192, code_bits=reads.code_bits + 192),
            "declares 0 bits per token and reads 1",
        ),
    ],
)
def test_reads_that_cannot_be_are_recorded(reads: Any, message: str, tiny: tuple[LoadedModel, Prefix]) -> None:
    loaded, prefix = tiny

    class Lying(Keys):
        def scan(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> tuple[Tensor, Any]:
            scores, honest = super().scan(query, projected, plan)
            return scores, reads(honest, self)

    @dataclass(frozen=True)
    class LyingSpec(StoreSpec):
        which: str

        def build(self, layer: PrefixLayer, tokens: int) -> Any:
            return Lying(layer.keys[:, :tokens], layer.values[:, :tokens])

    @dataclass(frozen=True)
    class Liar(Toy):
        def store(self, facts: ModelFacts) -> StoreSpec | None:
            return LyingSpec(message)

    bad, good = decode(loaded, prefix, [Branch(toy(Liar()), 60), Branch(parse_method("sparq"), 60)], 3)
    assert bad.finish == "error"
    assert message in (bad.error or "")
    assert good.finish == "length"


def test_a_plan_of_another_form_does_not_reach_the_others(tiny: tuple[LoadedModel, Prefix]) -> None:
    loaded, prefix = tiny

    class Narrow(SparQ):
        name: ClassVar[str] = "narrow"

        def plan(self, query: Tensor, index: Any) -> Tensor | None:
            return torch.zeros(*query.shape[:2], 3, dtype=torch.int64)

    class Absent(SparQ):
        name: ClassVar[str] = "absent"

        def plan(self, query: Tensor, index: Any) -> Tensor | None:
            return None

    good = Branch(parse_method("sparq"), 60)
    result, *bad = decode(loaded, prefix, [good, Branch(toy(Narrow()), 60), Branch(toy(Absent()), 60)], 3)
    assert [result] == decode(loaded, prefix, [good], 3)
    assert [one.error for one in bad] == ["layer 0: ValueError: its plan is not of the form that its store needs"] * 2


def test_a_lack_of_memory_is_left_to_smaller_batches(tiny: tuple[LoadedModel, Prefix]) -> None:
    loaded, prefix = tiny
    with pytest.raises(torch.OutOfMemoryError):
        decode(loaded, prefix, [Branch(failing("plan", torch.OutOfMemoryError), 60)], 2)


def test_a_lack_of_memory_in_one_methods_scan_leaves_the_others_of_a_window() -> None:
    spec, failures = failing("plan", torch.OutOfMemoryError), dict[MethodSpec, str]()
    branches = [Branch(spec, 60), Branch(parse_method("sparq"), 60)]
    found = {
        branch for _, branch, _ in LayerComparison(structured_layer(), 0, branches, FACTS, full_window=False, failures=failures).outcomes()
    }
    assert found == {branches[1]}
    assert failures == {spec: "layer 0: out of memory: no plan"}
