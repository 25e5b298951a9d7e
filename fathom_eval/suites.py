"""The ablations of the paper, and of what goes beyond it, as lists of methods that ``fathom-eval fidelity --suite`` measures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fathom_eval.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from fathom_eval.methods import MethodSpec

RATIOS = {0.001: 1024, 0.004: 256, 0.016: 64}
"""The paper's selection ratios k / n and what n is divided by: k is 128, 512 and 2048 at 128k tokens."""
_LEAST_K = 37
_ROLE = re.compile(r"\{([a-z_]+)\}")

ROLES = {
    "text": "statistics of text: fathom-eval calibrate --text wikitext --name NAME",
    "transcripts": "statistics of transcripts: fathom-eval calibrate --trajectories SET --exclude-repo REPOS --name NAME",
    "plan": "per-layer plans made at the length that is evaluated: fathom-eval calibrate --plan 48,64 --plan-context N --name NAME",
    "other_plan": "per-layer plans made at another length: fathom-eval calibrate --plan 48,64 --plan-context M --name NAME",
}
"""Calibrations that suites name, and how they are made."""


@dataclass(frozen=True)
class Suite:
    """Methods that differ in one choice.

    Attributes:
        question: What it answers.
        source: Where the paper has it, or that it has not.
        methods: Names with options; ``{role}`` stands for a calibration (:data:`ROLES`).
        plain: Those of them that the others are compared with at equal bytes: one line of budgets at the same k.
        context: Tokens of a window, the paper's where one of its settings has them.
        ratios: Selection ratios k / n, of :data:`RATIOS`.
    """

    name: str
    question: str
    source: str
    methods: tuple[str, ...]
    plain: tuple[str, ...]
    context: int = 32768
    ratios: tuple[float, ...] = (0.016,)

    @property
    def roles(self) -> tuple[str, ...]:
        """Calibrations that have to be given."""
        return tuple(dict.fromkeys(role for method in self.methods for role in _ROLE.findall(method)))

    def expand(self, calibrations: Mapping[str, str]) -> list[MethodSpec]:
        """The controls and the suite's methods.

        Args:
            calibrations: A name or path for each role.

        Raises:
            UserError: A role lacks its calibration, or one is given that the suite has no use for.
        """
        from fathom_eval.methods import parse_method

        for role in calibrations:
            if role not in self.roles:
                takes = f"takes {', '.join(self.roles)}" if self.roles else "takes none"
                raise UserError(f"suite {self.name} has no use for the calibration '{role}': it {takes}")
        for role in self.roles:
            if role not in calibrations:
                raise UserError(f"suite {self.name} needs --calibration {role}=NAME, {ROLES[role]}")
        return [parse_method(method.format(**calibrations)) for method in ("dense", "exact", *self.methods)]

    def plain_labels(self, calibrations: Mapping[str, str]) -> list[str]:
        """Labels of the plain methods."""
        from fathom_eval.methods import parse_method

        return [parse_method(method.format(**calibrations)).label for method in self.plain]

    def k_values(self, context: int) -> tuple[list[int], list[str]]:
        """The k of each ratio that selects something at this context, and a line for each that does not.

        Raises:
            UserError: None does.
        """
        found = {ratio: round(context / RATIOS[ratio]) for ratio in self.ratios}
        usable = sorted(k for k in found.values() if k >= _LEAST_K)
        left_out = [
            f"{100 * ratio:g} % of {context:,} tokens is {k} keys, no selection: left out" for ratio, k in found.items() if k < _LEAST_K
        ]
        if not usable:
            least = _LEAST_K * min(RATIOS[ratio] for ratio in self.ratios)
            raise UserError(f"suite {self.name}: {left_out[0].removesuffix(': left out')}; give --k, or --context {least} or more")
        return usable, left_out


def _fathom(budgets: Sequence[int], options: str = "") -> tuple[str, ...]:
    return tuple(f"fathom:budget={budget}{options}" for budget in budgets)


_LINE = (24, 32, 40, 48, 64, 80, 96, 128)
# To the full store, for what trades scan bits for rows or reads every channel.
_LONG_LINE = (16, *_LINE, 192, 256, 384, 512)
# Fine where a small budget reaches the errors of more bits.
_FINE_LINE = (16, 20, 24, 26, 28, 32, 40, 48, 64)
_FIXED = ("sparq:r=D/8", "sparq:r=D/4", "double_sparsity", "loki:r=D/4", "loki:r=D/2", "thumbnail", "full")

SUITES = (
    Suite(
        "layer-plan",
        "does a plan of budgets by layer beat the flat budget?",
        "A1, Tables 10 and 14",
        (*_fathom(_LINE), "fathom:budget=48:layer_plan={plan}", "fathom:budget=64:layer_plan={plan}"),
        _fathom(_LINE),
    ),
    Suite(
        "layer-plan-length",
        "does a plan hold at another length than its own?",
        "A1, Table 14 (plan from 16k)",
        (
            *_fathom(_LINE),
            *(f"fathom:budget={budget}:layer_plan={{{role}}}" for role in ("plan", "other_plan") for budget in (48, 64)),
        ),
        _fathom(_LINE),
    ),
    Suite(
        "basis",
        "raw channels or the Karhunen–Loève basis?",
        "A2, Table 11",
        (*_fathom(_LINE, ":basis=raw"), *_fathom((40, 48, 64, 80), ":basis=klt")),
        _fathom(_LINE, ":basis=raw"),
    ),
    Suite(
        "selection-ratio",
        "how do scans compare as k / n falls?",
        "A3, Table 16",
        (*_fathom(_LINE, ":basis=klt"), *_fathom((48, 64), ":basis=raw"), *_FIXED),
        _fathom(_LINE, ":basis=klt"),
        context=131072,
        ratios=(0.001, 0.004, 0.016),
    ),
    Suite(
        "depth",
        "water-filled depths or one depth for all channels that are read?",
        "A4, Tables 14 and 15",
        (
            *_fathom(_LONG_LINE),
            "thumbnail:depth=1",
            "thumbnail:depth=2",
            "thumbnail:depth=3",
            *(f"uniform_depth:budget={budget}:depth={depth}" for budget in (48, 64, 128) for depth in (1, 2, 4)),
        ),
        _fathom(_LONG_LINE),
    ),
    Suite(
        "sparq-selection",
        "what does a channel choice of every query head's own cost SparQ?",
        "A5, Table 18",
        ("sparq:r=D/16", "sparq:r=D/8", "sparq:r=D/4", "sparq:r=D/2", "sparq:r=D/8:per_head=true", "sparq:r=D/4:per_head=true"),
        ("sparq:r=D/16", "sparq:r=D/8", "sparq:r=D/4", "sparq:r=D/2"),
    ),
    Suite(
        "store-precision",
        "does a finer store, or one whose bits are allocated once, change what a read finds?",
        "B1, Table 19",
        (*_fathom(_LINE), *(f"fathom:budget={budget}:codes={codes}" for codes in ("8bit", "allocated") for budget in (48, 64, 80))),
        _fathom(_LINE),
        context=16384,
    ),
    Suite(
        "loki-rank",
        "is Loki held back by its rank or by its codes?",
        "B2, Table 20",
        ("loki:r=D/8", "loki:r=D/4", "loki:r=D/2", "loki:r=D", "loki:r=D/4:bits=16"),
        ("loki:r=D/8", "loki:r=D/4", "loki:r=D/2", "loki:r=D"),
    ),
    Suite(
        "active-channels",
        "how many channels does a read touch at each budget?",
        "B3, Table 21",
        (*_fathom((32, 48, 64, 80, 128)),),
        _fathom((32, 48, 64, 80, 128)),
    ),
    Suite(
        "calibration-domain",
        "statistics of text, of transcripts, or of the keys that are scanned?",
        "B5, Tables 22 and 23",
        (
            *_fathom(_LINE),
            *(f"fathom:budget={budget}:statistics={{{role}}}" for role in ("text", "transcripts") for budget in (48, 64, 80)),
            "double_sparsity",
            "double_sparsity:statistics={text}",
            "double_sparsity:statistics={transcripts}",
            "sparq:r=D/8",
            "sparq:r=D/4",
        ),
        _fathom(_LINE),
        ratios=(0.004, 0.016),
        context=131072,
    ),
    *(
        Suite(
            f"depth-tables{suffix}",
            f"are depths better planned from measured errors, with scales paid for, in the {words}?",
            "beyond the paper",
            (*_fathom(_LINE, basis), *_fathom((40, 48, 56, 74, 92), f"{basis}:depths=measured")),
            _fathom(_LINE, basis),
        )
        for suffix, basis, words in (("", ":basis=klt", "Karhunen–Loève basis"), ("-raw", ":basis=raw", "raw channels"))
    ),
    Suite(
        "scales",
        "do scales of eight bits pay?",
        "beyond the paper",
        (*_fathom(_LINE), *_fathom((32, 40, 48, 64, 80), ":scales=fp8")),
        _fathom(_LINE),
    ),
    Suite(
        "budget-ratio",
        "should the budget grow as k / n falls?",
        "beyond the paper",
        (*_fathom(_LINE, ":basis=klt"), *_fathom((32, 40, 48, 64), ":basis=klt:by_ratio=true")),
        _fathom(_LINE, ":basis=klt"),
        context=131072,
        ratios=(0.001, 0.004, 0.016),
    ),
    Suite(
        "session-statistics",
        "are statistics of a prefix's own keys as good as those of calibration text?",
        "beyond the paper's tables",
        (
            *_fathom(_LINE, ":statistics={text}"),
            *_fathom((40, 48, 64, 80)),
            "loki:r=D/4",
            "loki:r=D/4:statistics={text}",
            "double_sparsity",
            "double_sparsity:statistics={text}",
        ),
        _fathom(_LINE, ":statistics={text}"),
    ),
    Suite(
        "rerank",
        "is a byte better spent on exact scores of candidates than on scan bits?",
        "beyond the paper",
        (
            *_fathom(_LONG_LINE),
            *(f"fathom:budget={budget}:rerank={rerank}" for budget in (24, 32, 48, 64) for rerank in ("1.5", "2", "3")),
            "sparq:r=D/8",
            "sparq:r=D/8:rerank=2",
        ),
        _fathom(_LONG_LINE),
    ),
    Suite(
        "union",
        "what does attending to all rows that a group fetches give?",
        "beyond the paper",
        (
            *_fathom(_LONG_LINE),
            *_fathom((24, 32, 48, 64), ":attend=union"),
            "exact:attend=union",
            "sparq:r=D/8",
            "sparq:r=D/8:attend=union",
        ),
        _fathom(_LONG_LINE),
    ),
    Suite(
        "equal-error",
        "which budget, with rerank and with union, reaches the error of the 136-bit scans?",
        "beyond the paper",
        (
            *_fathom(_FINE_LINE, ":basis=klt"),
            *_fathom(_FINE_LINE[:-1], ":basis=klt:attend=union"),
            *_fathom((16, 24, 32), ":basis=klt:rerank=1.5"),
            *_fathom((24, 32), ":basis=klt:rerank=2"),
            *_fathom((16, 20, 24, 32), ":basis=klt:rerank=1.5:attend=union"),
            *_fathom((24, 32), ":basis=klt:rerank=2:attend=union"),
            *_fathom((24, 32, 40, 48, 64), ":basis=raw"),
            *_fathom((24, 32, 40, 48, 64), ":basis=raw:attend=union"),
            *(
                f"{scan}{options}"
                for scan in ("sparq:r=D/4", "double_sparsity:c=D/4", "loki:r=D/4")
                for options in ("", ":attend=union", ":rerank=2", ":rerank=2:attend=union")
            ),
            "double_sparsity:c=D/4:rerank=1.5",
            "exact:attend=union",
        ),
        _fathom(_FINE_LINE, ":basis=klt"),
    ),
)


def find_suite(name: str) -> Suite:
    """The suite of this name. Raises :class:`UserError` if there is none."""
    suites = {suite.name: suite for suite in SUITES}
    if name not in suites:
        raise UserError(f"unknown suite '{name}'; {did_you_mean(name, suites)}")
    return suites[name]


def parse_calibrations(given: Sequence[str]) -> dict[str, str]:
    """``ROLE=NAME`` of every ``--calibration``. Raises :class:`UserError` for an unknown role, or one that is given twice."""
    found: dict[str, str] = {}
    for text in given:
        role, equals, name = text.partition("=")
        if not equals or not name:
            raise UserError(f"--calibration '{text}' is not ROLE=NAME")
        if role not in ROLES:
            raise UserError(f"unknown role '{role}' of --calibration; {did_you_mean(role, ROLES)}")
        if role in found:
            raise UserError(f"--calibration gives '{role}' twice")
        if name != "session" and re.search(r"[:,{}]", name):
            raise UserError(f"--calibration {role}: '{name}' cannot stand in a method; move the file, or give it a name in the cache")
        found[role] = name
    return found


def list_suites() -> list[str]:
    """Lines for a reader."""
    lines = []
    for suite in SUITES:
        ratios = ", ".join(f"{100 * ratio:g} %" for ratio in suite.ratios)
        lines.append(f"{suite.name:20} {suite.question}")
        lines.append(f"    {suite.source}; {len(suite.methods)} methods, context {suite.context:,}, k = {ratios} of it")
        lines += [f"    --calibration {role}=NAME  {ROLES[role]}" for role in suite.roles]
    return lines
