"""Calibration files: streamed statistics, what comes back, and what is refused of a file or of its name."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fathom_eval.calibration_file as files
from fathom_eval.calibration import KeyMoments, KeyStatistics, QueryStatistics
from fathom_eval.calibration_file import Reference, calibration_of, calibration_path, load_calibration, save_calibration
from fathom_eval.errors import UserError
from fathom_eval.methods import parse_method
from fathom_eval.models import LoadedModel
from tests.calibration.made import PLAN, calibrate


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
