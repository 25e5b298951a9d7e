"""Quest: score pages by the bounds of their keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from fathom_eval.entries import BITS
from fathom_eval.errors import UserError
from fathom_eval.methods.base import IF_CHANGED, Method
from fathom_eval.pages import PageSpec
from fathom_eval.stores import StoreSpec

if TYPE_CHECKING:
    from fathom_eval.models import ModelFacts


@dataclass(frozen=True)
class Quest(Method):
    """Every token scored as its page, by the most that q·k can be for a key within the page's bounds, per query head.

    Attributes:
        page: Tokens a page; divides 64, and head_dim where the bounds are coded.
        bits: Of a bound: 16 for fp16, 4 for codes with one fp16 scale for 64 bounds.
    """

    name: ClassVar[str] = "quest"
    family: ClassVar[str] = "Quest"
    source: ClassVar[str] = "Quest (arXiv:2406.10774): bounds of 16-token pages, tokens selected one by one (Fathom paper §2)"

    page: int = 16
    bits: int = field(default=16, metadata=IF_CHANGED)

    def check(self, facts: ModelFacts) -> None:
        if self.page < 1 or 64 % self.page:
            raise UserError(f"{self.name}: page={self.page} must divide 64, the tokens of a sealed block")
        check_entry_bits(self.name, self.bits, "page", self.page, facts.head_dim)

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return PageSpec(self.page, self.bits)

    def declared_bits(self, plan: Tensor | None, facts: ModelFacts) -> float:
        return 2 * entry_bits(self.bits) * facts.head_dim / self.page

    def typical_bits(self, head_dim: int) -> str:
        return f"{2 * entry_bits(self.bits) * head_dim / self.page:g}"

    def line(self) -> str:
        return self.family if self.bits == 16 else f"{self.family} {self.bits}-bit"


@dataclass(frozen=True)
class QuestPublished(Quest):
    """Quest as its authors run it: the first two layers are dense, whatever the model's depth.

    Their code counts down from 32 layers, so that in another model other layers are dense; and it takes whole pages, where here k tokens
    are k tokens. Its selection keeps no sink and no window beyond the current token.
    """

    name: ClassVar[str] = "quest_published"
    family: ClassVar[str] = "Quest as published"
    source: ClassVar[str] = (
        "Quest as mit-han-lab/Quest runs it (arXiv:2406.10774): 16-token pages, fp16 bounds, layers 0 and 1 dense, no sink, no local window"
    )
    version: ClassVar[int] = 2
    published: ClassVar[bool] = True

    def policy_defaults(self) -> Mapping[str, Any]:
        return {"sink": 0, "local": 1, "dense_layers": (0, 1)}


def entry_bits(bits: int) -> float:
    """What reading one landmark or bound of one channel takes, its share of a scale included."""
    return bits if bits == 16 else bits + 16 / 64


def check_entry_bits(name: str, bits: int, option: str, run: int, head_dim: int) -> None:
    """Raise :class:`UserError` for bits of landmarks or bounds that cannot be had; ``run`` tokens an entry, named ``option``."""
    if bits not in (BITS, 16):
        raise UserError(f"{name}: bits={bits} must be 16 (fp16) or {BITS}")
    if bits == BITS and head_dim % run:
        raise UserError(f"{name}: with bits={BITS}, {option}={run} must divide the head_dim {head_dim}: {run} channels share a scale")
