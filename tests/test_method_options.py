"""Options of methods: what is misspelt or cannot work, what is the default, and what a method says of itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fathom_eval.errors import UserError
from fathom_eval.methods import MethodSpec, parse_method, parse_methods, registry
from fathom_eval.planes import PlaneSpec
from fathom_eval.selection import Policy
from tests.method_matrix import facts_of


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fathm", "unknown method 'fathm'; did you mean 'fathom'"),
        ("sparq:rank=4", "has no option 'rank'; did you mean 'rerank'"),
        ("sparq:r", "'r' is not option=value"),
        ("sparq:r=4:r=8", "twice"),
        ("fathom:basis=pca", "'pca' is not one of auto, raw, klt"),
        ("fathom:budget=many", "'many' is not a whole number"),
        ("sparq:per_head=yes", "'yes' is not true or false"),
        ("sparq:dense_layers=0+x", "'x' is not a whole number"),
    ],
)
def test_misspelt_methods_and_options_are_errors(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_method(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fathom:budget=0", "budget=0 must lie in 1..512"),
        ("sparq:r=D/7", "head_dim 64 is not a multiple of 7"),
        ("sparq:r=65", "must lie in 1..64"),
        ("loki:r=0", "must lie in 1..64"),
        ("double_sparsity:c=D/0", "not a number of channels"),
        ("thumbnail:depth=5", "depth=5 must lie in 1..4"),
        ("landmark:size=6", "size=6 must divide 64"),
        ("sparq:dense_layers=0+1", "dense layer 1 is not in 0..0"),
        ("sparq:sink=64:local=64", "k=128 leaves nothing to select"),
    ],
)
def test_options_that_cannot_work_are_errors_before_any_prefill(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_method(text).check(facts_of(3, 64), [128])


def test_budgets_scale_with_head_dim() -> None:
    fathom: Any = parse_method("fathom:budget=48").method
    assert [fathom.code_bits(head_dim) for head_dim in (64, 96, 128, 256)] == [24, 36, 48, 96]


def test_options_that_are_the_default_do_not_change_a_methods_identity() -> None:
    assert parse_method("sparq:r=D/8") == parse_method("sparq")
    assert parse_method("sparq:r=D/8").options == {}
    assert parse_method("sparq:r=D/4:rerank=2:dense_layers=0+1").options == {"r": "D/4", "rerank": 2.0, "dense_layers": [0, 1]}
    assert parse_methods("exact,paper,exact").count(MethodSpec(parse_method("exact").method, Policy())) == 1


def test_auto_basis_is_raw_with_qk_norm_and_klt_without() -> None:
    plain = facts_of(3, 64)
    assert parse_method("fathom").method.store(plain) == PlaneSpec("klt")
    assert parse_method("fathom").method.store(dataclasses.replace(plain, qk_norm=True)) == PlaneSpec("raw")


def test_every_method_says_what_it_is() -> None:
    for name, kind in registry().items():
        assert kind.name == name
        assert kind.source
        assert kind.family
        assert kind.__doc__
        assert kind().typical_bits(128)
