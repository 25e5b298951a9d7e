"""What the documents say of published runs, computed from what was published: tables line by line, and the sentences that hold numbers."""

from __future__ import annotations

import csv
import gzip
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fathom_eval.equal_bytes import Comparison, compare_at_equal_bytes
from fathom_eval.stats import PairedDifference, paired_difference

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "reports/published"

KLT, RAW, SPARQ, SPARQ_QUARTER = "fathom budget=48 basis=klt", "fathom budget=48 basis=raw", "sparq r=D/8", "sparq r=D/4"
SCANS = (SPARQ, SPARQ_QUARTER, "double_sparsity c=D/4", "loki r=D/4", "landmark size=8")
LONG, SHORT = "fidelity-qwen-coder-90k", "fidelity-qwen-coder-32k"
FIDELITY_SETTINGS = ((SHORT, 32768, 128), (SHORT, 32768, 512), (LONG, 90112, 512), (LONG, 90112, 2048))
SMALL = "fidelity-smollm2"
SESSIONS, RULER = "sessions-qwen-coder-90k", "ruler-qwen-coder-32k"
WIKI, AGENTS = "statistics=wiki@a66343c8ffee", "statistics=agents@e9fc1c11801f"

Row = dict[str, str]


def rows(name: str, file: str = "results.csv") -> list[Row]:
    with (PUBLISHED / name / file).open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def row(name: str, method: str, k: int, file: str = "results.csv", **where: object) -> Row:
    """The one line of a method at a k; dense attention has no k."""
    [found] = [
        one
        for one in rows(name, file)
        if one["method"] == method and one["k"] in (str(k), "") and all(one[key] == str(value) for key, value in where.items())
    ]
    return found


@cache
def records(name: str) -> list[dict[str, Any]]:
    with gzip.open(PUBLISHED / name / "records.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def shown_table(name: str, heading: str) -> list[str]:
    """The table that ``results.md`` has under a heading."""
    text = (PUBLISHED / name / "results.md").read_text(encoding="utf-8").split(f"\n{heading}\n")[1]
    lines = text.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("|"))
    last = next((index for index, line in enumerate(lines) if index > first and not line.startswith("|")), len(lines))
    return lines[first:last]


def signed(value: float, digits: int = 3) -> str:
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{abs(value):.{digits}f}"


def interval(mean: float, low: float, high: float) -> str:
    return f"{signed(mean)} [{signed(low)}, {signed(high)}]"


def escaped(text: str) -> str:
    """As a cell of a Markdown table."""
    return text.replace("[", "\\[").replace("]", "\\]")


# Fidelity.


def reached(name: str, context: int, k: int, scan: str) -> tuple[float, float]:
    """The fewest bits of a plain Fathom read whose mean error to dense is no larger than the scan's, and the scan's bits over them."""
    wanted = row(name, scan, k, context=context)
    reads = [
        (float(one["bits"]), float(one["error_dense"]))
        for one in rows(name)
        if one["context"] == str(context) and one["k"] == str(k) and one["method"].startswith("fathom") and "rerank" not in one["method"]
        if "attend" not in one["method"]
    ]
    bits = min(found for found, error in reads if error <= float(wanted["error_dense"]))
    return bits, float(wanted["bits"]) / bits


def reached_words(scan: str) -> str:
    found = [reached(*setting, scan) for setting in FIDELITY_SETTINGS]
    bits, shares = [one[0] for one in found], [one[1] for one in found]
    return f"{min(bits):.1f} to {max(bits):.1f} bits, {min(shares):.2f} to {max(shares):.2f} times fewer"


def at_equal_bytes(name: str, basis: str, k: int) -> dict[str, Comparison]:
    """Every method beside the plain reads of that basis."""
    found = records(name)
    plain = {one["label"] for one in found if one["method"] == "fathom" and set(one["options"]) <= {"budget", "basis"}}
    line = sorted(label for label in plain if label.endswith(f"basis={basis}"))
    return {one.method: one for one in compare_at_equal_bytes(found, line) if one.k == k}


def ratio(one: Comparison, metric: str) -> str:
    plain = one.plain[metric]
    assert plain is not None
    return f"{one.errors[metric] / plain:.2f}"


SMALL_UNIONS = tuple(f"budget={b} attend=union" for b in (16, 24, 32, 48))
SMALL_RERANKS = tuple(f"budget={b} rerank={r}" for b, r in ((16, "1.5"), (24, "1.5"), (32, "1.5"), (24, "2.0"), (32, "2.0")))
HELPS = (
    (SHORT, "klt", 128, ("budget=32 rerank=2.0", "budget=48 rerank=2.0", "budget=48 attend=union")),
    ("fidelity-qwen-coder-32k-rerank", "auto", 512, tuple(f"budget={b} rerank={r}" for b in (32, 48, 64) for r in ("1.5", "2.0", "3.0"))),
    (f"{SHORT}-small-budgets", "klt", 512, ("budget=16 rerank=1.5", "budget=24 rerank=1.5", *SMALL_UNIONS)),
    ("fidelity-qwen-coder-32k-union", "auto", 512, ("budget=64 attend=union",)),
    (f"{LONG}-small-budgets", "klt", 512, (*SMALL_RERANKS, *SMALL_UNIONS)),
    (LONG, "klt", 512, ("budget=48 rerank=2.0",)),
    (LONG, "klt", 2048, ("budget=48 attend=union",)),
)


def helps() -> list[str]:
    """Fathom's reads with a switch beside those without at the same bytes of a step."""
    lines = [
        "| tokens | k | k ÷ tokens | windows | read | bits | further K rows | × plain to dense | × plain to exact top-k |",
        "| ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for name, basis, k, reads in HELPS:
        found = at_equal_bytes(name, basis, k)
        windows = len({one["sample"] for one in records(name)})
        for read in reads:
            budget, switch = read.split()
            one = found[f"fathom {budget} basis={basis} {switch}"]
            lines.append(
                f"| {one.context:,} | {k:,} | {100 * k / one.context:.2f} % | {windows} | {read} | {one.bits:.1f} | "
                f"{one.candidate_rows:,.0f} | "
                f"{ratio(one, 'error_dense')} | {ratio(one, 'error_exact')} |"
            )
    return lines


SWITCHES = (
    f"{KLT} rerank=2.0",
    f"{KLT} attend=union",
    f"{KLT} scales=fp8",
    f"{KLT.replace(' basis=klt', ' basis=klt by_ratio=True')}",
    RAW,
    "fathom budget=56 basis=raw depths=measured",
)


def small_at_equal_bytes(k: int) -> dict[str, Comparison]:
    """The small model's methods at 4,096 tokens beside plain KLT reads; from its table, since its records are not published."""
    keys = ("bits", "rows", "candidate_rows", "error_dense", "error_exact")
    found = [
        {"finish": "complete", "context": 4096, "k": k, "label": one["method"], "control": False, "head_dim": int(one["head_dim"])}
        | {key: float(one[key]) for key in keys}
        for one in rows(SMALL)
        if one["context"] == "4096" and one["k"] == str(k) and one["control"] == "False" and one["bits"]
    ]
    line = [f"fathom budget={budget} basis=klt" for budget in (40, 48, 64, 80, 128)]
    return {one.method: one for one in compare_at_equal_bytes(found, line)}


def small_helps() -> list[str]:
    """Fathom's switches on the small model, which has them all in one run."""
    lines = [
        "| read | bits, k = 64 | × plain to dense | × plain to exact top-k | bits, k = 128 | × plain to dense | × plain to exact top-k |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for method in SWITCHES:
        cells = []
        for k in (64, 128):
            one = small_at_equal_bytes(k)[method]
            cells += [f"{one.bits:.1f}", ratio(one, "error_dense"), ratio(one, "error_exact")]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


DOMAIN, TEXT, TRANSCRIPTS = "calibration-domain-smollm2", "statistics=text@198e9f89e29d", "statistics=transcripts@5d30ccb07a65"


def calibration_errors() -> list[str]:
    """Error to dense by where the statistics come from: the counterpart of Table 22."""
    found = {one["method"]: one for one in rows(DOMAIN)}
    lines = ["| method | of text | of transcripts | of the prefix's own keys |", "| --- | ---: | ---: | ---: |"]
    for method in (*(f"fathom budget={budget} basis=auto" for budget in (48, 64, 80)), "double_sparsity c=D/4"):
        cells = []
        for name in (f"{method} {TEXT}", f"{method} {TRANSCRIPTS}", method):
            one = found[name]
            cells.append(f"{float(one['error_dense']):.4f} ± {float(one['error_dense_se']):.4f}")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


def paired_errors(method: str, other: str) -> tuple[float, float, float]:
    """Error to dense of a method less another's, paired by window, with the interval."""
    own, others = ({one["sample"]: one["error_dense"] for one in records(DOMAIN) if one["label"] == name} for name in (method, other))
    assert own.keys() == others.keys()
    found = paired_difference([own[one] for one in sorted(own)], [others[one] for one in sorted(own)], seed=0)
    return found.mean, found.low, found.high


# Sessions.


def agreement(method: str, k: int) -> str:
    found = row(SESSIONS, method, k)
    return f"{float(found['agreement']):.3f} ± {float(found['standard_error']):.3f}"


def session_difference(method: str, other: str, k: int) -> tuple[str, str]:
    """The paired difference with its interval, and wins, ties and losses."""
    for one in rows(SESSIONS, "paired.csv"):
        if one["k"] == str(k) and {one["method"], one["other"]} == {method, other}:
            mean, low, high = (float(one[key]) for key in ("difference", "difference_low", "difference_high"))
            counts = [one["wins"], one["ties"], one["losses"]]
            if one["method"] != method:
                mean, low, high, counts = -mean, -high, -low, counts[::-1]
            return interval(mean, low, high), " / ".join(counts)
    raise KeyError((method, other, k))


def calibration_table() -> list[str]:
    """Agreement by where the statistics come from: the counterpart of Table 23."""
    lines = [
        "| method | k | of text | of transcripts | of the session's own keys | session minus text | session minus transcripts |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for method in (KLT, "double_sparsity c=D/4"):
        for k in (512, 2048):
            sources = [f"{method} {WIKI}", f"{method} {AGENTS}"]
            cells = [*(agreement(one, k) for one in (*sources, method)), *(session_difference(method, one, k)[0] for one in sources)]
            lines.append(f"| {method} | {k:,} | {' | '.join(map(escaped, cells))} |")
    return lines


# Tasks.


def ruler_score(method: str, k: int) -> Row:
    return row(RULER, method, k, "overview.csv")


@cache
def ruler_scores(k: int) -> dict[str, dict[tuple[str, int], float]]:
    found: dict[str, dict[tuple[str, int], float]] = {}
    for one in records(RULER):
        if one["k"] == k:
            found.setdefault(one["label"], {})[one["task"], one["sample"]] = one["score"]
    return found


def ruler_difference(method: str, other: str, k: int) -> PairedDifference:
    """Over all tasks, every task alike, as the report compares with exact top-k."""
    own, others = ruler_scores(k)[method], ruler_scores(k)[other]
    shared = sorted(own)
    assert shared == sorted(others)
    sizes = Counter(task for task, _ in shared)
    weights = [1 / sizes[task] for task, _ in shared]
    return paired_difference([own[one] for one in shared], [others[one] for one in shared], weights=weights, seed=0)


def ruler_interval(method: str, other: str, k: int) -> str:
    found = ruler_difference(method, other, k)
    return interval(found.mean, found.low, found.high)


def table_seven() -> list[str]:
    """Mean scores at k = 128 beside the paper's at 32k tokens."""
    with (ROOT / "reports/paper_data/values.csv").open(encoding="utf-8") as file:
        paper = {one["ours"]: one for one in csv.DictReader(file) if (one["table"], one["model"]) == ("7", "Qwen3-8B")}
    lines = ["| method | bits | score | minus exact top-k | paper, bits | paper, score |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for one in rows(RULER, "overview.csv"):
        if one["k"] not in ("", "128"):
            continue
        theirs = paper.get(one["method"])
        difference = [float(one[f"minus_exact_top_k{end}"]) for end in ("", "_low", "_high")] if one["minus_exact_top_k"] else []
        mark = "" if not difference else " ▼" if difference[2] < 0 else " ▲" if difference[1] > 0 else ""
        cells = [
            f"{float(one['bits']):.1f}" if one["bits"] else "",
            f"{float(one['score']):.3f} ± {float(one['standard_error']):.3f}{mark}",
            escaped(interval(*difference)) if difference else "",
            theirs["bits"] if theirs else "",
            f"{theirs['value']} ± {theirs['error']}" if theirs else "",
        ]
        lines.append(f"| {one['method']} | {' | '.join(cells)} |")
    return lines


def separated(k: int, below: bool = True) -> Sequence[str]:
    """The scans whose paired interval lies below (or above) exact top-k."""
    found = [one for one in rows(RULER, "overview.csv") if one["k"] == str(k) and one["minus_exact_top_k"]]
    end = "minus_exact_top_k_high" if below else "minus_exact_top_k_low"
    return [one["method"] for one in found if (float(one[end]) < 0 if below else float(one[end]) > 0)]


TABLES = "fidelity-smollm2-depth-tables"


def depth_tables_words() -> str:
    """What depths of measured distortion change in the KLT basis at equal bytes."""
    found = at_equal_bytes(TABLES, "klt", 128)
    measured = [one for label, one in found.items() if label.endswith("depths=measured")]
    dense, exact = ([float(ratio(one, metric)) for one in measured] for metric in ("error_dense", "error_exact"))
    return (
        f"In the KLT basis, over {len(measured)} budgets at k = 128, they give × {min(dense):.2f} to {max(dense):.2f} to dense and "
        f"× {min(exact):.2f} to {max(exact):.2f} to exact top-k"
    )


AGENT_SESSION, LOCK_STEP = (PUBLISHED / "scale-h200" / name for name in ("agent-session.json", "lock-step.json"))
PARTS = {
    "whole session, s": ("seconds", 1),
    "its prefill": ("prefill_seconds", 1),
    "its stores": ("stores_seconds", 1),
    "its steps, in lock-step": ("decode_seconds", 1),
    "its noise floor": ("noise_floor_seconds", 1),
    "whole session without the noise floor, s": ("without_noise_floor_seconds", 1),
    "a step in lock-step, ms": ("lockstep_ms_a_step", 1),
    "a step of dense attention alone, ms": ("dense_ms_a_step", 1),
    "ratio of the two": ("ratio", 2),
    "most GPU memory at once, GiB": ("peak_gpu_gib", 1),
}


def timed_session() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(AGENT_SESSION.read_text(encoding="utf-8"))
    return found


def of_turns(name: str, digits: int, first: int = 0) -> str:
    """The least and the most of all turns from one on."""
    values = [turn[name] for turn in timed_session()["turns"][first:]]
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def session_times() -> list[str]:
    """What a session took: the first turn, and median, least and most of those after it."""
    lines = ["| | first turn | median of the four after it | least to most of these |", "| --- | ---: | ---: | ---: |"]
    turns = timed_session()["turns"]
    for title, (name, digits) in PARTS.items():
        median = statistics.median(turn[name] for turn in turns[1:])
        lines.append(f"| {title} | {turns[0][name]:.{digits}f} | {median:.{digits}f} | {of_turns(name, digits, 1)} |")
    return lines


def session_time_words() -> dict[str, str]:
    found, step = timed_session(), json.loads(LOCK_STEP.read_text(encoding="utf-8"))
    branches, profile = found["branches"], step["profile"]
    return {
        "setting": (
            f"One session of {found['prompt_tokens']:,} tokens of the model and the conversations above, bfloat16, {branches} methods at "
            f"k = {found['k'][0]}, {found['new_tokens']} new tokens each, five times in one process on one {found['device']} (torch 2.11; "
            "`benchmarks/agent_session.py`, [recorded](../reports/published/scale-h200))."
        ),
        "before": (
            f"Loading the model took {found['loading_seconds']:.1f} s and assembling the session {found['assembling_seconds']:.1f} s "
            "before, once for a run; the report comes after it."
        ),
        "aims": (
            f"The aims were under 60 s and a ratio of at most 4. Every turn is within both: {of_turns('seconds', 1)} s, and a step of "
            f"{branches} methods takes {of_turns('ratio', 1)} times as long as one of dense attention alone."
        ),
        "floor": (
            f"The noise floor is dense attention and exact top-k once more, each decoded alone: {of_turns('noise_floor_seconds', 1)} s, "
            f"more than the steps of the {branches} methods together, {of_turns('decode_seconds', 1)} s. Without it a later turn takes "
            f"{of_turns('without_noise_floor_seconds', 1, 1)} s."
        ),
        "host": (
            f"The host. In the [profile](../reports/published/scale-h200/lock-step.json) of a lock-step with the same methods at "
            f"{step['context']:,} tokens, random weights of that shape, the GPU computes {profile['branches']['gpu_ms_a_step']:.1f} of "
            f"{step['branches_ms_a_step']['median']:.1f} ms a step, and {profile['dense']['gpu_ms_a_step']:.1f} of "
            f"{step['dense_ms_a_step']['median']:.1f} ms for dense attention alone; in the rest it waits for launches, "
            f"{profile['branches']['launches_a_layer']:.0f} a layer and {profile['dense']['launches_a_layer']:.0f}."
        ),
        "not profiled": (
            f"The session itself, whose steps took {of_turns('lockstep_ms_a_step', 1)} ms, was not profiled, and five turns on one machine "
            "say nothing of another host."
        ),
    }
