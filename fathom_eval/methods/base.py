"""What a method is: a read plan over a store.

A method is a frozen dataclass whose fields are its options. It never sees which task it serves, and the evaluator never asks which
method it runs.
"""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fathom_eval.errors import UserError
from fathom_eval.stores import StoreSpec

if TYPE_CHECKING:
    from fathom_eval.models import ModelFacts
    from fathom_eval.prefill import PrefixLayer


@dataclass(frozen=True)
class Method(ABC):
    """A way to rank keys.

    Class attributes:
        name: How it is called on the command line.
        family: Methods of one family are one line of a plot.
        source: The paper that defines it, and the reading of it that is implemented.
        version: Raise it whenever a change of code changes a result; recorded with every result.
        control: Dense attention and the exact oracle: references, whose reads are not counted as a scan.
        ranks_all: With k ≥ n it equals dense attention.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    source: ClassVar[str]
    version: ClassVar[int] = 1
    control: ClassVar[bool] = False
    ranks_all: ClassVar[bool] = True

    def check(self, facts: ModelFacts) -> None:  # noqa: B027 - a method without options has nothing to check
        """Raise :class:`UserError` where an option cannot work with this model. Called before any prefill."""

    @abstractmethod
    def store(self, facts: ModelFacts) -> StoreSpec | None:
        """The store it scans; None for dense attention."""

    def index(self, layer: PrefixLayer, facts: ModelFacts) -> Any:
        """Whatever it derives once from a prefix layer (statistics, a fixed plan) and needs in every step."""
        return None

    def plan(self, query: Tensor, index: Any) -> Tensor | None:
        """This step's read depths.

        Args:
            query: ``[R, H, G, D]`` in the store's basis.
            index: What :meth:`index` gave for this layer.

        Returns:
            int64 depths ``[R, H, D]``, or None for a store without depths.
        """
        return None

    def declared_bits(self, plan: Tensor | None, facts: ModelFacts) -> Tensor | float:
        """Scan bits per token and KV head that this plan stands for, ``[R, H]`` or a number (paper §4)."""
        if plan is None:
            raise NotImplementedError(f"{self.name} must declare its bits")
        return plan.sum(-1) + 0.25 * (plan > 0).sum(-1)

    def typical_bits(self, head_dim: int) -> str:
        """Scan bits per token at this head_dim, for lists: a number, or words where it depends on the query."""
        return "–"

    def line(self) -> str:
        """The line of a plot that it is a point of: its family, or a variant of it that no budget leads to."""
        return self.family

    def label(self) -> str:
        """Name and options, as tables show it."""
        options = [f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self)]
        return " ".join([self.name, *options])


def channel_count(value: str, head_dim: int, what: str) -> int:
    """A number of channels given as ``16`` or as a share of head_dim, ``D/8``.

    Raises:
        UserError: Not a number of channels, not a whole one, or outside 1..head_dim; ``what`` names the option.
    """
    match = re.fullmatch(r"D(?:/(\d+))?|(\d+)", str(value))
    if match is None or match.group(1) == "0":
        raise UserError(f"{what}={value} is not a number of channels; give for example 16 or D/8")
    if match.group(2) is not None:
        count = int(match.group(2))
    else:
        divisor = int(match.group(1) or 1)
        if head_dim % divisor:
            raise UserError(f"{what}={value}: head_dim {head_dim} is not a multiple of {divisor}")
        count = head_dim // divisor
    if not 1 <= count <= head_dim:
        raise UserError(f"{what}={value} must lie in 1..{head_dim}, the model's head_dim")
    return count


def top_channels(importance: Tensor, count: int) -> Tensor:
    """True on the ``count`` most important channels of ``[…, D]``; of equal ones the lower channel is taken."""
    order = importance.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(importance, dtype=torch.bool).scatter_(-1, order, True)
