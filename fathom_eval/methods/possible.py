"""Which of a list of methods can run, and at which k."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fathom_eval.errors import METHOD_ERRORS, UserError

if TYPE_CHECKING:
    from fathom_eval.methods import MethodSpec


@dataclass(frozen=True)
class Impossible:
    """A method that cannot run, at one k or (None) at all."""

    label: str
    k: int | None
    reason: str


@dataclass
class Possible:
    """The methods of a run as its checks leave them.

    Attributes:
        specs: Those that can run at some k; ``spec.impossible`` says at which they cannot.
        left_out: What cannot run, in the order in which it was found.
    """

    specs: list[MethodSpec]
    left_out: list[Impossible] = field(default_factory=list)
    _said: set[str] = field(default_factory=set, init=False, repr=False)

    @property
    def settings(self) -> dict[str, Any]:
        """For the manifest of a run."""
        found = [{"method": one.label, "k": one.k, "reason": one.reason} for one in self.left_out]
        return {"methods": [spec.label for spec in self.specs], **({"impossible": found} if found else {})}

    def keep(self, k_values: Sequence[int], check: Callable[[MethodSpec, Sequence[int]], None], say: Callable[[str], None]) -> None:
        """Keep what passes a check. Of an optional method each k at which it does not pass is left out, with a line.

        Args:
            check: Raises :class:`UserError` for a method at any of these k.

        Raises:
            UserError: A method that is not optional does not pass.
        """
        kept: list[MethodSpec] = []
        for spec in self.specs:
            wanted = [k for k in k_values if k not in spec.impossible]
            try:
                check(spec, wanted)
            except UserError as error:
                if not spec.optional:
                    raise
                reasons = _reasons(spec, wanted, check) or dict.fromkeys(wanted, str(error))
                if len(reasons) < len(wanted):
                    kept.append(dataclasses.replace(spec, impossible=spec.impossible | reasons.keys()))
                    lines = [f"left out at k={k}: {reason}" for k, reason in reasons.items()]
                else:
                    lines = [f"left out: {error}"]
                for line in lines:  # options that do not come into it leave several methods with one line
                    if line not in self._said:
                        self._said.add(line)
                        say(line)
                self.left_out += _impossible(_label(spec), reasons, wanted)
                continue
            kept.append(spec)
        self.specs = kept


def check_options(spec: MethodSpec, k_values: Sequence[int]) -> None:
    """Raise :class:`UserError` for an option of a built-in method that works with no model, whatever k.

    That is what several models refuse in the same words: a refusal that comes from the model names what the model has.
    """
    from fathom_eval.methods import BUILT_IN, asked
    from fathom_eval.models import ModelFacts

    if type(spec.method) not in BUILT_IN:
        return
    refusals = set()
    for number, (layers, query_heads, kv_heads, head_dim) in enumerate(((30, 9, 3, 64), (36, 32, 8, 128), (32, 32, 32, 80))):
        name = f"model {number}"
        facts = ModelFacts(name, name, layers, query_heads, kv_heads, head_dim, number > 0, 2**20, (), f"type {number}", "cpu", name, name)
        try:
            asked(spec.method, "check", functools.partial(spec.method.check, facts))
        except UserError as error:
            refusals.add(str(error))
        else:
            return
    if len(refusals) == 1:
        raise UserError(refusals.pop())


def _label(spec: MethodSpec) -> str:
    """Its label, or its name where the label itself is what fails."""
    try:
        return spec.label
    except METHOD_ERRORS:
        return spec.method.name


def _impossible(label: str, reasons: Mapping[int, str], wanted: Sequence[int]) -> list[Impossible]:
    if len(wanted) > 1 and len(reasons) == len(wanted) and len(set(reasons.values())) == 1:
        return [Impossible(label, None, next(iter(reasons.values())))]  # one reason at every k has nothing to do with k
    return [Impossible(label, k, reason) for k, reason in reasons.items()]


def _reasons(spec: MethodSpec, k_values: Iterable[int], check: Callable[[MethodSpec, Sequence[int]], None]) -> Mapping[int, str]:
    found = {}
    for k in k_values:
        try:
            check(spec, [k])
        except UserError as error:
            found[k] = str(error)
    return found
