"""The registry of methods, and how a method is named on a command line.

A method is ``name`` or ``name:option=value:option=value``; the options of :class:`~fathom_eval.selection.Policy` go with every
method: ``sparq:r=D/4:rerank=2``.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fathom_eval.errors import METHOD_ERRORS, UserError, did_you_mean
from fathom_eval.gguf_models import one_line
from fathom_eval.methods.base import Method
from fathom_eval.methods.controls import Dense, ExactTopK
from fathom_eval.methods.double_sparsity import DoubleSparsity, DoubleSparsityPublished
from fathom_eval.methods.fathom import Fathom
from fathom_eval.methods.h2o import H2O
from fathom_eval.methods.infinigen import InfiniGen, InfiniGenPublished, InfiniGenSkewed
from fathom_eval.methods.infllm import InfLLM, InfLLMPublished
from fathom_eval.methods.installed import installed_methods
from fathom_eval.methods.landmark import Landmark
from fathom_eval.methods.loki import Loki, LokiPublished
from fathom_eval.methods.magicpig import MagicPIG, MagicPIGPublished
from fathom_eval.methods.quantised import Kivi, KVQuant, TurboQuant
from fathom_eval.methods.quest import Quest, QuestPublished
from fathom_eval.methods.retrieval_attention import RetrievalAttention, RetrievalAttentionPublished
from fathom_eval.methods.retroinfer import RetroInfer, RetroInferPublished
from fathom_eval.methods.self_indexing import SelfIndexing
from fathom_eval.methods.shadowkv import ShadowKV
from fathom_eval.methods.sparq import SparQ, SparQPublished
from fathom_eval.methods.streaming_llm import StreamingLLM
from fathom_eval.methods.threshold import Threshold
from fathom_eval.methods.uniform import Full, Thumbnail
from fathom_eval.methods.uniform_depth import UniformDepth
from fathom_eval.observations import needed_observations
from fathom_eval.selection import Policy

if TYPE_CHECKING:
    from fathom_eval.models import ModelFacts

T = TypeVar("T")

BUILT_IN: tuple[type[Method], ...] = (
    Dense,
    ExactTopK,
    Fathom,
    UniformDepth,
    SparQ,
    SparQPublished,
    DoubleSparsity,
    DoubleSparsityPublished,
    Loki,
    LokiPublished,
    Thumbnail,
    Threshold,
    Full,
    Landmark,
    Quest,
    QuestPublished,
    ShadowKV,
    InfLLM,
    InfLLMPublished,
    RetroInfer,
    RetroInferPublished,
    StreamingLLM,
    H2O,
    MagicPIG,
    MagicPIGPublished,
    RetrievalAttention,
    RetrievalAttentionPublished,
    InfiniGen,
    InfiniGenSkewed,
    InfiniGenPublished,
    SelfIndexing,
    Kivi,
    TurboQuant,
    KVQuant,
)

PAPER = (
    "dense",
    "exact",
    "fathom:budget=48:basis=raw",
    "fathom:budget=48:basis=klt",
    "fathom:budget=64:basis=klt",
    "sparq:r=D/8",
    "sparq:r=D/4",
    "sparq:r=D/8:per_head=true",
    "double_sparsity:c=D/4",
    "loki:r=D/4",
    "loki:r=D/2",
    "thumbnail",
    "full",
    "landmark",
)
"""The scans of the paper's main tables, the default of every command (``--methods paper``)."""

EVERY = (
    *PAPER,
    "fathom:budget=40:basis=klt",
    "fathom:budget=80:basis=klt",
    "fathom:budget=128:basis=klt",
    "fathom:by_ratio=true:basis=klt",
    "fathom:budget=48:basis=klt:rerank=2",
    "fathom:budget=48:basis=klt:attend=union",
    "fathom:budget=56:basis=raw:depths=measured",
    "fathom:budget=48:basis=klt:scales=fp8",
    "uniform_depth:basis=klt",
    "sparq:r=D/8:rerank=2",
    "sparq_published",
    "double_sparsity_published",
    "loki:r=D/4:bits=16",
    "loki_published",
    "threshold",
    "landmark:bits=4",
    "quest",
    "quest:bits=4",
    "quest_published",
    "shadowkv",
    "shadowkv:outlier=4",
    "infllm",
    "infllm_published",
    "retroinfer",
    "retroinfer_published",
    "streaming_llm",
    "h2o",
    "magicpig",
    "magicpig_published",
    "retrieval_attention",
    "retrieval_attention:kind=hnsw",
    "retrieval_attention:kind=pairs",
    "retrieval_attention_published",
    "infinigen",
    "infinigen:query=rehearsed",
    "infinigen:query=own",
    "infinigen_skewed",
    "infinigen_published",
    "self_indexing",
    "kivi",
    "turboquant",
    "kvquant",
)
"""One or two standard points of every method, as the paper defines it and as published; ``--methods all`` adds :func:`plug_ins`."""

_NAMED = {"paper": PAPER, "all": EVERY}


def registry(wanted: str | None = None) -> dict[str, type[Method]]:
    """All methods by name: the built-in ones and those that installed packages give in the group ``fathom_eval.methods``.

    An entry point that gives no method is left out with a warning on stderr, so that one broken package ends no other's run.

    Args:
        wanted: The method that is asked for.

    Raises:
        UserError: The entry point of that name is a broken one.
    """
    methods = {method.name: method for method in BUILT_IN}
    installed, broken = installed_methods(methods)
    methods |= installed
    for name, error in broken.items():
        if name == wanted and wanted not in methods:
            raise error
        _warn(str(error))
    return methods


def plug_ins() -> tuple[str, ...]:
    """Names of the methods that installed packages give."""
    built_in = {method.name for method in BUILT_IN}
    return tuple(name for name in registry() if name not in built_in)


def plug_in_problems() -> dict[str, str]:
    """Every method that installed packages give, with what keeps it from running without options; empty if nothing does."""
    installed, broken = installed_methods(method.name for method in BUILT_IN)
    problems = {name: str(error) for name, error in broken.items()}
    for name in installed:
        try:
            spec = parse_method(name)
            asked(spec.method, "label", functools.partial(getattr, spec, "label"))
            problems[name] = ""
        except UserError as error:
            problems[name] = str(error)
    return problems


@functools.cache
def _warn(message: str) -> None:
    """Say it once: the registry is asked for every method of a list."""
    print(f"warning: {message}; it is left out", file=sys.stderr)


def asked(method: Method | type[Method], what: str, call: Callable[[], T]) -> T:
    """What a method answers before a run.

    Raises:
        UserError: It raised something; the method is named.
    """
    try:
        return call()
    except UserError:
        raise
    except METHOD_ERRORS as error:
        raise UserError(f"method '{method.name}': its {what} failed: {type(error).__name__}: {one_line(error)}") from error


@dataclass(frozen=True)
class MethodSpec:
    """A method with its options and its selection policy.

    Attributes:
        optional: It stands for itself in a list such as ``all``, so it can be left out where it cannot run. No part of its identity.
        impossible: The k of this run at which it cannot run and is left out. No part of its identity either.
    """

    method: Method
    policy: Policy
    optional: bool = dataclasses.field(default=False, compare=False)
    impossible: frozenset[int] = dataclasses.field(default=frozenset(), compare=False)

    @property
    def options(self) -> dict[str, Any]:
        """Every option that is not the default: with the name and version, the method's identity in a record.

        A policy is compared with the paper's, not with the method's own defaults, so that a record shows what was used.
        """
        changed: dict[str, Any] = {}
        for part in (self.method, self.policy):
            for field in dataclasses.fields(part):
                value = getattr(part, field.name)
                if value != field.default:
                    changed[field.name] = list(value) if isinstance(value, tuple) else value
        return changed

    @property
    def label(self) -> str:
        """Name and options, as tables show them."""
        own_size = [] if self.method.capped else ["(k: of the oracle only)"]
        return " ".join([self.method.label(), *self._changed_policy(), *own_size])

    @property
    def line(self) -> str:
        """The line of a plot that this is a point of: the method's, apart for every policy."""
        return " ".join([self.method.line(), *self._changed_policy()])

    def _changed_policy(self) -> list[str]:
        defaults, words = self.method.policy_defaults(), []
        for field in dataclasses.fields(self.policy):
            value = getattr(self.policy, field.name)
            if value != defaults.get(field.name, field.default):
                words.append(f"{field.name}={('+'.join(map(str, value)) or 'none') if isinstance(value, tuple) else value}")
        return words

    def check(self, facts: ModelFacts, k_values: Iterable[int]) -> None:
        """Raise :class:`UserError` for what cannot work with this model and these k."""
        method = self.method
        asked(method, "label", lambda: (self.label, self.line))
        asked(method, "check", lambda: method.check(facts))
        asked(method, "observes", lambda: needed_observations([method], facts))
        store = asked(method, "store", lambda: method.store(facts))
        usual = self.method.policy_defaults().get("dense_layers", ())
        for layer in self.policy.dense_layers:
            if not 0 <= layer < facts.layers and layer not in usual:
                raise UserError(f"{self.label}: dense layer {layer} is not in 0..{facts.layers - 1}")
        if store is None:
            if changed := ", ".join(self._changed_policy()):
                raise UserError(f"{self.label}: {self.method.name} attends to everything, so {changed} does nothing")
            return
        if self.method.name == "exact" and self.policy.rerank != 1:
            raise UserError(f"{self.label}: exact ranks by exact scores, so rerank does nothing")
        if not self.method.capped and self.policy.rerank != 1:
            raise UserError(f"{self.label}: {self.method.name} attends to all that it finds, so rerank does nothing")
        # A sample's weight is right for the head that drew it.
        if self.method.overrides("log_weights") and (self.policy.share != "head" or self.policy.attend == "union"):
            raise UserError(
                f"{self.label}: each head weighs what it has sampled itself, so share=head and attend=own are what it can run with"
            )
        self.check_k(k_values)

    def check_k(self, k_values: Iterable[int]) -> None:
        """Raise :class:`UserError` for k that leave nothing to select. It needs no model."""
        if self.method.control and self.method.name != "exact":
            return
        method = self.method
        label = asked(method, "label", lambda: self.label)
        forced = asked(method, "forced_tokens", method.forced_tokens)
        for k in k_values:
            self.policy.check(k, label)
            asked(method, "check_k", functools.partial(method.check_k, k, self.policy))
            least = self.policy.sink + self.policy.local + forced
            if k <= least:
                raise UserError(
                    f"{label}: k={k} leaves nothing to select; it must be above sink + local + the {forced} tokens that are always "
                    f"taken = {least}"
                )


def parse_method(text: str) -> MethodSpec:
    """One method from the command line.

    Raises:
        UserError: An unknown method or option, or a value of the wrong kind.
    """
    name, *parts = text.strip().split(":")
    methods = registry(name)
    if name not in methods:
        raise UserError(f"unknown method '{name}'; {did_you_mean(name, methods)}")
    kind = methods[name]
    own, shared = asked(kind, "options", lambda: _option_types(kind)), _option_types(Policy)
    given: dict[str, Any] = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if not equals:
            raise UserError(f"method '{text}': '{part}' is not option=value")
        if option not in own and option not in shared:
            raise UserError(f"method '{name}' has no option '{option}'; {did_you_mean(option, [*own, *shared])}")
        if option in given:
            raise UserError(f"method '{text}' gives the option '{option}' twice")
        given[option] = _convert(value, own.get(option, shared.get(option)), f"method '{name}', option '{option}'")
    try:
        method = kind(**{option: value for option, value in given.items() if option in own})
    except UserError:
        raise
    except METHOD_ERRORS as error:
        raise UserError(f"method '{text}' cannot be made: {type(error).__name__}: {one_line(error)}") from error
    policy = {option: value for option, value in given.items() if option not in own}
    spec = MethodSpec(method, asked(method, "policy_defaults", lambda: Policy(**{**method.policy_defaults(), **policy})))
    asked(method, "hash", lambda: hash(spec))
    return spec


def parse_methods(text: str) -> list[MethodSpec]:
    """A comma-separated list of methods. Nothing between two commas is no method.

    ``paper`` stands for the scans of the paper's main tables and ``all`` for :data:`EVERY` and the :func:`plug_ins` as they are without
    options, all of them optional unless they are named beside it. A plug-in that cannot be made without options is left out of ``all``.

    Raises:
        UserError: As :func:`parse_method`, or an empty list.
    """
    if not text.strip(" ,"):
        raise UserError("the list of methods is empty: name some, as in sparq,quest, or give paper or all")
    specs: dict[MethodSpec, MethodSpec] = {}
    for word in filter(str.strip, text.split(",")):
        optional = word.strip() == "all"
        further = _made(plug_ins()) if optional else []
        for made in (*map(parse_method, _NAMED.get(word.strip(), (word,))), *further):
            spec = dataclasses.replace(made, optional=optional)
            if spec not in specs or not optional:
                specs.pop(spec, None)
                specs[spec] = spec
    return list(specs.values())


def _made(names: Iterable[str]) -> list[MethodSpec]:
    """Methods without options; one that cannot be made is left out with a warning."""
    found = []
    for name in names:
        try:
            found.append(parse_method(name))
        except UserError as error:
            _warn(str(error))
    return found


def _option_types(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _convert(text: str, kind: Any, where: str) -> Any:
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if text not in choices:
            raise UserError(f"{where}: '{text}' is not one of {', '.join(choices)}")
        return text
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise UserError(f"{where}: '{text}' is not true or false")
        return text.lower() == "true"
    if isinstance(kind, types.GenericAlias):  # tuple[int, ...], written 0+1, or none
        return () if text == "none" else tuple(_convert(part, int, where) for part in text.split("+"))
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"{where}: '{text}' is not a {'whole number' if kind is int else 'number'}") from None
