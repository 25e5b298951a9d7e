"""Every number in the document of the runtime, and in the READMEs of the published steps, is a recorded one or a plain setting."""

from __future__ import annotations

import csv
import gzip
import itertools
import math
import re
from pathlib import Path

import pytest

from fathom_eval.offload.bench.duration import PIN_AND_FILL
from fathom_eval.offload.bench.equal_error import equal_error, write_table
from fathom_eval.offload.cache import LONG_SCAN, default_lanes
from fathom_eval.reports import build_report
from tests.recorded_equal_errors import (
    FIDELITY,
    equal,
    equal_lines,
    gathering,
    plain_ratio,
    rerank,
    wall_ratio,
    windows,
)
from tests.recorded_evaluation import decoded_twice, evaluations
from tests.recorded_fetches import fetches, huge, rate
from tests.recorded_names import (
    DOUBLE,
    DOUBLE_4,
    EQUAL,
    FATHOM,
    KERNELS,
    LANDMARK,
    LOKI_4,
    LONG,
    PACED,
    PACED_EQUAL,
    PUBLISHED,
    ROOT,
    SPARQ,
    SPARQ_4,
    THUMBNAIL,
)
from tests.recorded_pacing import pacing, swept, unpaced
from tests.recorded_phrases import all_phrases
from tests.recorded_steps import (
    ALONE,
    batched,
    batches,
    contexts,
    equal_steps,
    in_hbm,
    in_turn,
    kernel,
    lane,
    lines_of,
    main_table,
    methods,
    of_link,
    one,
    other_rounds,
    paced,
    paced_equal,
    parts,
    ratios,
    ratios_elsewhere,
    records,
    setting,
    settings,
    side_by_side,
    targets,
    times_fathom,
)

RUNTIME, FRONT = ROOT / "docs/runtime.md", ROOT / "README.md"
README, EQUAL_README = PUBLISHED / "README.md", EQUAL / "README.md"
PACED_README, PACED_EQUAL_README = PACED / "README.md", PACED_EQUAL / "README.md"

# Numbers that are no measurement: names, shapes, settings, powers of two.
_SETTINGS = (
    r"Qwen3-8B|8B model|H200|PCIe 5 ×16|32 cores|Fathom 48|Qwen2\.5-Coder-0\.5B|\b136[ -]bits?|48-bit read|nibble scan of 32 channels"
    r"|k = 512|batch 1|\b(?:32|64|128|256|512)k\b|1M"
    r"|\b512 B\b|2 MiB|Qwen[23]\b|90,112 tokens|32,768 tokens|`[^`]*`|\]\([^)]*\)|torch 2\.11|Blocks of 64 tokens|(?:^| )\d\. (?=\*\*)"
    r"|132 programs|Python 3\.12|driver 580\.159\.04|251 GiB free|16 cores|128 GiB|SmolLM2|budgets below 24"
)

TABLES = {
    RUNTIME: (
        *(targets, methods, parts, contexts, batches, side_by_side, in_hbm),
        *(rerank, equal, settings, gathering, fetches, huge, pacing),
    ),
    README: (),
    EQUAL_README: (),
    PACED_README: (),
    PACED_EQUAL_README: (),
}
BESIDE = {
    README: {"BEFORELINK", "BEFOREAPART", "BEFOREPINNED", "COUNT"},
    EQUAL_README: {"EQUALCOUNT", "EQUALFIRST", "EQUALAPART", "EQUALAPART2"},
    PACED_README: {"LINK", "APART", "PINNED", "PACEDCOUNT", "CASES", "CHECKS"},
    PACED_EQUAL_README: {"EQUALPACED"},
}
"""Of the phrases, those that the README beside the records has."""
ELSEWHERE = {"HEADLINE", *BESIDE[EQUAL_README], *BESIDE[README], *BESIDE[PACED_EQUAL_README], "PACEDCOUNT", "CASES", "CHECKS"}
"""Those that the document of the runtime has not."""


def phrases_of(path: Path) -> list[str]:
    return [text for name, text in all_phrases().items() if (name in BESIDE[path] if path in BESIDE else name not in ELSEWHERE)]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_are_the_recorded_ones(path: Path) -> None:
    text = path.read_text(encoding="utf-8").splitlines()
    shown = [line for line, below in itertools.pairwise([*text, ""]) if line.startswith("| ") and "| ---" not in line + below]
    assert shown == [line for made in TABLES[path] for line in made()]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_hold_no_number_but_recorded_ones(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = " ".join(line for line in text.splitlines() if not line.startswith("|"))
    text = " ".join(text.split())
    for phrase in phrases_of(path):
        assert phrase in text
        text = text.replace(phrase, "")
    assert re.findall(r".{0,30}\d.{0,20}", re.sub(_SETTINGS, "", text)) == []


def test_the_front_page_has_the_recorded_step() -> None:
    assert all_phrases()["HEADLINE"] in " ".join(FRONT.read_text(encoding="utf-8").split())


def test_what_the_document_concludes_of_the_main_table() -> None:
    main = main_table()
    own = main[FATHOM]
    assert len({step["round"] for step in main.values()}) == 1
    for label in (SPARQ, DOUBLE, LANDMARK, THUMBNAIL):
        assert times_fathom(main[label], own) < main[label]["floor_ms"] / own["floor_ms"], label
    for label, least in ((SPARQ, 1.15), (DOUBLE, 2.0), (LANDMARK, 3.4), (THUMBNAIL, 3.9)):
        assert times_fathom(main[label], own) >= least, label
    assert main[SPARQ]["floor_ms"] / own["floor_ms"] < 1.18
    assert unpaced(LANDMARK)["gpu_ms"] >= 3.4 * own["gpu_ms"], "the target is not reached by the pace alone"
    before = {step["label"]: step["gpu_ms"] for step in swept(start=3, paced=0)}
    longer = [step["label"] for step in (*main.values(), *paced_equal()) if step["gpu_ms"] > before.get(step["label"], math.inf)]
    assert longer == [LANDMARK, "fathom budget=16 basis=klt attend=union"]
    assert own["floor_ratio"] <= 1.25
    assert all(of_link(main[label]) >= of_link(own) for label in ALONE)
    behind = [label for label, name in ALONE.items() if kernel(name)["of_ceiling"] < kernel("fathom 48")["of_ceiling"]]
    assert behind == [THUMBNAIL]
    assert not any(step["void"] for step in (*records(), *paced(), *other_rounds()))


def test_what_the_document_concludes_of_the_other_tables() -> None:
    own = {context: one(FATHOM, paced(), context=context) for context in (2**15, 2**16, 2**17, 2**18, 2**19, LONG)}
    assert {step["rows_by"] for step in paced()} == {"gpu"}
    above = [context for context, step in own.items() if step["wall_ms"] / step["gpu_ms"] > 1.03]
    assert above == [2**16, 2**17, 2**18]
    elsewhere = [step["wall_ms"] / step["gpu_ms"] for step in other_rounds() if step["label"] == FATHOM]
    assert max(elsewhere) < own[LONG]["wall_ms"] / own[LONG]["gpu_ms"] < 1.03
    sparq = {context: in_turn(one(SPARQ, paced(), round=step["round"])) for context, step in own.items()}
    assert sparq[2**15] < sparq[2**16] < 1.0 < min(sparq[context] for context in (2**17, 2**18, 2**19, LONG))
    fewer = {context: one(SPARQ, paced(), context=context)["rows_bytes"] / own[context]["rows_bytes"] for context in own}
    assert max(fewer.values()) < 0.95
    assert [(step["context"], step["batch"]) for step in batched()] == [
        (context, count) for context in (2**17, LONG) for count in (2, 4) for _ in range(3)
    ]
    assert not any(step["void"] for step in (*equal_steps(), *lines_of("lanes.jsonl"), *lines_of("again.jsonl")))
    slower = [
        step["label"]
        for step in paced()
        if step["sessions"] > 1 and step["wall_ms"] > one(step["label"], context=LONG, sessions=step["sessions"])["wall_ms"]
    ]
    assert len(slower) > 3


def test_what_the_document_concludes_of_other_rounds() -> None:
    main = main_table()
    for time in ("gpu_ms", "wall_ms"):
        assert all(ratio >= 1.15 for ratio in (*ratios([SPARQ], time), main[SPARQ][time] / main[FATHOM][time]))
    assert len(ratios([SPARQ])) == 2
    assert all(2.0 <= ratio < 2.15 for ratio in (*ratios([DOUBLE, DOUBLE_4]), *ratios_elsewhere(DOUBLE_4), in_turn(main[DOUBLE])))
    assert all(ratio < 1.15 for ratio in ratios_elsewhere("sparq r=D/8"))
    again = [step for step in lines_of("records.jsonl.gz", EQUAL) if step["round"] == equal_steps()[0]["round"]]
    assert all(step in equal_steps() for step in again)


def test_what_the_document_concludes_of_evaluations() -> None:
    for dtype in ("float32", "bfloat16"):
        pairs = decoded_twice(dtype)
        assert {one["decoding"] for one, _ in pairs} == {"--runtime host", "--runtime hbm"}
        assert all(one["error"] is other["error"] is None for one, other in pairs)
        # What goes on in lock-step is the same in every run.
        others = [record for record in evaluations() if record["dtype"] == dtype and record["decoded_by"] == "lock-step"]
        assert {record["label"] for record in others} >= {"dense", "exact", "sparq r=D/8 per head"}
    stopped = {(one["dtype"], one["decoding"]) for one in evaluations()} - {
        (dtype, way)
        for dtype, way in {(one["dtype"], one["decoding"]) for one in evaluations()}
        if len({(one["task"], one["sample"]) for one in evaluations() if (one["dtype"], one["decoding"]) == (dtype, way)}) == 24
    }
    assert stopped == {("float32", "--runtime hbm"), ("bfloat16", "--runtime host")}
    assert {line["outcome"] for line in lines_of("gpu-tests.jsonl", PACED)} == {"passed", "skipped"}


def test_defaults_are_what_was_fastest() -> None:
    assert default_lanes(1, 8, LONG, "host") == (3, 1)
    assert LONG_SCAN == 2**19
    assert (default_lanes(4, 8, 2**17, "host"), default_lanes(2, 8, 2**17, "host")) == ((4, None), (2, None))
    named = [line for line in lines_of("settings.jsonl") if "rows" in line]
    assert min(named, key=lambda line: line["gpu_ms"]) == setting("both", 3, 1, 8)
    half = [step for step in lines_of("lanes.jsonl") if step["context"] == 2**19]
    assert min(half, key=lambda step: step["gpu_ms"]) == min(half, key=lambda step: step["wall_ms"]) == lane(2**19, 1, 3, 1, "gpu")
    four = [step for step in lines_of("lanes.jsonl") if step["batch"] == 4]
    assert min(four, key=lambda step: step["gpu_ms"]) == min(four, key=lambda step: step["wall_ms"]) == lane(2**17, 4, 4, None, "gpu")
    for step in lines_of("lanes.jsonl"):
        if step["rows_by"] == "both":
            faster = step["gpu_ms"] < lane(step["context"], step["batch"], step["lanes"], step["last_lane"], "gpu")["gpu_ms"]
            assert faster == ((step["lanes"], step["last_lane"]) == (2, None) and (step["context"], step["batch"]) != (2**17, 2))
    own = main_table()[FATHOM]
    assert (own["lanes"], own["last_lane"], own["rows_by"]) == (3, 1, "gpu")
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


def test_what_the_document_concludes_of_equal_errors() -> None:
    lines = {key: members["klt"] for key, members in equal_lines().items() if "klt" in members}
    assert [key for key, line in lines.items() if float(line["ratio"]) >= 3] == [("90k", DOUBLE_4), ("32k", DOUBLE_4), ("32k", LOKI_4)]
    assert all(line["same_round"] == "True" for line in lines.values())
    assert all((wall_ratio(line) > 3) == (float(line["ratio"]) >= 3) for line in lines.values())
    assert all(len(label.split()) == 3 for (_, label), members in equal_lines().items() if "klt" not in members)
    both = [members for (_, label), members in equal_lines(EQUAL).items() if len(label.split()) == 4]
    assert (len(both), any("klt" in members for members in both)) == (6, False)
    assert len({step["round"] for step in paced_equal()}) == 1
    for label in (DOUBLE_4, SPARQ_4, LOKI_4):
        assert plain_ratio("90k", label) == plain_ratio("32k", label)
        for length in FIDELITY:
            assert len(windows(length, label)) == 8
    for length in FIDELITY:
        errors = {label: sum(windows(length, label).values()) for label in (DOUBLE_4, SPARQ_4, LOKI_4)}
        assert sorted(errors, key=errors.__getitem__) == [SPARQ_4, LOKI_4, DOUBLE_4]


@pytest.mark.parametrize(("folder", "count"), [(EQUAL, 12), (PACED_EQUAL, 9)], ids=["before", "paced"])
@pytest.mark.parametrize("length", FIDELITY)
def test_the_times_at_equal_error_are_made_of_both_runs(length: str, folder: Path, count: int, tmp_path: Path) -> None:
    references = [reference for found, reference in equal_lines(folder) if found == length]
    assert len(references) == count
    rows = equal_error(lines_of("records.jsonl.gz", FIDELITY[length]), lines_of("records.jsonl.gz", folder), references)
    write_table(tmp_path / "made.csv", rows)
    paths = tmp_path / "made.csv", folder / f"equal-error-{length}.csv"
    made, published = (list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) for path in paths)
    # Only the command knows the names of the runs.
    compared = [name for name in made[0] if not name.startswith("errors_")]
    assert [[line[name] for name in compared] for line in made] == [[line[name] for name in compared] for line in published]


@pytest.mark.parametrize("folder", [PUBLISHED, KERNELS, EQUAL, PACED, PACED_EQUAL], ids=lambda path: path.name)
def test_the_tables_beside_are_made_of_the_records(folder: Path, tmp_path: Path) -> None:
    files = build_report([folder], tmp_path / "out")
    made = {path.name: path.read_text(encoding="utf-8") for path in files.tables}
    assert made == {path.name: path.read_text(encoding="utf-8") for path in (folder / "tables").glob("*.csv")}
    assert files.markdown.read_text(encoding="utf-8") == (folder / "results.md").read_text(encoding="utf-8")
    assert sum(path.stat().st_size for path in folder.rglob("*")) < 2_000_000
    assert not list(folder.rglob("*.png"))


def test_nothing_published_names_the_machine_it_was_made_on() -> None:
    folders = (PUBLISHED, EQUAL, PACED, PACED_EQUAL)
    paths = [path for folder in folders for path in (*folder.glob("*.[cjlmx]*"), *folder.glob("*.html")) if path.suffix != ".gz"]
    for path in paths:
        assert not re.search(rb"/tmp/|/root|/opt/|/home/|hostname", path.read_bytes()), path.name
    for path in (path for folder in folders for path in folder.glob("*.gz")):
        assert not re.search(rb"/tmp/|/root|/opt/|/home/", gzip.decompress(path.read_bytes())), path.name
