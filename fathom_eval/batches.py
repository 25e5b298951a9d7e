"""Decoding in batches that fit into memory: one that does not is halved, and only a branch that fails alone is given up."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from fathom_eval.branches import Branch
from fathom_eval.decode import BranchResult
from fathom_eval.errors import UserError
from fathom_eval.gguf_models import one_line
from fathom_eval.memory_errors import is_out_of_memory


@contextlib.contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Turn an error for want of memory into a UserError that names what did not fit."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"{what} does not fit into memory ({one_line(error, 120)}); finished work is kept") from None


class Batches:
    """Decodes branches in batches of at most ``size``.

    A batch for which memory does not suffice is decoded in halves. Where the halves do, ``size`` falls to theirs for what follows; where
    a branch fails alone, its result says so and ``size`` stays, since the others are not to blame.

    Args:
        size: The most branches of a batch.
        say: Takes one line for every batch that is halved.
    """

    def __init__(self, size: int, say: Callable[[str], None] = lambda line: None) -> None:
        self.size = size
        self._say = say

    def decode(self, run: Callable[[Sequence[Branch]], list[BranchResult]], branches: Sequence[Branch]) -> list[tuple[BranchResult, float]]:
        """Results in the order of ``branches``, each with its share of its batch's seconds.

        Args:
            run: Decodes one batch.
        """
        # Rounding depends on who shares a batch, and so must not depend on the order in which methods were named.
        order = sorted(range(len(branches)), key=lambda at: (branches[at].spec.label, branches[at].k or 0))
        pending = [[branches[at] for at in order[start : start + self.size]] for start in range(0, len(order), self.size)]
        results: list[tuple[BranchResult, float]] = []
        largest, halved, gave_up = 0, False, False
        while pending:
            part = pending.pop(0)
            began = time.perf_counter()
            found, problem = _attempt(run, part)
            seconds = (time.perf_counter() - began) / len(part)
            if problem is None:
                largest = max(largest, len(part))
                results += [(result, seconds) for result in found]
            elif len(part) == 1:
                gave_up = True
                results.append((unmeasured(part[0], f"out of memory: {problem}"), seconds))
            else:
                halved = True
                middle = (len(part) + 1) // 2
                pending[:0] = [part[:middle], part[middle:]]
                self._say(f"a batch of {len(part)} branches does not fit into memory: halved ({problem})")
        if halved and not gave_up:
            self.size = largest
        places = {given: place for place, given in enumerate(order)}
        return [results[places[at]] for at in range(len(branches))]


def _attempt(run: Callable[[Sequence[Branch]], list[BranchResult]], part: Sequence[Branch]) -> tuple[list[BranchResult], str | None]:
    """Results, or in one line why memory did not suffice."""
    try:
        return run(part), None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        problem = one_line(error, 120)
    # Only here is the failed batch gone: the error held its frames, and they its tensors.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return [], problem


def unmeasured(branch: Branch, problem: str) -> BranchResult:
    """The result of a branch that took no step, and why."""
    return BranchResult(
        branch=branch,
        token_ids=(),
        finish="error",
        error=problem,
        steps=0,
        fired=0,
        bits=None,
        declared_bits=None,
        channels=None,
        rows=0.0,
        candidate_rows=0.0,
    )
