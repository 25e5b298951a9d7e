"""What docs/fidelity.md says of small budgets with union and rerank, computed from the two runs of the suite ``equal-error``."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from fathom_eval.equal_bytes import compare_at_equal_bytes
from fathom_eval.stats import paired_difference
from tests.findings import LONG, SHORT, SPARQ, SPARQ_QUARTER, ratio, records

RUNS = {90112: f"{LONG}-small-budgets", 32768: f"{SHORT}-small-budgets"}
BEFORE = {90112: LONG, 32768: SHORT}
"""The runs of the same windows with fewer of Fathom's reads, at k = 512."""
QUARTERS = ("double_sparsity c=D/4", "loki r=D/4", SPARQ_QUARTER)
BUDGETS = (16, 20, 24, 26, 28, 32, 40, 48, 64)
ADDED = (20, 26, 28)
OWN, UNION, RERANK, BOTH = "", " attend=union", " rerank=2.0", " rerank=2.0 attend=union"
LESS, LESS_BOTH = " rerank=1.5", " rerank=1.5 attend=union"


def klt(budget: int) -> str:
    return f"fathom budget={budget} basis=klt"


@cache
def windows(run: str, method: str) -> dict[int, float]:
    """Error to dense of every window at k = 512."""
    return {one["sample"]: one["error_dense"] for one in records(run) if one["label"] == method and one["k"] == 512}


def mean(context: int, method: str) -> float:
    return statistics.fmean(windows(RUNS[context], method).values())


def measured(context: int, method: str) -> bool:
    return bool(windows(RUNS[context], method))


def declared_bits(context: int, method: str) -> float:
    return statistics.fmean(one["declared_bits"] for one in records(RUNS[context]) if one["label"] == method)


def candidates(context: int, method: str) -> float:
    return statistics.fmean(one["candidate_rows"] for one in records(RUNS[context]) if one["label"] == method)


def budgets(context: int, switch: str) -> list[int]:
    return [budget for budget in BUDGETS if measured(context, klt(budget) + switch)]


def first_start(context: int, switch: str) -> list[int]:
    return [budget for budget in budgets(context, switch) if budget not in ADDED]


def errors_table(context: int) -> list[str]:
    """Error to dense of every KLT budget and of the scans of a quarter of the channels, with and without the switches."""
    names = ("bits", "bits a channel", "own", "union", "rerank 1.5", "rerank 1.5, union", "rerank 2", "rerank 2, union")
    lines = [
        f"| read | {' | '.join(names)} | K rows, 1.5 | K rows, 2 |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for read in (*map(klt, BUDGETS), *QUARTERS):
        bits = declared_bits(context, read)
        cells = [read, f"{bits:.1f}", f"{bits / 64:.2f}"]
        for switch in (OWN, UNION, LESS, LESS_BOTH, RERANK, BOTH):
            cells.append(f"{mean(context, read + switch):.4f}" if measured(context, read + switch) else "–")
        for switches in ((LESS, LESS_BOTH), (RERANK, BOTH)):
            found = [candidates(context, read + switch) for switch in switches if measured(context, read + switch)]
            cells.append(f"{found[0]:,.0f}" if found else "–")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


@dataclass(frozen=True)
class Reach:
    """The smallest budget of a line whose mean error is no larger than a scan's."""

    budget: int
    ratio: float
    """Declared bits of the scan over the budget's."""
    lower: int
    """Windows of 8 in which the error is lower."""
    tie: bool
    """The paired interval of the difference holds zero."""

    def __str__(self) -> str:
        return f"{self.budget}: {self.ratio:.2f} ({self.lower} of 8{', tie' if self.tie else ''})"


@cache
def reach(context: int, scan: str, switch: str, scan_switch: str = OWN, *, first: bool = False) -> Reach | None:
    """Of all budgets, or of those of the first start."""
    wanted = windows(RUNS[context], scan + scan_switch)
    for budget in (first_start if first else budgets)(context, switch):
        read = klt(budget) + switch
        own = windows(RUNS[context], read)
        assert own.keys() == wanted.keys() == set(range(8))
        if mean(context, read) <= mean(context, scan + scan_switch):
            found = paired_difference([own[one] for one in range(8)], [wanted[one] for one in range(8)], seed=0)
            share = declared_bits(context, scan) / declared_bits(context, read)
            return Reach(budget, share, found.losses, found.low <= 0 <= found.high)
    return None


def _cell(context: int, scan: str, switch: str, scan_switch: str) -> str:
    return str(reach(context, scan, switch, scan_switch) or f"none up to {budgets(context, switch)[-1]}")


def _reached_table(title: str, columns: Iterable[tuple[str, str, str]]) -> list[str]:
    columns = list(columns)
    lines = [f"| tokens | {title} | {' | '.join(name for name, _, _ in columns)} |", f"| ---: | --- |{' ---: |' * len(columns)}"]
    for context in RUNS:
        for scan in QUARTERS:
            lines.append(f"| {context:,} | {scan} | {' | '.join(_cell(context, scan, own, theirs) for _, own, theirs in columns)} |")
    return lines


def alone_table() -> list[str]:
    """Fathom with its switches at the errors of the scans without."""
    columns = (("Fathom, own", OWN, OWN), ("Fathom, union", UNION, OWN), ("Fathom, rerank 1.5, union", LESS_BOTH, OWN))
    return _reached_table("scan, own", columns)


def alike_table() -> list[str]:
    """Both with the same switch."""
    names = ((OWN, "own"), (UNION, "union"), (RERANK, "rerank 2"), (BOTH, "rerank 2, union"))
    return _reached_table("scan", [(f"both {name}", switch, switch) for switch, name in names])


def small_budget_tables() -> list[str]:
    return [*errors_table(90112), *errors_table(32768), *alone_table(), *alike_table()]


def factors(context: int, switch: str, reads: Iterable[str]) -> list[float]:
    """Error with the switch over that without, of the reads that have both."""
    return [mean(context, read + switch) / mean(context, read) for read in reads if measured(context, read + switch)]


def union_factors(context: int) -> list[float]:
    """Of every scan of the run, reranked or not, in either basis."""
    labels = dict.fromkeys(one["label"] for one in records(RUNS[context]) if not one["control"])
    return factors(context, UNION, [label for label in labels if not label.endswith(UNION)])


def spread(values: Iterable[float], digits: int = 2) -> str:
    found = sorted(values)
    first, last = f"{found[0]:,.{digits}f}", f"{found[-1]:,.{digits}f}"
    return first if first == last else f"{first} to {last}"


def ratios(switch: str, scan_switch: str, scans: Iterable[str] = QUARTERS) -> list[float]:
    found = [reach(context, scan, switch, scan_switch) for context in RUNS for scan in scans]
    return [one.ratio for one in found if one is not None]


def without_added(switch: str) -> tuple[list[float], str]:
    """The ratios at the scans' own errors that need an added budget, and what they are without."""
    pairs = [(reach(context, scan, switch), reach(context, scan, switch, first=True)) for context in RUNS for scan in QUARTERS]
    moved = [(one.ratio, other.ratio) for one, other in pairs if one and other and one != other]
    return [one for one, _ in moved], spread(other for _, other in moved)


def reranked_at_equal_bytes(context: int) -> dict[str, str]:
    """Reads with rerank and union: their error over that of the line with union alone at the same bytes, where it covers them."""
    line = [klt(budget) + UNION for budget in budgets(context, UNION)]
    found = compare_at_equal_bytes(records(RUNS[context]), line)
    reads = [one for one in found if re.fullmatch(r"fathom budget=\d+ basis=klt rerank=\S+ attend=union", one.method)]
    return {one.method: ratio(one, "error_dense") for one in reads if one.plain["error_dense"] is not None}


def on_shared_windows(run: str, scan: str, context: int, switch: str) -> tuple[float, int, float, float, int, int]:
    """The first budget that reaches the error of another run's scan, on that run's windows.

    Returns:
        The scan's mean error, the budget, its error and bits, and in how many windows of how many its error is lower.
    """
    wanted = windows(run, scan)
    for budget in budgets(context, switch):
        own = windows(RUNS[context], klt(budget) + switch)
        error = statistics.fmean(own[one] for one in wanted)
        if error <= statistics.fmean(wanted.values()):
            lower = sum(own[one] < wanted[one] for one in wanted)
            return (
                statistics.fmean(wanted.values()),
                budget,
                error,
                declared_bits(context, klt(budget) + switch),
                lower,
                len(wanted),
            )
    raise AssertionError((run, scan, switch))


def _eighth(context: int) -> str:
    error, budget, found, bits, lower, of = on_shared_windows(BEFORE[context], SPARQ + UNION, context, UNION)
    where = f"budget {budget} with union, {bits:.1f} bits, reaches its {error:.4f} with {found:.4f}"
    return f"{where} (lower in {lower} of {of}; {34 / bits:.2f} times fewer)"


def small_budget_phrases() -> dict[str, str]:
    near = (mean(90112, klt(24) + UNION), mean(90112, QUARTERS[0]))
    union = {context: union_factors(context) for context in RUNS}
    ends = {(context, budget): factors(context, UNION, [klt(budget)])[0] for context in RUNS for budget in (16, 48)}
    quarter = {context: factors(context, UNION, QUARTERS) for context in RUNS}
    both = {context: (factors(context, BOTH, QUARTERS), factors(context, BOTH, map(klt, (24, 32)))) for context in RUNS}
    rows = {context: [candidates(context, scan + BOTH) for scan in QUARTERS] for context in RUNS}
    less = [candidates(context, klt(budget) + LESS_BOTH) for context in RUNS for budget in budgets(context, LESS_BOTH)]
    bytes_ = [float(one) for context in RUNS for one in reranked_at_equal_bytes(context).values()]
    own, joint = ([ratios(switch, switch, [scan]) for scan in QUARTERS] for switch in (OWN, UNION))
    raw = {context: (mean(context, "fathom budget=64 basis=raw attend=union"), mean(context, SPARQ_QUARTER + UNION)) for context in RUNS}
    close = {context: (mean(context, klt(32) + BOTH), mean(context, QUARTERS[0] + BOTH)) for context in RUNS}
    missed = (mean(90112, klt(32) + RERANK), mean(90112, QUARTERS[0] + RERANK))
    single = reach(32768, QUARTERS[0], RERANK, RERANK)
    assert single is not None
    most = max(declared_bits(context, SPARQ_QUARTER) / declared_bits(context, klt(32)) for context in RUNS)
    suite = windows(f"{SHORT}-union", "fathom budget=64 basis=auto attend=union")
    sparq = {one: windows(RUNS[32768], SPARQ_QUARTER + UNION)[one] for one in suite}
    early = {switch: without_added(switch) for switch in (UNION, LESS_BOTH)}
    best = [ratios(switch, OWN) for switch in (OWN, UNION, LESS_BOTH)]
    quarter_bits = declared_bits(90112, SPARQ_QUARTER)
    return {
        "quarter": (
            f"The 136-bit scans are those of a quarter of the channels, {quarter_bits:.1f} bits at this head_dim and "
            f"{2 * quarter_bits:.0f} at 128; bits a channel compare over head_dims."
        ),
        "near": (
            "Windows and all other methods were fixed before; budgets 20, 26 and 28 were added in a second start, after the first had been "
            "looked at, because at 90,112 tokens budget 24 with union missed Double Sparsity's error by a hair "
            f"({near[0]:.4f} against {near[1]:.4f})."
        ),
        "small union": (
            f"**Union lowers the error of every scan**, at no bits and no rows: × {spread(union[90112])} at 90,112 tokens and × "
            f"{spread(union[32768])} at 32,768, over {len(union[90112])} scans in both bases, reranked or not. The smallest budgets "
            f"gain least: × {ends[90112, 16]:.2f} and {ends[32768, 16]:.2f} at budget 16, × {ends[90112, 48]:.2f} and "
            f"{ends[32768, 48]:.2f} at 48. The 136-bit scans gain × {spread(quarter[90112])} and {spread(quarter[32768])}."
        ),
        "small both": (
            f"**Rerank 2 with union** brings the 136-bit scans to × {spread(both[90112][0])} of their own error at 90,112 tokens and × "
            f"{spread(both[32768][0])} at 32,768, for K of {spread(rows[90112], 0)} and {spread(rows[32768], 0)} further "
            f"rows; Fathom's budgets 24 and 32 to × {spread(both[90112][1])} and {spread(both[32768][1])}."
        ),
        "small bytes": (
            f"At equal bytes of a step rerank with union is worse than a larger budget with union: × {spread(bytes_)} the error of that "
            f"line, at the {len(bytes_)} reads that lie within it. With 7 query heads a KV head it saves scan bits, not bytes."
        ),
        "alone": (
            f"Alone Fathom needs {spread(best[0])} times fewer bits, with union {spread(best[1])} times, "
            f"with rerank 1.5 and union {spread(best[2])} times, for K of {spread(less, 0)} further rows."
        ),
        "alone added": (
            f"Without the three budgets that were added, those of {spread(early[UNION][0])} become {early[UNION][1]} and those of "
            f"{spread(early[LESS_BOTH][0])} become {early[LESS_BOTH][1]}."
        ),
        "alike own": (
            f"Own against own Fathom needs {spread(own[0])} times fewer bits than Double Sparsity, {spread(own[1])} than Loki and "
            f"{spread(own[2])} than SparQ; union against union {spread(joint[0])} and {spread(joint[1])}, the same."
        ),
        "alike sparq": (
            f"SparQ with union is reached by no read of these runs, KLT budgets to 48 or raw ones to 64 (the last {raw[90112][0]:.4f} "
            f"against {raw[90112][1]:.4f}, and {raw[32768][0]:.4f} against {raw[32768][1]:.4f}). On the four windows at 32,768 tokens that "
            f"the suite [union](../reports/published/fidelity-qwen-coder-32k-union) has, KLT budget 64 with union does: "
            f"{statistics.fmean(suite.values()):.4f} against {statistics.fmean(sparq.values()):.4f}, "
            f"lower in {sum(suite[one] < sparq[one] for one in suite)} of {len(suite)}, at "
            f"{68 / declared_bits(32768, klt(64)):.2f} times fewer bits, again the same."
        ),
        "alike rerank": (
            "With rerank 2 only budgets 24 and 32 were measured. "
            f"Without union, one of the six scans is reached: Double Sparsity at 32,768 tokens by budget {single.budget}, "
            f"{single.ratio:.2f} times fewer bits and a tie; at 90,112 it is missed by {missed[0]:.4f} against {missed[1]:.4f}. "
            f"With rerank 2 and union none is; budget 32 misses Double Sparsity by {close[90112][0]:.4f} against {close[90112][1]:.4f} and "
            f"{close[32768][0]:.4f} against {close[32768][1]:.4f}. Where none is reached the ratio is below {most:.2f}; by how much, these "
            "runs do not say."
        ),
        "eighth": (
            f"Those two runs have union at budget 48 only, so the 1.19 of SparQ r = D/8 with union is what they hold and no limit. On "
            f"their windows in the runs below, at k = 512: at 90,112 tokens {_eighth(90112)}, at 32,768 {_eighth(32768)}."
        ),
    }
