"""Every number that the documents on errors, sessions and tasks give is one that the published runs hold."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from fathom_eval.reports import build_report
from tests.findings import (
    AGENTS,
    FIDELITY_SETTINGS,
    KLT,
    LONG,
    ROOT,
    RULER,
    SESSIONS,
    SMALL,
    SPARQ,
    WIKI,
    at_equal_bytes,
    calibration_errors,
    calibration_table,
    helps,
    ratio,
    records,
    rows,
    ruler_difference,
    separated,
    session_difference,
    session_times,
    shown_table,
    small_at_equal_bytes,
    small_helps,
    table_seven,
    timed_session,
)
from tests.findings_phrases import DOUBLE, LANDMARK, LOKI, RERANK, UNION, fidelity_phrases, ruler_phrases, sessions_phrases, small_phrases
from tests.small_budgets import small_budget_tables

FIDELITY, AGENT_SESSIONS, TASKS = (ROOT / "docs" / name for name in ("fidelity.md", "sessions.md", "ruler.md"))


def fidelity_tables() -> list[str]:
    found = [
        line
        for name, context, k in FIDELITY_SETTINGS
        for line in shown_table(name, f"#### Bits at equal error, {context:,} tokens, k = {k:,}")
    ]
    return [*found, *small_budget_tables(), *helps(), *small_helps(), *calibration_errors()]


def sessions_tables() -> list[str]:
    return [*shown_table(SESSIONS, "### k = 512"), *shown_table(SESSIONS, "### k = 2,048"), *calibration_table(), *session_times()]


def ruler_tables() -> list[str]:
    return [*shown_table(RULER, "### 32,000 tokens, k = 64"), *shown_table(RULER, "### 32,000 tokens, k = 128"), *table_seven()]


DOCUMENTS = {
    FIDELITY: (fidelity_phrases, fidelity_tables, "## At 32k and 90k tokens"),
    AGENT_SESSIONS: (sessions_phrases, sessions_tables, "## How to read it"),  # tests/test_docs.py has what comes before
    TASKS: (ruler_phrases, ruler_tables, ""),
}

# Numbers that are no measurement: names, settings and sizes of what was asked for.
_SETTINGS = "|".join(
    (
        r"`[^`]*`|\]\([^)]*\)|Qwen2\.5-Coder-0\.5B-Instruct|Qwen3-8B|SmolLM2(?:-135M-Instruct)?|bfloat16|V1 SDK|Table (?:7|22|23)",
        r"32k|90k|(?:32,768|90,112|4,096|8,192|2,048|16,384|65,536|32,000) tokens|windows of (?:4,096|16,384)",
        r"k = [\d,]+(?: and [\d,]+)?|128 before",
        r"last 128 positions|[468] windows|budgets 24 to 80|or from 16 on|up to 256|17 sessions|80,000 to 100,000|36 conversations",
        r"head_dim 64|2 KV heads of 7 query heads|4 to 8 bits a weight|head_dim of 128 instead of 64",
        r"95 % bootstrap|\(0 to 1\)|row is 1|lack to 1 is|below 1 is better|27 to 29 samples|\(40 were|40 samples|score 0\.5\b",
        r"\*\*fp8 scales",
    )
)


def words(path: Path, start: str) -> str:
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"```.*?```", "", text[text.index(start) :], flags=re.DOTALL)
    return " ".join(" ".join(line for line in text.splitlines() if not line.startswith("|")).split())


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_the_published_ones(path: Path) -> None:
    _, tables, start = DOCUMENTS[path]
    text = path.read_text(encoding="utf-8")
    assert [line for line in text[text.index(start) :].splitlines() if line.startswith("|")] == tables()


def test_each_table_of_errors_stands_under_its_setting() -> None:
    text = FIDELITY.read_text(encoding="utf-8")
    for name, context, k in FIDELITY_SETTINGS:
        what = "WikiText" if name != LONG else "Agent sessions"
        table = "\n".join(shown_table(name, f"#### Bits at equal error, {context:,} tokens, k = {k:,}"))
        assert f"{what}, {context:,} tokens, k = {k:,}:\n\n{table}\n" in text


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_sentences_hold_no_number_but_published_ones(path: Path) -> None:
    phrases, _, start = DOCUMENTS[path]
    text = words(path, start)
    for phrase in phrases().values():
        assert phrase in text
        text = text.replace(phrase, "")
    assert re.findall(r".{0,30}\d.{0,20}", re.sub(_SETTINGS, "", text)) == []


def test_what_the_document_says_of_the_small_model() -> None:
    text = " ".join(FIDELITY.read_text(encoding="utf-8").split())
    for phrase in small_phrases().values():
        assert text.count(phrase) == 1
    impossible = json.loads((ROOT / "reports/published" / SMALL / "manifest.json").read_text(encoding="utf-8"))["invocations"][-1][
        "settings"
    ]
    left_out = {k: {one["method"].split()[0] for one in impossible["impossible"] if one["k"] == k} for k in (64, 128)}
    assert left_out[128] == {"shadowkv", "infllm_published", "retrieval_attention_published"}
    assert left_out[64] == left_out[128] | {"retroinfer_published", "magicpig_published"}
    dense = {one["method"] for one in rows(SMALL) if one["k"] == "128" and one["context"] == "4096" and float(one["rows"] or 0) > 370}
    assert {"double_sparsity_published c=D/4", "quest_published page=16", "infinigen_published r=D/4"} <= dense


def test_what_the_documents_conclude() -> None:
    """Words without a number: who is below whom, and where an option helps."""
    for name, context, k in FIDELITY_SETTINGS:
        found = {one["method"]: float(one["error_dense"]) for one in rows(name) if (one["context"], one["k"]) == (str(context), str(k))}
        assert min(value for method, value in found.items() if re.fullmatch(r"fathom budget=\d+ basis=\w+", method)) > found["full 4-bit"]
    for k in (64, 128):
        one = small_at_equal_bytes(k)
        assert float(ratio(one[UNION], "error_dense")) < 0.9
        assert ratio(one[f"{KLT} by_ratio=True"], "error_dense") == "1.00"
    plain, scales = (small_at_equal_bytes(128)[name] for name in (KLT, f"{KLT} scales=fp8"))
    assert plain.bits is not None
    assert scales.bits is not None
    assert 1.9 < plain.bits - scales.bits < 2.2
    assert f"{plain.errors['error_dense']:.3f}" == f"{scales.errors['error_dense']:.3f}"
    reads = at_equal_bytes(LONG, "klt", 2048)
    longest = max(one.bytes or 0 for name, one in reads.items() if re.fullmatch(r"fathom budget=\d+ basis=klt", name))
    assert (reads[RERANK].bytes or 0) > longest
    for source in (WIKI, AGENTS):
        for k in (512, 2048):
            assert "−" in session_difference(DOUBLE, f"{DOUBLE} {source}", k)[0].split("[")[1]
    for k in (64, 128, 512):
        assert {KLT, DOUBLE, LOKI, LANDMARK} <= set(separated(k))
        assert (SPARQ in separated(k)) == (k == 64)
        assert not separated(k, below=False)
        found = ruler_difference(KLT, SPARQ, k)
        assert found.low < 0 < found.high
    paper = [line.split(" | ") for line in table_seven()[2:]]
    theirs = {cells[0].strip("| "): float(cells[5].split(" ±")[0]) for cells in paper if "±" in cells[5]}
    assert [name for name, score in theirs.items() if score < theirs["exact"] - 0.014] == [LANDMARK]


def test_a_timed_session_is_within_its_aims_and_bound_by_the_host() -> None:
    found = timed_session()
    lock_step = json.loads((ROOT / "reports/published/scale-h200/lock-step.json").read_text(encoding="utf-8"))
    assert (found["methods"], found["k"], len(found["turns"])) == (lock_step["methods"], lock_step["k"], 5)
    log = (ROOT / "reports/published/scale-h200/agent-session.log").read_text(encoding="utf-8")
    for number, turn in enumerate(found["turns"], 1):
        assert turn["seconds"] < 60
        assert turn["ratio"] <= 4
        assert turn["noise_floor_seconds"] > turn["decode_seconds"]
        parts = ", ".join(f"{name} {turn[f'{name}_seconds']:.1f}" for name in ("prefill", "stores", "decode"))
        assert (
            f"turn {number} of 5: {turn['seconds']:.1f} s, {turn['without_noise_floor_seconds']:.1f} s without the noise floor ({parts})"
            in log
        )
    for name in ("dense", "branches"):
        assert lock_step["profile"][name]["gpu_ms_a_step"] < 0.6 * lock_step[f"{name}_ms_a_step"]["median"]
    assert not re.search(r"/tmp|/root|/opt|/home|/work", log + json.dumps(found))


def test_runs_that_are_published_name_no_machine_and_hold_no_prompt() -> None:
    for path in sorted((ROOT / "reports/published").glob("*/manifest.json")):
        assert not re.search(r"/tmp|/root|/opt|/home|/work", path.read_text(encoding="utf-8")), path.parent.name
    for name in (SESSIONS, "sessions-smollm2", RULER, "ruler-smollm2-2048"):
        assert not {key for one in records(name) for key in one} & {"prompt", "recorded_text"}, name


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "reports/published").glob("*/records.jsonl.gz")), ids=lambda path: path.parent.name)
def test_what_is_published_is_what_the_records_give(path: Path, tmp_path: Path) -> None:
    with build_report([path.parent], tmp_path / "out").csv.open(encoding="utf-8") as file:
        made = list(csv.DictReader(file))
    published = rows(path.parent.name)
    # A report may gain columns; what was published must not change.
    assert [{name: one[name] for name in published[0]} for one in made] == published
