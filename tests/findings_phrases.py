"""What the documents on errors, sessions and tasks say of the published runs in sentences, with every number in them computed."""

from __future__ import annotations

import csv

from tests.findings import (
    AGENTS,
    KLT,
    LONG,
    RAW,
    ROOT,
    SESSIONS,
    SMALL,
    SPARQ,
    SPARQ_QUARTER,
    TEXT,
    TRANSCRIPTS,
    WIKI,
    agreement,
    at_equal_bytes,
    depth_tables_words,
    helps,
    interval,
    paired_errors,
    ratio,
    reached_words,
    row,
    rows,
    ruler_interval,
    ruler_score,
    separated,
    session_difference,
    session_time_words,
    signed,
    small_at_equal_bytes,
)
from tests.small_budgets import small_budget_phrases

SCALES, MEASURED, BY_RATIO = f"{KLT} scales=fp8", "fathom budget=56 basis=raw depths=measured", f"{KLT} by_ratio=True"
UNION, RERANK = f"{KLT} attend=union", f"{KLT} rerank=2.0"
SIXTY_FOUR, DOUBLE, LOKI, LANDMARK = "fathom budget=64 basis=klt", "double_sparsity c=D/4", "loki r=D/4", "landmark size=8"


def error(name: str, method: str, context: int, k: int) -> str:
    return f"{float(row(name, method, k, context=context)['error_dense']):.3f}"


def bits(name: str, method: str, context: int, k: int) -> str:
    return f"{float(row(name, method, k, context=context)['bits']):.1f}"


def span(values: list[str]) -> str:
    return f"{min(values)} to {max(values)}"


def fidelity_phrases() -> dict[str, str]:
    lines = helps()
    unions = [line.split(" | ")[-2] for line in lines if "attend=union" in line]
    reranks = {
        share: [line.split(" | ")[-2] for line in lines if "rerank" in line and f"| {share} %" in line]
        for share in ("0.39", "0.57", "1.56")
    }
    unions_of_16 = [line.split(" | ")[-2] for line in lines if "budget=16 attend=union" in line]
    [smallest] = [line.split(" | ")[-2] for line in lines if "budget=16 rerank" in line and "| 32,768 |" in line]
    suite = at_equal_bytes("fidelity-qwen-coder-32k-rerank", "auto", 512)["fathom budget=32 basis=auto rerank=3.0"]
    small = {k: small_at_equal_bytes(k) for k in (64, 128)}
    dense = {(k, name): ratio(small[k][name], "error_dense") for k in small for name in (RERANK, SCALES, MEASURED, RAW)}
    exact = [error(LONG, method, 90112, 512) for method in ("exact attend=union", "exact")]
    plain = at_equal_bytes(LONG, "klt", 512)[KLT]
    long = [(error(LONG, scan, 90112, 512), error(LONG, f"{scan} rerank=2.0", 90112, 512)) for scan in (KLT, SPARQ)]
    return {
        "depth tables": depth_tables_words(),
        "sparq8": f"**SparQ r = D/8**, 34.0 bits: Fathom needs {reached_words(SPARQ)}.",
        "sparq4": f"**SparQ r = D/4**, 68.0 bits: {reached_words(SPARQ_QUARTER)}.",
        "double": f"**Double Sparsity c = D/4**, 68.0 bits: {reached_words(DOUBLE)}.",
        "loki": f"**Loki r = D/4**, 68.0 bits: {reached_words(LOKI)}.",
        "landmark": f"**Block landmarks of 8 tokens**, 128.0 bits: {reached_words(LANDMARK)}.",
        "full": "No read of these budgets reaches the scan of all four planes, 272.0 bits.",
        "tie": (
            "At 90,112 tokens and k = 512 the landmarks and the read that reaches them are a tie, "
            f"{error(LONG, LANDMARK, 90112, 512)} both."
        ),
        "basis": (
            f"The reads are KLT reads throughout: at the same {bits(LONG, KLT, 90112, 512)} bits the raw basis has an error of "
            f"{error(LONG, RAW, 90112, 512)} there and the KLT basis {error(LONG, KLT, 90112, 512)}."
        ),
        "union": f"× {span(unions)} to dense in every row.",
        "union oracle": (
            f"Exact top-k gains by it as well ({exact[0]} instead of {exact[1]} at 90,112 tokens, k = 512), so compare a scan with the "
            "union of exact top-k."
        ),
        "union rows": f"least at the smallest budgets, × {unions_of_16[0]} and {unions_of_16[1]} at budget 16.",
        "rerank": (
            f"× {span(reranks['0.39'])} at k ÷ tokens = 0.39 %, {span(reranks['0.57'])} at 0.57 %, where only budget 48 gains, and "
            f"{span(reranks['1.56'])} at 1.56 %, where more candidates are worse still (× {ratio(suite, 'error_dense')} for three times k "
            f"and budget 32) and the smallest budget loses as much by fewer (× {smallest} for 1.5 times k and budget 16)."
        ),
        "rerank small": (
            f"SmolLM2, with 3 query heads a KV head and not 7, gains by it at 1.56 % (× {dense[64, RERANK]}) and hardly at 3.12 % "
            f"(× {dense[128, RERANK]})."
        ),
        "rerank bits": (
            "In scan bits alone it looks better than it is: at 90,112 tokens and k = 512 twice k candidates lower the error from "
            f"{long[0][0]} to {long[0][1]} for Fathom's {plain.bits:.1f} bits and from {long[1][0]} to {long[1][1]} for SparQ's 34.0."
        ),
        "rerank long": "At k = 2,048 a reranked step reads more bytes than the plain line here reaches.",
        "fp8": (f"two bits of {small[128][KLT].bits:.1f} at an error that stays the same: × {dense[64, SCALES]} and {dense[128, SCALES]}."),
        "measured": (
            f"× {dense[64, MEASURED]} and {dense[128, MEASURED]}, where the plain raw read has {dense[64, RAW]} and {dense[128, RAW]}."
        ),
        "by ratio": (
            f"of budget 48 it makes {small[64][BY_RATIO].bits:.1f} bits at k = 64 and {small[128][BY_RATIO].bits:.1f}, which is budget 40, "
            "at k = 128."
        ),
        "domain": (
            "For Fathom's 48, 64 and 80 a calibration on text costs "
            + listed(
                [interval_of(f"fathom budget={budget} basis=auto {TEXT}", f"fathom budget={budget} basis=auto") for budget in (48, 64, 80)]
            )
            + ", one on transcripts "
            + listed(
                [
                    interval_of(f"fathom budget={budget} basis=auto {TRANSCRIPTS}", f"fathom budget={budget} basis=auto")
                    for budget in (48, 64, 80)
                ]
            )
            + ", paired by window."
        ),
        "domain double": (
            f"For Double Sparsity text costs {interval_of(f'{DOUBLE} {TEXT}', DOUBLE)}, transcripts "
            f"{interval_of(f'{DOUBLE} {TRANSCRIPTS}', DOUBLE)}."
        ),
        **small_budget_phrases(),
    }


def interval_of(method: str, other: str) -> str:
    mean, low, high = paired_errors(method, other)
    return f"{signed(mean, 4)} [{signed(low, 4)}, {signed(high, 4)}]"


def small_phrases() -> dict[str, str]:
    """Of the table of the small model at 4,096 tokens and k = 128."""

    def of(method: str) -> str:
        return f"{float(row(SMALL, method, 128, context=4096)['error_dense']):.3f}"

    def fetched(method: str) -> str:
        return f"{float(row(SMALL, method, 128, context=4096)['rows']):.0f}"

    lsh = "bits=10 tables=150 seed=0 (k: of the oracle only)"
    return {
        "infinigen": (
            "InfiniGen ranks ahead of a layer's own query. With the query that the layer before made (`infinigen`) its error is "
            f"{of('infinigen r=D/4')}, with the layer before's input through this layer's projection, as the authors do "
            f"(`query=rehearsed`), {of('infinigen r=D/4 query=rehearsed')}, and with the own query, the upper bound of the idea, "
            f"{of('infinigen r=D/4 query=own')}."
        ),
        "magicpig": (
            f"MagicPIG decides itself how many tokens it attends to, k∪ {fetched(f'magicpig {lsh}')} and as published "
            f"{fetched(f'magicpig_published {lsh}')} here, so its rows are not at k = 128; its bits are the bucket entries touched."
        ),
        "indexes": (
            "The indexes of `retrieval_attention` find what they look for at the price of the keys that they touch: "
            f"{bits(SMALL, 'retrieval_attention kind=hnsw', 4096, 128)} bits for a recall of "
            f"{float(row(SMALL, 'retrieval_attention kind=hnsw', 128, context=4096)['recall']):.3f} (HNSW)."
        ),
    }


def listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def marked(k: int, below: bool) -> str:
    """The scans that separate from the baseline, with the difference."""
    found = [
        (one["method"].replace(f" {WIKI}", " of text").replace(f" {AGENTS}", " of transcripts"), float(one["difference"]))
        for one in rows(SESSIONS)
        if one["k"] == str(k) and one["role"] == "scan" and one["difference"]
        if (float(one["difference_high"]) < 0 if below else float(one["difference_low"]) > 0)
    ]
    return listed([f"{name} ({signed(difference)})" for name, difference in found])


def sessions_phrases() -> dict[str, str]:
    with (ROOT / "reports/paper_data/values.csv").open(encoding="utf-8") as file:
        paper = {one["method"]: f"{one['value']} ± {one['error']}" for one in csv.DictReader(file) if one["table"] == "23"}
    plain, quarter = session_difference(KLT, SPARQ, 512)[0], session_difference(KLT, SPARQ_QUARTER, 512)[0]
    lifted, counts = session_difference(RERANK, KLT, 512)
    wins, ties, losses = counts.split(" / ")
    alone = {(k, name): f"{float(row(SESSIONS, f'{name}, alone', k)['agreement']):.3f}" for k in (512, 2048) for name in ("dense", "exact")}
    return {
        "k512": f"k = 512: above SparQ r = D/8 lie {marked(512, below=False)}; below it {marked(512, below=True)}.",
        "plain": (
            f"Fathom's plain 28.5-bit read, {agreement(KLT, 512)}, separates neither from SparQ's 34.0 bits ({plain}) nor from SparQ's "
            f"68.0 ({quarter})."
        ),
        "rerank": (
            f"Reranking lifts that read by {lifted}: {wins} wins, {ties} ties, {losses} loss; it is then where SparQ r = D/4 is, "
            f"{agreement(SPARQ_QUARTER, 512)}."
        ),
        "k2048": (
            f"k = 2,048: nothing lies above SparQ r = D/8; below it {marked(2048, below=True)}. The other scans are not told apart from it "
            "by these sessions."
        ),
        "noise": (
            f"Noise floor: dense attention alone agrees {alone[512, 'dense']} with itself, exact top-k {alone[512, 'exact']} at k = 512 "
            f"(one session went another way) and {alone[2048, 'exact']} at k = 2,048."
        ),
        "own": (
            "At k = 512 Fathom's read agrees more with the session's own statistics than with those of transcripts "
            f"({session_difference(KLT, f'{KLT} {AGENTS}', 512)[0]}); from those of text it is not separated, nor are any two for Double "
            "Sparsity."
        ),
        "paper": (
            f"The paper, on Qwen2.5-7B-Instruct-1M at k = 512, has {paper['Fathom 48']} with text, {paper['Fathom 48, agent-calibrated']} "
            f"with transcripts and {paper['Fathom 48, session-calibrated']} with the session for Fathom 48; "
            f"{paper['Double Sparsity c=32']} and {paper['Double Sparsity c=32, agent-calibrated']} for Double Sparsity."
        ),
        **session_time_words(),
    }


def ruler_phrases() -> dict[str, str]:
    def below(k: int) -> str:
        named = [f"{name} ({signed(float(ruler_score(name, k)['minus_exact_top_k']))})" for name in separated(k)]
        return f"k = {k}: {len(named)} of 12 scans lie below it: {listed(named)}."

    def apart(method: str, other: str) -> list[str]:
        return [ruler_interval(method, other, k) for k in (64, 128, 512)]

    small = [one for one in rows("ruler-smollm2-2048", "overview.csv") if one["minus_exact_top_k"]]
    over = [one["method"] for one in small if one["k"] == "128" and float(one["minus_exact_top_k_low"]) > 0]
    dense = [interval(*(-float(ruler_score("exact", k)[f"minus_dense{end}"]) for end in ("", "_high", "_low"))) for k in (64, 128, 512)]
    sparq, raw, quarter = apart(KLT, SPARQ), apart(KLT, RAW), apart(SPARQ_QUARTER, SIXTY_FOUR)
    return {
        **{f"k{k}": below(k) for k in (64, 128, 512)},
        "fathom": (
            "Fathom's 28.7-bit KLT read lies below exact top-k at all three k, SparQ's 34.0 bits at k = 64 only. Set against each other "
            f"the two do not separate: {sparq[0]}, {sparq[1]} and {sparq[2]}. Its lower error of attention outputs "
            "([fidelity](fidelity.md)) is not found again in these scores."
        ),
        "basis": f"Nor is that of the KLT basis: the KLT read minus the raw one is {raw[0]}, {raw[1]}, which is below, and {raw[2]}.",
        "quarter": (
            f"SparQ's 68.0 bits lie above Fathom's 37.9 by {quarter[0]} at k = 64 and are not separated from them at k = 128 and 512: "
            f"{quarter[1]}, {quarter[2]}. Double Sparsity, Loki r = D/4 and landmarks, with 68.0 to 128.0 bits, lie below exact top-k at "
            "every k."
        ),
        "dense": f"Selection itself costs: dense attention minus exact top-k is {dense[0]}, {dense[1]} and {dense[2]}.",
        "paper": (
            "There every scan but the landmarks scores within a standard error of exact top-k, or above it; here Double Sparsity falls "
            "behind too, and so do Loki r = D/4 and Fathom's KLT reads, which that table does not have for its model."
        ),
        "small": (
            f"At k = 128 {len(over)} of its 12 scans score above exact top-k by their intervals, {listed(over)}: to miss some of the k "
            "tokens cannot be a merit, so at k = 128 these scores say little of scans."
        ),
    }
