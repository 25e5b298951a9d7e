"""Every number in the document of the runtime, and in the README of the published steps, is a recorded one or a plain setting."""

from __future__ import annotations

import gzip
import itertools
import re
from pathlib import Path
from statistics import fmean

import pytest

from fathom_eval.offload.bench.duration import PIN_AND_FILL
from fathom_eval.offload.bench.equal_error import equal_error, write_table
from fathom_eval.offload.cache import LONG_SCAN, default_lanes
from fathom_eval.reports import build_report
from tests.recorded_steps import (
    ALONE,
    DOUBLE,
    FATHOM,
    FIDELITY,
    KERNELS,
    LANDMARK,
    LONG,
    PUBLISHED,
    ROOT,
    SPARQ,
    THUMBNAIL,
    as_fast_as,
    batches,
    best_of_sweep,
    contexts,
    equal,
    equal_errors,
    fetches,
    huge,
    in_hbm,
    in_turn,
    kernel,
    lines_of,
    main_table,
    methods,
    of_link,
    one,
    parts,
    rate,
    ratio_line,
    records,
    rerank,
    reranked,
    setting,
    settings,
    targets,
    times_fathom,
    unhidden,
)

RUNTIME, README, FRONT = ROOT / "docs/runtime.md", PUBLISHED / "README.md", ROOT / "README.md"

# Numbers that are no measurement: names, shapes, settings, powers of two.
_SETTINGS = (
    r"Qwen3-8B|8B model|H200|PCIe 5 ×16|32 cores|Fathom 48|Qwen2\.5-Coder-0\.5B|\b136[ -]bits?|48-bit read|nibble scan of 32 channels"
    r"|k = 512|batch 1|\b(?:32|64|128|256|512)k\b|1M"
    r"|\b512 B\b|2 MiB|Qwen[23]\b|90,112 tokens|32,768 tokens|`[^`]*`|\]\([^)]*\)|torch 2\.11|Blocks of 64 tokens|(?:^| )\d\. (?=\*\*)"
    r"|132 programs|Python 3\.12|driver 580\.159\.04|251 GiB free"
)


def phrases() -> dict[str, str]:
    """What the documents say in sentences, by what it is about."""
    main = main_table()
    own, landmark, double = main[FATHOM], main[LANDMARK], main[DOUBLE]
    in_memory = one(LANDMARK, context=LONG, index="hbm")
    spared = unhidden(landmark) - unhidden(own)
    hbm = {label: one(label, context=2**17, index="hbm") for label in (FATHOM, DOUBLE)}
    far = {label: one(label, context=LONG, index="hbm") for label in (FATHOM, DOUBLE)}
    nibble, planes = (kernel(name, "index in HBM", 2**17)["ms"] for name in ("nibble 32 channels", "fathom 48"))
    best = setting("both", 3, 1, 8)
    four, two = setting("both", 4, 1, 8), setting("both", 2, 2, 4)
    plain, gathered, alone = setting("gpu", 4, None, None), setting("both", 4, None, 8), setting("gpu", 1, None, None)
    small, last = lines_of("small-pages.jsonl")[0], [step for step in records() if step["batch"] == 2][-1]
    wins = {basis: float(line["ratio"]) for line in equal_errors() if (basis := line["basis"]) and line["error_context"] == "90112"}
    pair = [one(FATHOM, context=2**17, batch=count) for count in (1, 2, 4)]
    far_pair = [one(FATHOM, context=LONG, batch=count) for count in (1, 2)]
    again = {step["label"]: step for step in reranked()}
    reranked_own = again[f"{FATHOM} rerank=2.0"]
    reranked_24 = again["fathom budget=24 basis=raw rerank=2.0"]
    link = [own[name] / own["link_gb_s"] / 1e6 for name in ("link_bytes", "rows_bytes")]
    weights = own["weight_bytes"] / own["hbm_gb_s"] / 1e6
    link_rates, memory_rates = ([step[name] for step in records()] for name in ("link_gb_s", "hbm_gb_s"))
    spread = f"{own['wall_ms_p10']:.2f} and {own['wall_ms_p90']:.2f} ms"
    floors = [main[label]["floor_ms"] / own["gpu_ms"] for label in (LANDMARK, THUMBNAIL)]
    swept = [best_of_sweep(name) for name in ("fathom 48", "nibble 32 channels")]
    gathers = [ratio_line(context)["scan rate over gather rate"] for context in (LONG, 2**17)]
    copied = kernel("gather of fathom 48's runs")["of_ceiling"]
    slow_fetch, fast_fetch = rate("small", 8, 0, "runs", "after a scan"), rate("small", 8, 132, "ascending", "after a scan")
    return {
        "LINK": f"The link copied {min(link_rates):.1f} to {max(link_rates):.1f} GB/s, the GPU's memory "
        f"{min(memory_rates) / 1e3:.2f} to {max(memory_rates) / 1e3:.2f} TB/s.",
        "APART": f"{own['distinct_layers']} of {own['layers']} layers have buffers of their own",
        "PINNED": f"{own['host_bytes'] / 2**30:.1f} GiB in huge pages, pinned in {own['pin_seconds']:.0f} s and filled in "
        f"{own['fill_seconds']:.0f} s",
        "SPARQ": f"SparQ's target is reached by a hair ({in_turn(main[SPARQ]):.4f}), less than the spread of a step: the wall "
        f"time of Fathom's lay between {spread}.",
        "WON": f"Landmark and thumbnail would be at {floors[0]:.2f} and {floors[1]:.2f} times Fathom's measured step if they ran at "
        "their floors.",
        "LANDMARK": f"Its kernels add up to {landmark['parts_ms']['top_k']:.1f} ms against {own['parts_ms']['top_k']:.1f} of "
        f"Fathom's, but to {in_memory['parts_ms']['top_k']:.1f} with the index in HBM and two lanes: they are slow beside the landmark "
        "scan over the link, and most of that is hidden behind it. What neither scan nor GEMM covers is "
        f"{unhidden(landmark):.1f} ms of landmark's step and {unhidden(own):.1f} of Fathom's; were it the same, landmark would be at "
        f"{(landmark['gpu_ms'] - spared) / own['gpu_ms']:.2f} times Fathom instead.",
        "BATCH": f"One session takes {pair[0]['gpu_ms']:.1f} ms, two take {pair[1]['gpu_ms'] / 2:.1f} each and four "
        f"{pair[2]['gpu_ms'] / 4:.1f}. At 1M two sessions take {far_pair[1]['gpu_ms'] / 2:.1f} ms each against "
        f"{far_pair[0]['gpu_ms']:.1f} alone.",
        "SWEEP": f"planes {planes:.4f} ms and nibbles {nibble:.4f}, {nibble / planes:.2f} times; over a sweep of tilings the best are "
        f"{swept[0]:.4f} and {swept[1]:.4f}, {swept[1] / swept[0]:.2f} times.",
        "HBMSTEP": f"{hbm[FATHOM]['gpu_ms']:.2f} ms against {hbm[DOUBLE]['gpu_ms']:.2f} of double_sparsity at 128k, "
        f"{far[FATHOM]['gpu_ms']:.2f} against {far[DOUBLE]['gpu_ms']:.2f} at 1M.",
        "RERANKCOST": f"The same setting without it took {plain['gpu_ms']:.2f} ms for Fathom 48 (next section), so rerank costs "
        f"{reranked_own['gpu_ms'] - plain['gpu_ms']:.1f} ms there: {reranked_own['parts_ms']['rows']:.1f} ms of rows instead of "
        f"{plain['parts']['rows']:.1f}, and {reranked_own['parts_ms']['rerank']:.1f} of scores. It was timed in another process and "
        f"with fewer layers apart. The small budget's step is {reranked_24['floor_ratio']:.2f} times its floor: its rows take "
        f"{reranked_24['parts_ms']['rows']:.1f} ms, more than its scan of {reranked_24['parts_ms']['scan']:.1f} can hide.",
        "EQUALBEST": f"At 90k tokens Fathom reaches the reference's error {wins['klt']:.2f} times as fast with a Karhunen–Loève basis, "
        f"and {wins['raw']:.2f} times in the model's own channels.",
        "OTHERS": "If a step of theirs took what that of double_sparsity takes, Fathom in that basis would be "
        f"{as_fast_as('sparq r=D/4', 'sparq'):.2f} times as fast at SparQ's error and {as_fast_as('loki r=D/4', 'loki'):.2f} times at "
        "Loki's.",
        "BEST": f"Three lanes with a last one of one head are the fastest ({best['gpu_ms']:.2f} ms), four with such a last one are "
        f"within noise of them ({four['gpu_ms']:.2f}), two with a last one of two take {two['gpu_ms']:.2f}. Who brings the rows and "
        "how small the last lane is matter more than how many there are, until eight are too many.",
        "WAY": f"Fathom's step at 1M takes {own['gpu_ms']:.1f} ms, {own['gpu_ms'] - own['floor_ms']:.1f} more than its floor. Scans run "
        f"for {own['parts_ms']['scan']:.1f} ms, and rows of other lanes cross the link in that time; all bytes of the link, rows "
        f"included, would take {link[0]:.1f} at its copy rate. GEMMs take {own['parts_ms']['gemm']:.1f} where the weights would take "
        f"{weights:.1f}. The other {unhidden(own):.1f} ms are what no scan covers: plan, norms, and top-k, union, rows and attention of "
        "the last lane.",
        "GATHER": f"{gathers[0]:.3f} of it at 1M, {gathers[1]:.3f} at 128k, and that rate is {copied:.3f} of a copy's.",
        "ROWS": f"{own['rows_bytes'] / 1e6:.0f} MB of rows would take {link[1]:.1f} ms at the link's copy rate. The GPU alone fetches "
        f"them in {alone['parts']['rows']:.1f} ms, with one lane.",
        "CPU": f"With four even lanes it took the step from {plain['gpu_ms']:.2f} to {gathered['gpu_ms']:.2f} ms, and with a last lane "
        f"of one head from {setting('gpu', 4, 1, None)['gpu_ms']:.2f} to {four['gpu_ms']:.2f}. For all lanes (`cpu`) it is slower than "
        f"the GPU ({setting('cpu', 4, None, 8)['gpu_ms']:.2f}): the answer for the last lane is waited for.",
        "PIN": f"{last['host_bytes'] / 2**30:.1f} GiB in {last['pin_seconds']:.1f} s, where small ones took "
        f"{small['pin_seconds']:.1f} s for {small['host_bytes'] / 2**30:.1f} GiB.",
        "ORDER": f"from {slow_fetch:.1f} to {fast_fetch:.1f} GB/s after a read",
        "COUNT": f"{len(records())} records",
        "HEADLINE": f"{own['gpu_ms']:.1f} ms for Fathom's 48 bits at 1M tokens on an H200, {own['floor_ratio']:.2f} times what the bytes "
        f"alone would take, and {times_fathom(double, own):.2f} times as fast as a 136-bit scan",
    }


TABLES = {
    RUNTIME: (targets, methods, parts, contexts, batches, in_hbm, rerank, equal, settings, fetches, huge),
    README: (),
}
IN_README = {"LINK", "APART", "PINNED", "COUNT"}
ELSEWHERE = {"COUNT", "HEADLINE"}
"""Of the phrases, those that the README beside the records has, and those that the document of the runtime has not."""


def phrases_of(path: Path) -> list[str]:
    return [text for name, text in phrases().items() if (name in IN_README if path == README else name not in ELSEWHERE)]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_tables_are_the_recorded_ones(path: Path) -> None:
    text = path.read_text(encoding="utf-8").splitlines()
    shown = [line for line, below in itertools.pairwise([*text, ""]) if line.startswith("| ") and "| ---" not in line + below]
    assert shown == [line for made in TABLES[path] for line in made()]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_sentences_hold_no_number_but_recorded_ones(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = " ".join(line for line in text.splitlines() if not line.startswith("|"))
    text = " ".join(text.split())
    for phrase in phrases_of(path):
        assert phrase in text
        text = text.replace(phrase, "")
    assert re.findall(r".{0,30}\d.{0,20}", re.sub(_SETTINGS, "", text)) == []


def test_the_front_page_has_the_recorded_step() -> None:
    assert phrases()["HEADLINE"] in " ".join(FRONT.read_text(encoding="utf-8").split())


def test_what_the_document_concludes_of_the_main_table() -> None:
    main = main_table()
    own = main[FATHOM]
    assert len({step["round"] for step in main.values()}) == 1
    for label in (SPARQ, DOUBLE, LANDMARK, THUMBNAIL):
        assert times_fathom(main[label], own) < main[label]["floor_ms"] / own["floor_ms"], label
    for label, least in ((SPARQ, 1.15), (DOUBLE, 2.0), (LANDMARK, 3.4), (THUMBNAIL, 3.9)):
        assert times_fathom(main[label], own) >= least, label
    assert main[SPARQ]["floor_ms"] / own["floor_ms"] < 1.18
    assert own["floor_ratio"] <= 1.25
    assert all(of_link(main[label]) >= of_link(own) for label in ALONE)
    behind = [label for label, name in ALONE.items() if kernel(name)["of_ceiling"] < kernel("fathom 48")["of_ceiling"]]
    assert behind == [THUMBNAIL]
    assert not any(step["void"] for step in records())


def test_what_the_document_concludes_of_the_other_tables() -> None:
    own = {context: one(FATHOM, context=context) for context in (2**15, 2**16, 2**17, 2**18, 2**19, 2**20)}
    above = [context for context, step in own.items() if step["wall_ms"] / step["gpu_ms"] > 1.03]
    assert above == [2**16, 2**17, 2**18, 2**19]
    sparq = {context: in_turn(one(SPARQ, context=context)) for context in own}
    assert sparq[2**15] < 0.95 < sparq[2**16] < 1.0 < min(sparq[context] for context in (2**17, 2**18, 2**19, 2**20))
    assert one(FATHOM, context=2**17, batch=2)["gpu_ms"] > 2 * own[2**17]["gpu_ms"]
    assert [(step["context"], step["batch"]) for step in records() if step["batch"] > 1] == [(2**17, 2)] * 3 + [(2**17, 4)] * 3 + [
        (LONG, 2)
    ] * 3
    assert {step["lanes"] for step in records() if step["context"] < 2**19 and step["batch"] == 1} == {2}
    own_best = min(float(line["gpu_ms"]) for line in lines_of("settings.jsonl") if "rows" in line)
    assert own_best == setting("both", 3, 1, 8)["gpu_ms"]


def test_defaults_are_what_was_fastest() -> None:
    assert default_lanes(1, 8, LONG, "host") == (3, 1)
    assert LONG_SCAN == 2**19
    own = main_table()[FATHOM]
    assert (own["lanes"], own["last_lane"], own["rows_by"], own["gather_threads"]) == (3, 1, "both", 8)
    most = max((step["pin_seconds"] + step["fill_seconds"]) / (step["host_bytes"] / 2**30) for step in records())
    assert PIN_AND_FILL["huge"] - 0.1 < most <= PIN_AND_FILL["huge"]
    kernel_text = (ROOT / "kernels/rows/triton.py").read_text(encoding="utf-8")
    assert "\nROWS = 8\n" in kernel_text
    assert '"host": 132}' in kernel_text
    best = [rate(pages, 8, 132, "ascending", "after a scan") for pages in ("small", "single", "driver")]
    assert max(best) / min(best) < 1.03
    for pages in ("small", "single", "driver"):
        rates = {
            (size, programs, order): rate(pages, size, programs, order, "after a scan")
            for size in (8, 32)
            for programs in (0, 132, 528)
            for order in ("runs", "ascending")
        }
        assert max(rates, key=lambda key: rates[key]) == (8, 132, "ascending")


def test_times_at_equal_error_are_those_of_the_records() -> None:
    times = {step["label"]: f"{step['gpu_ms']:.6f}" for step in main_table().values()}
    for line in equal_errors():
        assert times[line["step_label"]] == f"{float(line['step_ms']):.6f}"
        assert float(line["ratio"]) == pytest.approx(main_table()[DOUBLE]["gpu_ms"] / float(line["step_ms"]))
        assert float(line["error"]) <= float(line["reference_error"])
        assert float(line["ratio"]) < 3


@pytest.mark.parametrize("length", FIDELITY)
def test_the_times_at_equal_error_are_made_of_both_runs(length: str, tmp_path: Path) -> None:
    rows = equal_error(lines_of("records.jsonl.gz", FIDELITY[length]), records(), "double_sparsity c=D/4")
    write_table(tmp_path / "made.csv", rows)
    assert (tmp_path / "made.csv").read_bytes() == (PUBLISHED / f"equal-error-{length}.csv").read_bytes()
    at_512 = [line for line in lines_of("records.jsonl.gz", FIDELITY[length]) if line["k"] == 512]
    errors = {
        label: fmean(line["error_dense"] for line in at_512 if line["label"] == label)
        for label in ("double_sparsity c=D/4", "sparq r=D/4", "loki r=D/4")
    }
    assert max(errors, key=errors.__getitem__) == "double_sparsity c=D/4"


@pytest.mark.parametrize("folder", [PUBLISHED, KERNELS], ids=lambda path: path.name)
def test_the_tables_beside_are_made_of_the_records(folder: Path, tmp_path: Path) -> None:
    files = build_report([folder], tmp_path / "out")
    made = {path.name: path.read_text(encoding="utf-8") for path in files.tables}
    assert made == {path.name: path.read_text(encoding="utf-8") for path in (folder / "tables").glob("*.csv")}
    assert files.markdown.read_text(encoding="utf-8") == (folder / "results.md").read_text(encoding="utf-8")
    assert sum(path.stat().st_size for path in folder.rglob("*")) < 1_500_000
    assert not list(folder.rglob("*.png"))


def test_nothing_published_names_the_machine_it_was_made_on() -> None:
    for path in (*PUBLISHED.glob("*.[cjlm]*"), PUBLISHED / "report.html"):
        assert not re.search(rb"/tmp/|/root|/opt/|/home/", path.read_bytes()), path.name
    assert not re.search(rb"/tmp/|/root|/opt/|/home/", gzip.decompress((PUBLISHED / "records.jsonl.gz").read_bytes()))
