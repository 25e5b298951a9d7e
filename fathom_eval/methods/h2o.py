"""H2O: the tokens that have got the most attention so far, and the most recent ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fathom_eval.errors import UserError
from fathom_eval.methods.base import Method
from fathom_eval.methods.step import Step
from fathom_eval.observations import Observation, ReceivedAttention
from fathom_eval.stores import StoreSpec, UnreadSpec

if TYPE_CHECKING:
    from fathom_eval.models import ModelFacts
    from fathom_eval.prefill import PrefixLayer
    from fathom_eval.selection import Policy


@dataclass(frozen=True)
class H2O(Method):
    """Heavy hitters of the accumulated attention and recent tokens; what is left out once is gone (arXiv:2306.14048).

    The prompt is prefilled densely; its tokens start with the attention that they have got from all of its queries. From then on only
    attended tokens get more, and tokens outside the set of a step are evicted. A KV head has one set: attention is summed over its
    group. It evicts, so it promises nothing about k of all tokens. Keys stay where they are: positions are those of the text.

    Attributes:
        recent: Share of k that goes to the most recent tokens, the local window among them.
    """

    name: ClassVar[str] = "h2o"
    family: ClassVar[str] = "H2O"
    source: ClassVar[str] = "H2O (arXiv:2306.14048): heavy hitters of the accumulated attention, and recent tokens; evicted tokens are gone"
    ranks_all: ClassVar[bool] = False
    forces: ClassVar[bool] = True

    recent: float = 0.5

    def check(self, facts: ModelFacts) -> None:
        if not 0 <= self.recent <= 1:
            raise UserError(f"h2o: recent={self.recent:g} must lie in 0..1, a share of k")

    def check_k(self, k: int, policy: Policy) -> None:
        if round(self.recent * k) > k - policy.sink:
            raise UserError(
                f"h2o: recent={self.recent:g} of k={k} are {round(self.recent * k)} tokens, more than the {k - policy.sink} that the sink "
                f"of {policy.sink} leaves"
            )

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return UnreadSpec()

    def observes(self, facts: ModelFacts) -> tuple[Observation, ...]:
        return (ReceivedAttention(),)

    def index(self, layer: PrefixLayer, facts: ModelFacts) -> Any:
        return layer.observations[ReceivedAttention()].sum(1)

    def rank(self, scores: Tensor, step: Step) -> Tensor:
        tokens = scores.shape[-1]
        received = step.state.get("received")
        if received is None:
            # Over a whole window the statistics know of later tokens, which a step does not have yet.
            received = step.index[:, :tokens].expand(scores.shape[0], -1, -1)
        received = torch.nn.functional.pad(received, (0, tokens - received.shape[-1]))
        alive = step.state.get("alive")
        alive = torch.ones_like(received, dtype=torch.bool) if alive is None else _extended(alive, tokens)
        step.state.update(received=received, alive=alive)
        recent = torch.arange(tokens, device=scores.device) >= tokens - round(self.recent * step.k)
        ranked = received.masked_fill(recent, torch.inf).masked_fill(~alive, -torch.inf)
        return ranked.unsqueeze(2).expand_as(scores)

    def learn(self, attended: Tensor, weights: Tensor, step: Step) -> None:
        step.state["received"] = step.state["received"] + weights.sum(2)
        step.state["alive"] = attended.any(2)

    def declared_bits(self, plan: Tensor | None, facts: ModelFacts) -> float:
        return 0.0

    def typical_bits(self, head_dim: int) -> str:
        return "0"


def _extended(alive: Tensor, tokens: int) -> Tensor:
    """Tokens that have come since are alive."""
    return torch.nn.functional.pad(alive, (0, tokens - alive.shape[-1]), value=True)
