"""Calibrations: streamed statistics, the file and its refusals, methods that read from one, per-layer plans, and the command."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fathom_eval.calibration_file as files
from fathom_eval import cli
from fathom_eval.branches import Branch, BranchBatch
from fathom_eval.calibrate import TokenSource, describe, measure_statistics, text_source, trajectory_source
from fathom_eval.calibration import KeyMoments, KeyStatistics, QueryStatistics
from fathom_eval.calibration_file import (
    Calibration,
    PlanSettings,
    Reference,
    calibration_of,
    calibration_path,
    calibration_warnings,
    load_calibration,
    save_calibration,
    statistics_of,
)
from fathom_eval.errors import UserError
from fathom_eval.fidelity_capture import capture
from fathom_eval.fidelity_layer import LayerComparison
from fathom_eval.layer_plan import BUDGETS, greedy_plan, layer_errors
from fathom_eval.methods import MethodSpec, parse_method
from fathom_eval.methods.fathom import Fathom
from fathom_eval.models import LoadedModel
from fathom_eval.prefill import prefill
from fathom_eval.run import Run
from fathom_eval.selection import Policy
from fathom_eval.sessions import builtin
from fathom_eval.tasks.haystack import Haystack
from tests.tiny import save_tiny, tiny_model


def prose(words: int) -> Haystack:
    return Haystack.of("file", "prose.txt", [f" The boat number {word} left the old harbour." for word in range(words)])


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FATHOM_EVAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_READ", {})


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return tiny_model(layers=2, query_heads=4, kv_heads=2, head_dim=16)


@pytest.fixture(scope="module")
def window(tiny: LoadedModel) -> list[int]:
    return text_source(tiny.tokenizer, prose(100)).windows([300])[0]


def calibrate(tiny: LoadedModel, window: list[int], name: str = "prose", **changes: Any) -> Calibration:
    source = TokenSource("prose.txt", "0" * 64, window, ())
    provenance = dataclasses.replace(describe(tiny, source, tokens=len(window), context=len(window)), **changes)
    tensors = measure_statistics(tiny, [window], chunk=128)
    if provenance.plan is not None:
        for mean in provenance.plan.means:
            tensors[f"plan_{mean}"] = torch.tensor([mean - 24, mean + 24])
    return save_calibration(calibration_path(name), tensors, provenance)


PLAN = PlanSettings("klt", 300, 64, 8, (48, 64), "0" * 64)


@pytest.mark.parametrize("lengths", [(300,), (1, 1, 298), (64, 0, 200, 36)])
def test_streamed_statistics_equal_those_of_all_keys_at_once(lengths: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    # An offset a thousand times the spread: sums of squares would lose it.
    keys = 0.1 * torch.randn(2, 300, 8, generator=generator) + 100
    queries = torch.randn(2, 3, 300, 8, generator=generator)
    moments, of_queries = KeyMoments(), QueryStatistics(torch.float64)
    for part, query in zip(keys.split(lengths, 1), queries.split(lengths, 2), strict=True):
        moments.add(part, chunk=50)
        of_queries.add(query)
    exact, found = keys.double(), moments.statistics()
    covariance = torch.stack([head.T.cov() for head in exact])
    torch.testing.assert_close(found.mean, exact.mean(1).float())
    torch.testing.assert_close(found.mean_magnitude, exact.abs().mean(1).float())
    torch.testing.assert_close(found.variance, covariance.diagonal(dim1=-2, dim2=-1).float(), rtol=1e-6, atol=0)
    rebuilt = found.basis.vectors.double() @ torch.diag_embed(found.basis.variance.double()) @ found.basis.vectors.double().mT
    torch.testing.assert_close(rebuilt, covariance, rtol=1e-4, atol=1e-8)
    whole = KeyStatistics(keys).basis
    torch.testing.assert_close(found.basis.variance, whole.variance, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.basis.vectors, whole.vectors, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(of_queries.mean_magnitude, queries.double().abs().mean((1, 2)))
    pooled = queries.double().flatten(1, 2)
    torch.testing.assert_close(of_queries.second_moment, pooled.mT @ pooled / 900)
    with pytest.raises(ValueError, match="at least two keys"):
        KeyMoments().statistics()


def test_a_file_comes_back_as_it_was_and_the_same_content_gives_the_same_bytes(tiny: LoadedModel, window: list[int]) -> None:
    saved, again = calibrate(tiny, window, plan=PLAN), calibrate(tiny, window, "again", plan=PLAN)
    found = load_calibration(saved.path)
    assert (found.name, found.sha256, found.provenance) == ("prose", saved.sha256, saved.provenance)
    assert found.tensors.keys() == saved.tensors.keys()
    assert all(torch.equal(found.tensors[name], saved.tensors[name]) for name in saved.tensors)
    assert found.plans == {48: (24, 72), 64: (40, 88)}
    assert saved.path.read_bytes() == again.path.read_bytes()
    assert found.provenance.model == "tiny-llama"
    assert (found.provenance.layers, found.provenance.kv_heads, found.provenance.head_dim) == (2, 2, 16)
    assert "rope_theta" in found.provenance.rope


def spoil_bytes(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def spoil_provenance(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'float32\\"', b'float16\\"'))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def foreign(path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, path)


def newer(path: Path) -> None:
    save_file(load_file(path), path, metadata={files._METADATA: json.dumps({"schema": 99, "sha256": "", "provenance": {}})})


def nameless(path: Path) -> None:
    save_file(load_file(path), path, metadata={files._METADATA: "[1"})


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({"key_mean": [1.0]}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_bytes, "is damaged: its content is not what its checksum says"),
        (spoil_provenance, "is damaged: its content is not what its checksum says"),
        (cut_short, "is no whole safetensors file"),
        (foreign, "none that 'fathom-eval calibrate' wrote"),
        (newer, "written by a newer fathom-eval"),
        (nameless, "what it says of itself cannot be read"),
        (pickled, "is no whole safetensors file"),
        (Path.unlink, "no calibration is called 'prose' "),
    ],
)
def test_a_file_that_is_not_what_it_was_is_refused_in_one_line(
    tiny: LoadedModel, window: list[int], spoil: Callable[[Path], None], message: str
) -> None:
    path = calibrate(tiny, window).path
    before = path.read_bytes()
    spoil(path)
    assert not path.exists() or path.read_bytes() != before
    with pytest.raises(UserError, match=message) as error:
        parse_method("fathom:statistics=prose")
    assert "\n" not in str(error.value)


def test_the_name_of_a_text_is_no_content(tiny: LoadedModel, window: list[int]) -> None:
    found = calibrate(tiny, window, "plain")
    named = save_calibration(calibration_path("named"), found.tensors, found.provenance, text="wiki.raw")
    assert named.sha256 == found.sha256
    assert load_calibration(named.path).text == "wiki.raw"
    assert load_calibration(found.path).text == found.provenance.text


def test_shapes_that_do_not_fit_are_refused(tiny: LoadedModel, window: list[int]) -> None:
    found = calibrate(tiny, window)
    save_calibration(found.path, {**found.tensors, "key_variance": found.tensors["key_variance"][:1]}, found.provenance)
    with pytest.raises(UserError, match=r"no usable calibration: key_variance is torch\.float32 \(1, 2, 16\)"):
        load_calibration(found.path)
    save_calibration(found.path, {**found.tensors, "key_mean": found.tensors["key_mean"] * torch.nan}, found.provenance)
    with pytest.raises(UserError, match="key_mean holds values that are not finite"):
        load_calibration(found.path)


METHODS = ("fathom:statistics={}", "fathom:basis=raw:statistics={}", "loki:statistics={}", "double_sparsity:statistics={}")


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


def test_another_file_of_the_same_name_is_another_method(tiny: LoadedModel, window: list[int]) -> None:
    first = calibrate(tiny, window)
    before = parse_method("fathom:statistics=prose")
    assert before == parse_method(f"fathom:statistics={first.path}") == parse_method(f"fathom:statistics={first.reference}")
    assert before.options == {"statistics": f"prose@{first.sha256[:12]}"}
    assert json.loads(json.dumps(before.options)) == before.options
    assert before.label.endswith(f"statistics=prose@{first.sha256[:12]}")
    second = calibrate(tiny, window[:200])
    after = parse_method("fathom:statistics=prose")
    assert after != before
    assert after.options == {"statistics": f"prose@{second.sha256[:12]}"}
    assert calibration_of(before.method.statistics).sha256 == first.sha256  # type: ignore[attr-defined]
    files._READ.clear()
    with pytest.raises(UserError, match=f"holds {second.reference}, not {first.reference}"):
        parse_method(f"fathom:statistics={first.reference}")


def test_a_method_that_is_sent_to_another_process_finds_its_file(
    tiny: LoadedModel, window: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = calibrate(tiny, window).path
    spec = parse_method(f"loki:statistics={path}")
    sent = pickle.dumps(spec)
    monkeypatch.setattr(files, "_READ", {})
    arrived = pickle.loads(sent)
    assert arrived == spec
    assert isinstance(arrived.method.statistics, Reference)
    arrived.check(tiny.facts, [64])
    calibrate(tiny, window[:200])
    monkeypatch.setattr(files, "_READ", {})
    with pytest.raises(UserError, match="by now, not prose@"):
        arrived.check(tiny.facts, [64])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fathom:statistics=proze", r"no calibration is called 'proze' \(did you mean 'prose'\?\); make it with"),
        ("fathom:statistics=no/such.safetensors", "there is no file 'no/such.safetensors'"),
        ("loki:statistics=a b", "'a b' cannot name a calibration"),
        ("fathom:layer_plan=session", "'session' cannot name a calibration"),
    ],
)
def test_names_that_lead_nowhere(tiny: LoadedModel, window: list[int], text: str, message: str) -> None:
    calibrate(tiny, window)
    with pytest.raises(UserError, match=message):
        parse_method(text)


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


def test_trajectories_of_chosen_repositories(tiny: LoadedModel) -> None:
    def source(**options: Any) -> TokenSource:
        return trajectory_source(tiny.tokenizer, str(builtin.PATH), 10**9, name="built-in", **options)

    whole = source()
    assert len(whole.repositories) == 3
    left = source(exclude=[whole.repositories[0]])
    assert left.repositories == whole.repositories[1:]
    only = source(repo=whole.repositories[0])
    assert only.repositories == whole.repositories[:1]
    assert len(only.ids) + len(left.ids) == len(whole.ids)
    assert len({whole.sha256, left.sha256, only.sha256}) == 3
    few = trajectory_source(tiny.tokenizer, str(builtin.PATH), 1, name="built-in")
    assert len(few.repositories) == 1
    three = trajectory_source(tiny.tokenizer, str(builtin.PATH), len(whole.ids) // 4, name="built-in")
    assert three.repositories == whole.repositories, "repositories take turns"
    assert len(three.ids) < len(whole.ids) // 2
    with pytest.raises(UserError, match="all are of repositories that were left out"):
        source(exclude=whole.repositories)


@pytest.fixture
def arguments(tmp_path: Path) -> Callable[..., list[str]]:
    model = save_tiny(tmp_path / "model", layers=2, query_heads=4, kv_heads=2, head_dim=16, max_positions=2048)
    text = tmp_path / "prose.txt"
    text.write_text(prose(150).text, encoding="utf-8")

    def build(*flags: str, **changes: Any) -> list[str]:
        options = {"model": model, "text": text, "tokens": 600, "context": 300, "name": "prose", **changes}
        given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
        return ["calibrate", "--offline", *given, *flags]

    return build


def test_the_command_saves_what_methods_take_by_name(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = {"plan": "48,64", "plan_context": 400, "plan_k": 64, "plan_positions": 8}
    assert cli.main(arguments("--json", **plan)) == 0
    document = json.loads(capsys.readouterr().out)
    made = document["provenance"]
    assert (made["tokens"], made["context"], made["text"], made["model"]) == (600, 300, "file", "model")
    assert made["plan"]["context"] == 400
    assert sum(document["plans"]["64"]) == 128
    assert str(tmp_path) not in json.dumps(made)

    assert cli.main(arguments()) == 2
    assert "exists: give another --name or --output, or --overwrite" in capsys.readouterr().err
    assert cli.main(arguments("--overwrite", **plan)) == 0
    assert load_calibration(calibration_path("prose")).sha256 == document["sha256"], "the same input gives the same content"
    assert cli.main(["calibrate", "--list"]) == 0
    shown = capsys.readouterr().out
    assert f"prose@{document['sha256'][:12]}" in shown
    assert "prose.txt" in shown, "a text is known by the name of its file"
    torn = calibration_path("torn")
    torn.write_bytes(calibration_path("prose").read_bytes()[:500])
    assert cli.main(["calibrate", "--list"]) == 0
    assert re.search(r"^torn +unreadable", capsys.readouterr().out, re.MULTILINE)
    assert cli.main(["calibrate", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed["calibrations"]] == ["prose"]
    assert [one["name"] for one in listed["unreadable"]] == ["torn"]
    torn.unlink()

    run = tmp_path / "run"
    methods = "fathom,fathom:statistics=prose,fathom:layer_plan=prose,loki:statistics=prose"
    fidelity = ["fidelity", "--offline", f"--model={tmp_path / 'model'}", f"--haystack={tmp_path / 'prose.txt'}", "--context=300", "--k=64"]
    assert cli.main([*fidelity, f"--methods={methods}", "--windows=1", "--positions=4", f"--output={run}"]) == 0
    error = capsys.readouterr().err
    assert "was made on the text that is evaluated" in error
    records = Run.load(run).records()
    assert all(record["finish"] == "complete" for record in records)
    assert len({record["error_dense"] for record in records}) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan": "20"}, "--plan 20 must lie in 24..128"),
        ({"plan": "48", "plan_k": 300}, "--plan-k 300 is no selection from 300 tokens"),
        ({"plan": "48", "plan_k": 30}, "must be above sink"),
        ({"plan": "48", "plan_positions": 200}, "must be at most half of the window"),
        ({"plan_basis": "kl"}, "did you mean 'klt'"),
        ({"tokens": 200}, "--tokens 200 is less than a window"),
        ({"name": "a:b"}, "'a:b' cannot name a calibration"),
        ({"name": None, "output": "x.pt"}, "must end in .safetensors"),
        ({"repo": "a/b"}, "go with --trajectories"),
        ({"trajectories": "builtin"}, "give one of them"),
        ({"tokens": 90000}, "tokens, 90,000 are needed|tokens, 89,"),
        ({"context": 4000, "tokens": 4000}, "exceeds the 2048 positions"),
    ],
)
def test_bad_arguments_are_told_in_one_line(
    arguments: Callable[..., list[str]], changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments("--quiet", **changes)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    import re

    assert re.search(message, error), error
