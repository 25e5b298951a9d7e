"""Methods that read from a calibration: its model, its statistics, plans of a budget for each layer, and warnings."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from fathom_eval.branches import Branch, BranchBatch
from fathom_eval.calibration_file import calibration_warnings, statistics_of
from fathom_eval.errors import UserError
from fathom_eval.fidelity_capture import capture
from fathom_eval.fidelity_layer import LayerComparison
from fathom_eval.layer_plan import BUDGETS, greedy_plan, layer_errors
from fathom_eval.methods import MethodSpec, parse_method
from fathom_eval.methods.fathom import Fathom
from fathom_eval.models import LoadedModel
from fathom_eval.prefill import prefill
from fathom_eval.selection import Policy
from tests.calibration.made import METHODS, PLAN, calibrate


@pytest.mark.parametrize("text", [*METHODS, "fathom:layer_plan={}", "uniform_depth:statistics={}"])
def test_another_model_dtype_or_shape_is_refused_before_any_work(tiny: LoadedModel, window: list[int], text: str) -> None:
    calibrate(tiny, window, plan=PLAN)
    spec = parse_method(text.format("prose"))
    spec.check(tiny.facts, [64])
    for change, message in (
        ({"kv_heads": 4}, "was made for tiny-llama with 2 KV heads; tiny-llama has 4"),
        ({"head_dim": 32}, "16 channels a head"),
        ({"layers": 3}, "2 layers"),
        ({"dtype": "bfloat16"}, "made in float32, the model runs in bfloat16: give --dtype float32"),
        ({"model_fingerprint": "other"}, "which is not tiny-llama as it is loaded now"),
    ):
        with pytest.raises(UserError, match=message):
            spec.check(dataclasses.replace(tiny.facts, **change), [64])


def outputs(tiny: LoadedModel, tokens: list[int], texts: list[str]) -> Tensor:
    prefix = prefill(tiny, tokens)
    batch = BranchBatch(prefix, [Branch(parse_method(text), 60) for text in texts], tiny.facts)
    generator = torch.Generator().manual_seed(1)
    query, keys, values = (torch.randn(2, *shape, generator=generator) for shape in ((2, 2, 16), (2, 1, 16), (2, 1, 16)))
    rows = len(texts)
    return torch.stack(
        [
            batch.attend(
                layer,
                query[layer].expand(rows, -1, -1, -1),
                keys[layer].expand(rows, -1, -1, -1),
                values[layer].expand(rows, -1, -1, -1),
                0.25,
            )
            for layer in range(2)
        ]
    )


@pytest.mark.parametrize("text", METHODS)
def test_session_statistics_are_those_calibrated_on_the_same_keys(tiny: LoadedModel, window: list[int], text: str) -> None:
    calibrate(tiny, window)
    calibrate(tiny, list(reversed(window)), "other")
    # The prompt's last token is not in the prefix.
    session, same, other = outputs(tiny, [*window, 5], [text.format(name) for name in ("session", "prose", "other")]).unbind(1)
    torch.testing.assert_close(same, session, rtol=1e-4, atol=1e-5)
    if "klt" in text or text.startswith("fathom"):
        assert not torch.allclose(other, session, rtol=1e-4, atol=1e-5)


def test_every_layer_gets_its_own_statistics(tiny: LoadedModel, window: list[int]) -> None:
    calibrate(tiny, window)
    reference = parse_method("loki:statistics=prose").method.statistics  # type: ignore[attr-defined]
    for layer in prefill(tiny, [*window, 5]).layers:
        found = statistics_of(reference, layer)
        torch.testing.assert_close(found.key_statistics.mean, layer.key_statistics.mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.query_statistics.second_moment, layer.query_statistics.second_moment, rtol=1e-3, atol=1e-4)
        assert statistics_of("session", layer) is layer


def test_a_plan_gives_every_layer_its_budget(tiny: LoadedModel, window: list[int]) -> None:
    calibrate(tiny, window, plan=PLAN)
    spec = parse_method("fathom:layer_plan=prose:budget=64")
    spec.check(tiny.facts, [60])
    prefix = prefill(tiny, [*window, 5])
    assert [spec.method.index(layer, tiny.facts)[1] for layer in prefix.layers] == [5, 11]  # 40 and 88 of 128 channels, for 16
    assert parse_method("fathom:layer_plan=prose:budget=48").options["layer_plan"] == spec.options["layer_plan"]
    with pytest.raises(UserError, match="holds plans of mean 48, 64, not of budget=80"):
        parse_method("fathom:layer_plan=prose:budget=80").check(tiny.facts, [60])
    with pytest.raises(UserError, match="was made for basis=klt"):
        parse_method("fathom:layer_plan=prose:basis=raw").check(tiny.facts, [60])
    calibrate(tiny, window, "none")
    with pytest.raises(UserError, match="holds no per-layer plan; make one with 'fathom-eval calibrate --plan 48'"):
        parse_method("fathom:layer_plan=none").check(tiny.facts, [60])


def test_a_fidelity_run_reads_by_the_plan(tiny: LoadedModel, window: list[int]) -> None:
    calibrate(tiny, window, plan=PLAN)
    branch = Branch(parse_method("fathom:layer_plan=prose:budget=64"), 60)
    for number, layer in enumerate(capture(tiny, window, 4)):
        comparison = LayerComparison(layer, number, [branch], tiny.facts, full_window=False, failures={})
        for _, _, outcome in comparison.outcomes():
            assert outcome.scan is not None
            reads = outcome.scan.reads
            assert reads is not None
            assert (reads.code_bits == (5, 11)[number] * reads.tokens).all()


def test_the_greedy_rule_on_a_table_made_by_hand() -> None:
    assert BUDGETS == (24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128)
    flat = [0.0] * len(BUDGETS)
    steep = [10.0, 6.0, 3.0, 1.0, *flat[4:]]  # drops of 4, 3, 2, 1
    gentle = [5.0, 3.5, 3.4, *flat[3:]]  # drops of 1.5, 0.1, 3.4
    assert greedy_plan([gentle, steep, flat], 24) == (24, 24, 24)
    assert greedy_plan([gentle, steep, flat], 40) == (40, 56, 24)  # 4, 3, 2, 1.5, 1, 0.1
    assert greedy_plan([gentle, steep, flat], 48) == (64, 56, 24)  # then 3.4, and of many ties at 0 the lower layer
    assert greedy_plan([flat, flat], 28) == (32, 24)
    assert greedy_plan([flat, flat], 128) == (128, 128)
    assert greedy_plan([gentle, steep], 31) == (24, 32)  # half a step more would not fit


def test_errors_of_layers_fall_with_their_budget(tiny: LoadedModel, window: list[int]) -> None:
    errors = layer_errors(tiny, window, basis="klt", k=60, positions=8)
    assert [len(row) for row in errors] == [len(BUDGETS)] * 2
    for row in errors:
        assert row[0] > row[-1] >= 0
        assert row[0] < 2
    # Against exact top-k, not against dense attention.
    least, specs = MethodSpec(Fathom(budget=BUDGETS[0], basis="klt"), Policy()), dict[MethodSpec, str]()
    comparison = LayerComparison(capture(tiny, window, 8)[1], 1, [Branch(least, 60)], tiny.facts, full_window=False, failures=specs)
    found = torch.cat([outcome.exact_error for _, _, outcome in comparison.outcomes()])
    assert errors[1][0] == pytest.approx(found.mean().item(), rel=1e-5)


def test_warnings_name_what_a_reader_should_know(tiny: LoadedModel, window: list[int]) -> None:
    made = calibrate(tiny, window, repositories=("a/b",), plan=dataclasses.replace(PLAN, context=4000))
    methods = [parse_method(text).method for text in ("sparq", "fathom:statistics=prose", "fathom:layer_plan=prose")]
    statistics, plan = f"statistics={made.reference} was made ", f"layer_plan={made.reference} was made "
    assert calibration_warnings(methods[:2], [300, 599], text_sha256="1" * 64, repositories=["c/d"]) == []
    assert calibration_warnings(methods[:2], [300, 600, 150]) == [f"{statistics}at 300 tokens and is used at 600, 150"]
    assert calibration_warnings(methods[2:], [4000]) == []
    assert calibration_warnings(methods, [300]) == [f"{plan}at 4,000 tokens and is used at 300"]
    assert calibration_warnings(methods[:2], [300], text_sha256="0" * 64) == [
        f"{statistics}on the text that is evaluated: its errors are not those of unseen text"
    ]
    [line] = calibration_warnings(methods[:2], [300], repositories=["a/b", "c/d"])
    assert line == f"{statistics}on transcripts of repositories that are evaluated: a/b"
