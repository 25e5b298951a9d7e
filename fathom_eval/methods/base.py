"""What a method is: a read plan over a store.

A method is a frozen dataclass whose fields are its options. It never sees which task it serves, and the evaluator never asks which
method it runs.
"""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fathom_eval.errors import UserError
from fathom_eval.methods.step import Step
from fathom_eval.stores import StoreSpec

if TYPE_CHECKING:
    from fathom_eval.models import ModelFacts
    from fathom_eval.observations import Observation
    from fathom_eval.prefill import PrefixLayer
    from fathom_eval.selection import Policy


IF_CHANGED = {"label": "if changed"}
"""Metadata of an option that a label names only where it is not the default."""


@dataclass(frozen=True)
class Method(ABC):
    """A way to rank keys.

    Most methods are a store and a plan. What published systems do beyond that are the hooks that take a
    :class:`~fathom_eval.methods.step.Step`; a method that overrides one of them is evaluated one branch at a time, while the others
    share their scans and selections.

    Class attributes:
        name: How it is called on the command line.
        family: Methods of one family are one line of a plot.
        source: The paper that defines it, and the reading of it that is implemented.
        version: Raise it whenever a change of code changes a result; recorded with every result.
        control: Dense attention and the exact oracle: references, whose reads are not counted as a scan.
        published: It follows its authors' code where that departs from the paper's protocol.
        ranks_all: It scores every token, so that with k ≥ n it equals dense attention. False for methods that evict, sample or
            cut off: only theirs may score a token −∞, which is then never attended to, whatever k leaves room for.
        forces: It may score tokens +∞: they are taken first, and stay so when candidates are reranked.
        capped: It attends to at most k tokens. False for one that decides itself how many: it attends to every token scored above −∞,
            and k is only the size of the exact set that it is compared with.
        declares: Its bits are known from its plan (see :meth:`declared_bits`). False where only counting tells, as with hash tables.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    source: ClassVar[str]
    version: ClassVar[int] = 1
    control: ClassVar[bool] = False
    published: ClassVar[bool] = False
    ranks_all: ClassVar[bool] = True
    forces: ClassVar[bool] = False
    capped: ClassVar[bool] = True
    declares: ClassVar[bool] = True

    def policy_defaults(self) -> Mapping[str, Any]:
        """Fields of :class:`~fathom_eval.selection.Policy` that differ with this method, or with these options of it; any can be given."""
        return {}

    def forced_tokens(self) -> int:
        """How many tokens it takes first at most, beyond those that the policy keeps: k must leave room for all of them and one more."""
        return 0

    def check(self, facts: ModelFacts) -> None:  # noqa: B027 - a method without options has nothing to check
        """Raise :class:`UserError` where an option cannot work with this model. Called before any prefill."""

    def check_k(self, k: int, policy: Policy) -> None:  # noqa: B027 - most methods work with any k that the policy works with
        """Raise :class:`UserError` for a k that cannot work with its options. Called before any prefill, with any model."""

    @abstractmethod
    def store(self, facts: ModelFacts) -> StoreSpec | None:
        """The store it scans; None for dense attention."""

    def observes(self, facts: ModelFacts) -> tuple[Observation, ...]:
        """What the prefill has to gather for it; :meth:`index` finds it in ``layer.observations``."""
        return ()

    @property
    def rehearses(self) -> bool:
        """Whether it wants ``step.rehearsed_query``, for which every layer's attention module runs once more a step."""
        return False

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

    def plan_key(self, index: Any) -> Hashable:
        """Methods of one class whose keys are equal in a layer may be planned in one :meth:`plan_together`; None keeps to :meth:`plan`."""
        return None

    @classmethod
    def plan_together(cls, query: Tensor, members: Sequence[tuple[Any, Any, int]]) -> Tensor:
        """:meth:`plan` of several methods of this class at once, which saves a small model most of the time.

        Args:
            query: ``[R, H, G, D]`` of all their rows, one method's after the other's.
            members: Each method, its index and its number of rows.

        Returns:
            int64 ``[R, H, D]``, exactly what :meth:`plan` gives.
        """
        raise NotImplementedError

    def scan_query(self, step: Step) -> Tensor:
        """The queries that keys are scored with, ``[R, H, G, D]``: the step's own, unless it ranks ahead of them (InfiniGen)."""
        return step.query

    def plan_step(self, query: Tensor, step: Step) -> Tensor | None:
        """:meth:`plan` for a plan that depends on more than the query, such as a budget by k / n."""
        return self.plan(query, step.index)

    def rank(self, scores: Tensor, step: Step) -> Tensor:
        """The scores that tokens are selected by.

        Args:
            scores: What the scan gave, exact for tokens that are not sealed, fp32 ``[R, H, G, N]``; −∞ where a token does not compete
                (it is always kept, or in the future). What is returned there has no effect.
        """
        return scores

    def log_weights(self, step: Step) -> Tensor:
        """Added to the logits of the sealed tokens that are attended to, ``[R, H, G, m]``: −log p for one sampled with probability p.

        The always-kept tokens keep their logits, and so do tokens after the m-th.
        """
        raise NotImplementedError

    def remainder(self, attended: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Pseudo-keys that stand for tokens which are not attended to and take part in the softmax (RetroInfer's estimate).

        Args:
            attended: Tokens that are, the always-kept ones included, boolean ``[R, H, G, M]`` with M at least N and the sealed tokens.

        Returns:
            Logits ``[R, H, G, c]``, scaled, the logarithm of a pseudo-key's count included (−∞ where it does not take part), and
            values ``[R or 1, H, G or 1, c, D]``.
        """
        raise NotImplementedError

    def learn(self, attended: Tensor, weights: Tensor, step: Step) -> None:  # noqa: B027 - most methods keep no state
        """Take note, in ``step.state``, of what was attended to, ``[R, H, G, N]``, with which weights (0 elsewhere), fp32.

        A fidelity run computes the positions of a method with this hook one after the other, as a branch that is fed the window's own
        tokens would.
        """

    @property
    def extended(self) -> bool:
        """Whether it needs more than a store and a plan. A method whose options switch its hooks on may say so more narrowly."""
        return self.forces or not (self.ranks_all and self.capped) or self.overrides(*_HOOKS)

    def overrides(self, *hooks: str) -> bool:
        """Whether it defines any of these hooks."""
        return any(getattr(type(self), hook) is not getattr(Method, hook) for hook in hooks)

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
        values = [(field, getattr(self, field.name)) for field in dataclasses.fields(self)]
        options = [f"{field.name}={value}" for field, value in values if value != field.default or field.metadata != IF_CHANGED]
        return " ".join([self.name, *options])


_HOOKS = ("scan_query", "plan_step", "rank", "log_weights", "remainder", "learn")


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
