"""Calibrations on the disk: statistics and per-layer plans of one model, as one safetensors file that says where they come from.

A method names one as ``statistics=NAME`` or ``layer_plan=NAME``; once read, it goes by ``NAME@HASH``, with the hash of its content, in
labels and records. So two files of one name are never confused, and ``NAME@HASH`` asks for exactly that content.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from fathom_eval.calibration import Basis, FixedKeyStatistics, FixedQueryStatistics, LayerStatistics
from fathom_eval.calibration_names import SESSION as SESSION
from fathom_eval.calibration_names import SUFFIX, calibration_path, stored_names
from fathom_eval.errors import UserError, did_you_mean
from fathom_eval.gguf_models import one_line
from fathom_eval.run import canonical_json
from fathom_eval.run_files import check_free_space, raise_file_error, write_atomically

if TYPE_CHECKING:
    from fathom_eval.methods.base import Method
    from fathom_eval.models import ModelFacts
    from fathom_eval.prefill import PrefixLayer

SCHEMA = 1
# All metadata are one entry: safetensors keeps no order of several, and the same calibration must give the same file.
_METADATA = "fathom_eval_calibration"
_HASH_DIGITS = 12
_CONTEXT_FACTOR = 2
_STATISTICS = ("key_mean", "key_mean_magnitude", "key_variance", "basis_variance", "query_mean_magnitude")
_MATRICES = ("basis_vectors", "query_second_moment")


@dataclass(frozen=True)
class PlanSettings:
    """How per-layer budgets were found (paper §3.4), all of them in code bits for a head_dim of 128.

    Attributes:
        basis: Of the store, ``raw`` or ``klt``.
        context, k, positions: Of the window of text that errors were measured on, with statistics of its own keys.
        means: Mean budgets that there is a plan for.
        text_sha256: Of the window's tokens.
    """

    basis: str
    context: int
    k: int
    positions: int
    means: tuple[int, ...]
    text_sha256: str


@dataclass(frozen=True)
class Provenance:
    """Where a calibration comes from.

    Attributes:
        model: What it was called.
        rope: Rotary embedding of the model, as its configuration has it.
        text: Name of the text.
        text_sha256: Of the whole text, or of the trajectories that were used.
        repositories: Those that the trajectories worked on.
        tokens: That statistics were taken from, in windows of ``context``.
        version: Of the program.
    """

    model: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    rope: dict[str, Any]
    text: str
    text_sha256: str
    repositories: tuple[str, ...]
    tokens: int
    context: int
    version: str
    plan: PlanSettings | None = None


@dataclass(frozen=True)
class Calibration:
    """A calibration that has been read.

    Attributes:
        path: Its file.
        sha256: Of its content.
        tensors: Statistics stacked over layers, ``[L, H, …]``, and plans ``[L]``.
        text: What a reader knows its text by; not part of the content.
    """

    path: Path
    sha256: str
    provenance: Provenance
    tensors: Mapping[str, Tensor]
    text: str = ""
    _layers: dict[tuple[int, torch.device], LayerStatistics] = field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        """Of its file, without the suffix."""
        return self.path.stem

    @property
    def reference(self) -> Reference:
        """Name and content: what records and labels show."""
        return Reference(f"{self.name}@{self.sha256[:_HASH_DIGITS]}", self.path)

    def layer(self, number: int, device: torch.device) -> LayerStatistics:
        """Statistics of a layer on a device."""
        if (number, device) not in self._layers:
            part = {name: self.tensors[name][number].to(device) for name in (*_STATISTICS, *_MATRICES)}
            basis = Basis(part["key_mean"], part["basis_vectors"], part["basis_variance"])
            self._layers[number, device] = LayerStatistics(
                FixedKeyStatistics(part["key_mean"], part["key_mean_magnitude"], part["key_variance"], basis),
                FixedQueryStatistics(part["query_mean_magnitude"], part["query_second_moment"]),
            )
        return self._layers[number, device]

    @functools.cached_property
    def plans(self) -> dict[int, tuple[int, ...]]:
        """The budget of every layer, by the mean."""
        settings = self.provenance.plan
        return {mean: tuple(self.tensors[f"plan_{mean}"].tolist()) for mean in settings.means} if settings else {}

    def check(self, facts: ModelFacts, label: str) -> None:
        """Raise :class:`UserError` unless it was made for this model; ``label`` names the option that asks for it."""
        made = self.provenance
        for what, theirs, ours in (
            ("KV heads", made.kv_heads, facts.kv_heads),
            ("channels a head", made.head_dim, facts.head_dim),
            ("layers", made.layers, facts.layers),
        ):
            if theirs != ours:
                raise UserError(f"{label}: {self.name} was made for {made.model} with {theirs} {what}; {facts.name} has {ours}")
        if made.dtype != facts.dtype:
            raise UserError(
                f"{label}: {self.name} was made in {made.dtype}, the model runs in {facts.dtype}: "
                f"give --dtype {made.dtype}, or calibrate again"
            )
        if made.model_fingerprint != facts.model_fingerprint:
            rope = ", ".join(f"{key}={value}" for key, value in sorted(made.rope.items()) if value is not None)
            raise UserError(
                f"{label}: {self.name} was made for {made.model} ({rope or 'no rotary embedding'}; fingerprint {made.model_fingerprint}), "
                f"which is not {facts.name} as it is loaded now ({facts.model_fingerprint})"
            )


def save_calibration(path: Path, tensors: Mapping[str, Tensor], provenance: Provenance, *, text: str = "") -> Calibration:
    """Write a calibration; the same content gives the same bytes.

    Args:
        text: What a reader knows its text by, as the name of a file; the hash of the content leaves it out.

    Raises:
        UserError: The place cannot be written.
    """
    from safetensors.torch import save

    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    sha256 = _digest(held, asdict(provenance))
    header = {"schema": SCHEMA, "sha256": sha256, "provenance": asdict(provenance)}
    metadata = {_METADATA: canonical_json({**header, "text": text} if text else header)}
    content = save(held, metadata=metadata)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_free_space(path, len(content))
        write_atomically(path, content)
    except OSError as error:
        raise_file_error(path, "write", error)
    return Calibration(path.absolute(), sha256, provenance, held, text or provenance.text)


def load_calibration(path: Path) -> Calibration:
    """Read a calibration and check that it is whole.

    Raises:
        UserError: The file is absent, cut short, damaged, of a newer version, or something else than a calibration.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            metadata = (opened.metadata() or {}).get(_METADATA)
            if metadata is None:
                raise UserError(f"{path} is a safetensors file, but none that 'fathom-eval calibrate' wrote")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    except SafetensorError as error:
        raise UserError(f"{path} is no whole safetensors file: {one_line(error)}") from None
    except OSError as error:
        raise_file_error(path, "read", error)
    try:
        header = json.loads(metadata)
        schema, sha256 = int(header["schema"]), str(header["sha256"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UserError(f"{path} is damaged: what it says of itself cannot be read") from None
    if schema > SCHEMA:
        raise UserError(f"{path} was written by a newer fathom-eval (schema {schema}; this version reads up to {SCHEMA}): upgrade it")
    if _digest(tensors, header.get("provenance")) != sha256:
        raise UserError(f"{path} is damaged: its content is not what its checksum says; calibrate again")
    try:
        provenance = _provenance(header["provenance"])
        _check_shapes(tensors, provenance)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is no usable calibration: {one_line(error)}") from None
    return Calibration(path.absolute(), sha256, provenance, tensors, str(header.get("text") or provenance.text))


class Reference(str):
    """``NAME@HASH`` of a calibration, which also knows its file, so that a method sent to another process finds it there."""

    path: Path

    def __new__(cls, text: str, path: Path) -> Self:
        """A reference to the calibration in a file."""
        made = super().__new__(cls, text)
        made.path = path
        return made

    def __reduce__(self) -> tuple[type[Reference], tuple[str, Path]]:
        """Text and path."""
        return Reference, (str(self), self.path)


_READ: dict[str, Calibration] = {}
"""Calibrations that methods of this process name, by their reference."""


def resolve(text: str, option: str, *, session: bool = True) -> str:
    """The reference of a calibration that is named, by path or name; it is read now, so that what is wrong with it is told first.

    ``session`` and references that were resolved before stay as they are.

    Args:
        option: What names it, for messages.
        session: Whether ``session`` may stand for a prefix's own.

    Raises:
        UserError: There is none, it cannot be read, or its content is not the one asked for.
    """
    if text == SESSION and session:
        return text
    if text not in _READ:
        calibration = _find(text, option)
        text = calibration.reference
        _READ[text] = calibration
    return _READ[text].reference


def _find(text: str, option: str) -> Calibration:
    """Read a calibration by path, name or ``NAME@HASH``."""
    if "/" in text or text.endswith(SUFFIX):
        path = Path(text).expanduser()
        if not path.is_file():
            raise UserError(f"{option}: there is no file '{text}'")
        return _load_once(path)
    name, _, content = text.partition("@")
    path = calibration_path(name)
    if not path.is_file():
        names = stored_names()
        known = did_you_mean(name, names) if names else "there is none yet"
        raise UserError(f"{option}: no calibration is called '{name}' ({known}); make it with 'fathom-eval calibrate --name {name}'")
    calibration = _load_once(path)
    if content and not calibration.sha256.startswith(content):
        raise UserError(f"{option}: {path} holds {calibration.reference}, not {text}")
    return calibration


def calibration_of(reference: str) -> Calibration:
    """The calibration of a reference that :func:`resolve` gave, here or in the process that this one works for.

    Raises:
        UserError: The file is not there any more, or holds something else by now.
    """
    if reference not in _READ:
        assert isinstance(reference, Reference), f"{reference} was never resolved"
        calibration = _load_once(reference.path)
        if calibration.reference != reference:
            raise UserError(f"{reference.path} holds {calibration.reference} by now, not {reference}")
        _READ[reference] = calibration
    return _READ[reference]


def statistics_of(reference: str, layer: PrefixLayer) -> PrefixLayer | LayerStatistics:
    """Where a method takes a layer's statistics from: the prefix layer itself, or a calibration's layer of the same number."""
    return layer if reference == SESSION else calibration_of(reference).layer(layer.number, layer.keys.device)


def calibration_warnings(
    methods: Iterable[Method], contexts: Sequence[int], *, text_sha256: str | None = None, repositories: Iterable[str] = ()
) -> list[str]:
    """What a reader of the results should know of the calibrations that methods use, one line each.

    Args:
        contexts: Lengths that are evaluated.
        text_sha256: Of the text that is evaluated.
        repositories: Of the sessions that are evaluated.
    """
    lines: dict[str, None] = {}
    evaluated = set(repositories)
    for method in methods:
        for option in fields(method):
            value = getattr(method, option.name)
            if not isinstance(value, Reference):
                continue
            made = calibration_of(value).provenance
            length = made.plan.context if option.name == "layer_plan" and made.plan else made.context
            far = [context for context in contexts if max(context, length) >= _CONTEXT_FACTOR * min(context, length)]
            if far:
                lines[f"{option.name}={value} was made at {length:,} tokens and is used at {', '.join(f'{n:,}' for n in far)}"] = None
            if text_sha256 == made.text_sha256:
                lines[f"{option.name}={value} was made on the text that is evaluated: its errors are not those of unseen text"] = None
            if shared := sorted(evaluated.intersection(made.repositories)):
                names = ", ".join(shared[:3]) + (", …" if len(shared) > 3 else "")
                lines[f"{option.name}={value} was made on transcripts of repositories that are evaluated: {names}"] = None
    return list(lines)


def _load_once(path: Path) -> Calibration:
    try:
        found = path.stat()
    except OSError as error:
        raise_file_error(path, "read", error)
    return _load(path.absolute(), (found.st_ino, found.st_size, found.st_mtime_ns))


@functools.lru_cache(maxsize=8)
def _load(path: Path, stamp: tuple[int, ...]) -> Calibration:
    return load_calibration(path)


def _digest(tensors: Mapping[str, Tensor], provenance: object) -> str:
    digest = hashlib.sha256(json.dumps(provenance, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _provenance(found: dict[str, Any]) -> Provenance:
    plan = found.get("plan")
    settings = PlanSettings(**{**plan, "means": tuple(int(mean) for mean in plan["means"])}) if plan else None
    return Provenance(**{**found, "repositories": tuple(found["repositories"]), "plan": settings})


def _check_shapes(tensors: Mapping[str, Tensor], made: Provenance) -> None:
    vectors = (made.layers, made.kv_heads, made.head_dim)
    expected: dict[str, tuple[int, ...]] = dict.fromkeys(_STATISTICS, vectors)
    expected |= dict.fromkeys(_MATRICES, (*vectors, made.head_dim))
    for name, shape in expected.items():
        tensor = tensors[name]
        if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not float32 {shape}")
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} holds values that are not finite")
    for mean in made.plan.means if made.plan else ():
        plan = tensors[f"plan_{mean}"]
        if plan.dtype != torch.int64 or tuple(plan.shape) != (made.layers,) or not (plan > 0).all():
            raise ValueError(f"plan_{mean} does not give every layer a budget")
