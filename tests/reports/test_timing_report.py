"""Decode steps and kernels: what is taken from flat records, and what is kept out of figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fathom_eval.errors import UserError
from fathom_eval.offload.bench.timing import PARTS
from fathom_eval.reports import build_report
from fathom_eval.reports.canvas import PALETTE
from fathom_eval.reports.grids import part_styles
from fathom_eval.reports.timing_steps import in_turn, is_48_bit, reads_of, turns_of
from tests.reports.made_records import timing_records, write_run
from tests.reports.pages import data, every_file, read_page, table

PUBLISHED = Path(__file__).parents[2] / "reports" / "published" / "kernels-h200"


def lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, records)) + "\n", encoding="utf-8")
    return path


def test_steps_of_a_file_of_lines(tmp_path: Path) -> None:
    files = build_report([lines(tmp_path / "steps.jsonl", timing_records())], tmp_path / "out")
    assert {path for path in (tmp_path / "out").rglob("*") if path.is_file()} == every_file(files)
    page = read_page(files)
    page.check()
    assert "Decode steps of 6 methods on NVIDIA H200, at 32,768 to 1,048,576 tokens of context." in page.words
    assert "With the index in host memory, batch 1, k = 512, at 1,048,576 tokens: fathom 48 takes" in page.words
    steps = table(files, "steps-host-b1-k512")
    assert len(steps) == 3 * 6
    own = {row["method"]: row for row in steps if row["context"] == "1048576"}
    assert float(own["channels 32"]["× Fathom"]) == pytest.approx(float(own["channels 32"]["GPU ms"]) / float(own["fathom 48"]["GPU ms"]))
    assert float(own["fathom 48"]["GPU ÷ floor"]) == pytest.approx(float(own["fathom 48"]["GPU ms"]) / float(own["fathom 48"]["floor ms"]))
    assert own["fathom 48"]["notes"] == "18 layers share buffers"
    parts = table(files, "parts-host-b1-k512")
    assert float(parts[0]["sum"]) == pytest.approx(float(steps[0]["GPU ms"]))
    ratios = {(row["setting"], row["context"]): row for row in table(files, "step-ratios")}
    place = "index in host memory, batch 1, k = 512", "1048576"
    assert ratios[place]["channels 32 ÷ 136 bits"] == own["channels 32"]["× Fathom"]
    assert ratios[place]["step ÷ floor"] == own["fathom 48"]["GPU ÷ floor"]
    assert float(ratios[place]["wall ÷ GPU"]) == pytest.approx(1.02)
    assert len(ratios) == 6
    assert {path.stem for path in files.figures} == {f"{kind}-{index}-b1-k512" for kind in ("step", "parts") for index in ("host", "hbm")}
    assert data(files, "results.csv")[0]["parts_ms.topk"]


def test_void_steps_are_named_and_in_no_figure(tmp_path: Path) -> None:
    files = build_report([lines(tmp_path / "steps.jsonl", timing_records(indexes=("host",)))], tmp_path / "out")
    [row] = [row for row in table(files, "steps-host-b1-k512") if row["notes"] == "void"]
    assert (row["method"], row["context"]) == ("landmark", "32768")
    figure = next(path for path in files.figures if path.name == "step-host-b1-k512.svg").read_text(encoding="utf-8")
    assert "landmark, 131,072 tokens" in figure
    assert "landmark, 32,768 tokens" not in figure
    assert "1 step void, in no figure and no ratio, for reasons that the records do not give." in read_page(files).words


def test_the_paper_stands_beside_as_other_model_or_other_hardware(tmp_path: Path) -> None:
    records = [{**record, "model": "Qwen/Qwen3-8B"} for record in timing_records(indexes=("host",))]
    files = build_report([lines(tmp_path / "steps.jsonl", records)], tmp_path / "out")
    rows = {(row["method"], row["setting"], row["quantity"]): row for row in table(files, "paper")}
    own = rows["fathom 48", "1,048,576 tokens, k = 512", "GPU ms host"]
    assert (own["paper"], own["table"], own["match"]) == ("177.0", "2", "other hardware")
    assert rows["channels 32", "131,072 tokens, k = 512", "GPU ms host"]["paper"] == "73.0"
    files = build_report([lines(tmp_path / "unnamed.jsonl", timing_records(indexes=("host",)))], tmp_path / "out")
    assert {row["match"] for row in table(files, "paper")} == {
        "other model, other hardware",
        "other model, other context, other hardware",
    }


def test_kernel_records_that_are_published(tmp_path: Path) -> None:
    files = build_report([PUBLISHED], tmp_path / "out")
    page = read_page(files)
    page.check()
    assert "index in pinned host memory" in page.text
    rows = table(files, "kernels-index-in-HBM")
    assert {row["name"] for row in rows} >= {"fathom 48", "nibble 32 channels"}
    assert {row["context"] for row in rows} == {"131072", "1048576"}


def test_damaged_lines_are_counted_and_a_file_without_timings_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "steps.jsonl", timing_records(contexts=(32768,)))
    path.write_text("{broken\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    files = build_report([path], tmp_path / "out")
    assert files.warnings == (f"steps.jsonl: {path}: line 1 is damaged and is skipped",)
    with pytest.raises(UserError, match="holds no timings"):
        build_report([lines(tmp_path / "none.jsonl", [{"kind": "step"}])], tmp_path / "out")
    with pytest.raises(UserError, match="has no records"):
        build_report([lines(tmp_path / "empty.jsonl", [])], tmp_path / "out")


def test_a_run_of_the_link_without_a_gpu_says_what_it_holds(tmp_path: Path) -> None:
    host = {"kind": "link", "measure": "host", "task": "host", "method": "host memory", "name": "host memory", "context": 0, "sample": 0}
    run = write_run(tmp_path / "link", [{**host, "k": None, "options": {}, "method_version": 1, "cores": 2}], kind="bench")
    with pytest.raises(UserError, match=r"link holds no timings: .* recorded the host's memory and cores alone; .* needs a GPU$"):
        build_report([run], tmp_path / "out")


def test_a_run_directory_of_the_bench_command(tmp_path: Path) -> None:
    key = {"task": "qwen3-8b-shape", "sample": 0, "method_version": 1, "model": "qwen3-8b-shape", "layers": 36, "distinct_layers": 18}
    steps = [
        {**record, **key, "options": {"sessions": sessions}, "sessions": sessions, "aliased_layers": 0}
        for record in timing_records(contexts=(131072,), indexes=("host",))
        for sessions in (1, 2)
    ]
    steps[0] |= {"void": True, "void_reason": "the clock moved"}
    link = {"kind": "link", "task": "rates", "context": 0, "sample": 0, "k": None, "method": "copy", "options": {}, "method_version": 1}
    run = write_run(tmp_path / "bench", [*steps, {**link, "measure": "rates", "name": "copy", "ms": 4.8}], kind="bench")
    files = build_report([run], tmp_path / "out")
    page = read_page(files)
    page.check()
    assert "1 step void, in no figure and no ratio: the clock moved." in page.words
    assert "Decode steps of 6 methods of the shape of qwen3-8b-shape on NVIDIA H200" in page.words
    assert {row["notes"] for row in table(files, "steps-host-b1-k512-s2")} == {"18 layers share buffers"}
    assert table(files, "steps-host-b1-k512")[0]["notes"] == "void: the clock moved; 18 layers share buffers"
    assert [row["name"] for row in table(files, "kernels-rates")] == ["copy"]
    ratios = {row["setting"]: row for row in table(files, "step-ratios")}
    single, double = (
        ratios["index in host memory, batch 1, k = 512"],
        ratios["index in host memory, batch 1, k = 512, 2 sessions side by side"],
    )
    assert single["channels 32 ÷ 136 bits"] == double["channels 32 ÷ 136 bits"]
    # Of one context there is nothing to draw against context.
    assert {path.stem for path in files.figures} == {"parts-host-b1-k512", "parts-host-b1-k512-s2"}
    timed = [row for row in table(files, "paper") if row["quantity"].startswith("GPU")]
    assert {row["match"] for row in timed} == {"other hardware"}


def test_ratios_of_steps_that_did_not_take_turns_are_marked(tmp_path: Path) -> None:
    steps = [
        {**record, "round": "second" if record["method"] == "landmark" else "first"} for record in timing_records((131072,), ("host",))
    ]
    files = build_report([lines(tmp_path / "steps.jsonl", steps)], tmp_path / "out")
    page = read_page(files)
    assert "† timed in another round than the reference" in page.words
    # Of all settings, and of its own.
    assert files.markdown.read_text(encoding="utf-8").count(" † |") == 2
    alone, apart = table(files, "step-ratios")
    assert apart["setting"] == f"{alone['setting']}, timed in another round"
    assert alone["landmark ÷ 256 bits"] == apart["channels 32 ÷ 136 bits"] == apart["step ÷ floor"] == ""
    steps_of = {row["method"]: row for row in table(files, "steps-host-b1-k512")}
    assert apart["landmark ÷ 256 bits"] == steps_of["landmark"]["× Fathom"]
    assert [name for name, row in steps_of.items() if "another round than Fathom's read" in row["notes"]] == ["landmark"]
    told = page.words.split("The others that took turns with it take")[1].split("1 step of another round")[0]
    assert "channels 32" in told
    assert "landmark" not in told
    assert "1 step of another round did not take turns with it; the tables mark their multiples †." in page.words


def test_steps_whose_round_is_not_recorded_are_not_taken_to_be_in_turn(tmp_path: Path) -> None:
    def unknown(step: dict[str, Any]) -> dict[str, Any]:
        return {name: found for name, found in step.items() if name != "round"}

    steps = [unknown(record) for record in timing_records((131072,), ("host",))]
    assert not in_turn(steps[0], steps[1])
    assert in_turn(steps[0], steps[0])
    files = build_report([lines(tmp_path / "steps.jsonl", steps)], tmp_path / "out")
    words = read_page(files).words
    assert f"Whether {len(steps) - 1} steps took turns with it is not recorded; the tables mark their multiples †." in words
    assert "† not known to have taken turns with the reference, since no round is recorded" in words
    assert "another round" not in words
    alone, apart = table(files, "step-ratios")
    assert apart["setting"] == f"{alone['setting']}, round not recorded"
    assert (alone["landmark ÷ 256 bits"], alone["step ÷ floor"] != "") == ("", True)
    mixed = [made_step(READS[0], 20.0, "first"), made_step("sparq r=D/8", 30.0, "second"), unknown(made_step("loki r=D/4", 40.0, ""))]
    mixed.insert(0, unknown(made_step(READS[0], 10.0, "")))
    assert [(turns.own["gpu_ms"], [step["gpu_ms"] for step in turns.others], turns.apart) for turns in turns_of(mixed, READS)] == [
        (20.0, [], ""),
        (20.0, [30.0], "timed in another round"),
        (20.0, [10.0, 40.0], "round not recorded"),
    ]
    words = read_page(build_report([lines(tmp_path / "mixed.jsonl", mixed)], tmp_path / "mixed")).words
    assert "† timed in another round than the reference, not in turn with it, or in one that is not recorded" in words


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ([(10.0, 10.2), (10.0, 10.2)], "Wall-clock is 1.02 times GPU time."),
        ([(10.0, 100.0), (10.0, 98.0), (None, 5.0), (10.0, None)], "Wall-clock is 9.80 to 10.00 times GPU time."),
        ([(None, 5.0), (None, 6.0)], ""),
    ],
)
def test_wall_clock_over_gpu_time_is_told_of_steps_that_have_both(
    times: list[tuple[float | None, float | None]], said: str, tmp_path: Path
) -> None:
    steps = [made_step(READS[place], 20.0, "first", gpu_ms=gpu, wall_ms=wall) for place, (gpu, wall) in enumerate(times)]
    words = read_page(build_report([lines(tmp_path / "steps.jsonl", steps)], tmp_path / "out")).words
    assert words.count("Wall-clock is") == bool(said)
    assert said in words


def made_step(label: str, gpu: float, turn: str, **changes: Any) -> dict[str, Any]:
    [record, *_] = timing_records((131072,), ("host",))
    options = {"method": label.split()[0], "label": label, "gpu_ms": gpu, "round": turn, "floor_ms": 10.0}
    return {**record, **options, **changes}


READS = (
    "fathom budget=48 basis=raw",
    "fathom budget=48 basis=raw scales=fp8",
    "fathom budget=48 basis=klt",
    "fathom budget=48 basis=raw rerank=2.0",
    "fathom budget=48 basis=raw attend=union",
    "fathom budget=40 basis=raw",
)


@pytest.mark.parametrize("most", range(len(READS)))
def test_the_plainest_read_of_the_budget_is_the_reference_whichever_is_fastest(most: int) -> None:
    steps = [made_step(label, 20.0 - place, "first") for place, label in enumerate(READS[most:])]
    assert reads_of(steps) == list(READS[most:])
    assert reads_of(steps[::-1]) == list(READS[most:])
    [turns] = turns_of(steps, reads_of(steps))
    assert turns.own["label"] == READS[most]


def test_a_budget_of_48_is_read_from_the_label() -> None:
    assert all(map(is_48_bit, ("fathom 48", "fathom budget=48 basis=raw", "fathom budget=48.0")))
    assert not any(map(is_48_bit, ("fathom 148", "fathom budget=32 planes=48", "fathom budget=4.48", "fathom")))


def test_one_page_has_one_reference_and_a_setting_without_it_names_its_own(tmp_path: Path) -> None:
    steps = [
        made_step(READS[0], 20.0, "first"),
        made_step(READS[2], 16.0, "first"),
        made_step("sparq r=D/8", 30.0, "first"),
        made_step(READS[2], 15.0, "second", lanes=2),
        made_step("sparq r=D/8", 30.0, "second", lanes=2),
    ]
    files = build_report([lines(tmp_path / "steps.jsonl", steps)], tmp_path / "out")
    assert "Against Fathom's 48-bit read: fathom budget=48 basis=raw" in read_page(files).words
    one, two = table(files, "step-ratios")
    assert float(one[f"{READS[2]} ÷ 47 bits"]) == 0.8
    sparq = "sparq r=D/8 ÷ 47 bits"
    assert (float(one[sparq]), float(two[sparq])) == (1.5, 2.0)
    assert two["setting"] == f"{one['setting']}, 2 lanes, against {READS[2]}"


def test_a_step_is_set_against_the_read_of_its_own_round(tmp_path: Path) -> None:
    steps = [
        made_step(READS[0], 20.0, "first"),
        made_step("sparq r=D/8", 30.0, "first"),
        made_step(READS[0], 40.0, "second"),
        made_step("loki r=D/4", 60.0, "second"),
        made_step("full 4-bit", 80.0, "third"),
    ]
    files = build_report([lines(tmp_path / "steps.jsonl", steps)], tmp_path / "out")
    own = {(row["method"], float(row["GPU ms"])): float(row["× Fathom"]) for row in table(files, "steps-host-b1-k512")}
    assert own == {
        (READS[0], 20.0): 1.0,
        (READS[0], 40.0): 1.0,
        ("sparq r=D/8", 30.0): 1.5,
        ("loki r=D/4", 60.0): 1.5,
        ("full 4-bit", 80.0): 4.0,
    }
    assert [row["setting"].split(", ", 3)[3] for row in table(files, "step-ratios")] == [
        "round first",
        "round second",
        "timed in another round",
    ]
    page = read_page(files)
    assert "take, as a multiple of it in their round: sparq r=D/8 1.50× and loki r=D/4 1.50×." in page.words


@pytest.mark.parametrize(("others", "lanes"), [(12, 2), (13, 2), (14, 13)])
def test_methods_are_rows_where_they_are_more_than_columns_fit(others: int, lanes: int, tmp_path: Path) -> None:
    steps = [
        made_step(label, 20.0 + place, "second" if place == others else "first", lanes=lane, scan_bits=float(place))
        for lane in range(1, lanes + 1)
        for place, label in enumerate([READS[0], *(f"sparq r={place}" for place in range(1, others + 1))])
    ]
    files = build_report([lines(tmp_path / "steps.jsonl", steps)], tmp_path / "out")
    read_page(files).check()
    names = {path.stem for path in files.tables if path.stem.startswith("step-r")}
    if others == 12:
        assert names == {"step-ratios"}
        assert "sparq r=12 ÷ 12 bits" in table(files, "step-ratios")[0]
        return
    assert names == {"step-reference", *(["step-ratios"] if lanes == 2 else [f"step-ratios-{lane}" for lane in range(1, lanes + 1)])}
    rows = table(files, "step-ratios" if lanes == 2 else "step-ratios-1")
    assert [row["method"] for row in rows] == [f"sparq r={place}" for place in range(1, others + 1)]
    several = ["1 lane", "2 lanes"] if lanes == 2 else [""]
    headings = [", ".join(filter(None, ("÷ at 131,072 tokens", words))) for words in several]
    headings = [text for heading in headings for text in (heading, f"{heading}, timed in another round")]
    assert list(rows[0]) == ["method", "scan bits", *headings]
    assert [float(rows[0][heading]) for heading in headings[::2]] == [1.05] * len(several)
    assert [rows[-1][heading] for heading in headings] == ["", str((20.0 + others) / 20.0)] * len(several)
    assert rows[0][headings[1]] == ""
    assert len(table(files, "step-reference")) == lanes
    words = read_page(files).words
    assert f"{(20.0 + others) / 20.0:.2f} †" in words
    span = (
        "The 13 others that took turns with it take, as a multiple of it, from 1.05× (sparq r=1) to 1.65× (sparq r=13); the table has each."
    )
    assert (span in words) == (others == 14)
    assert ("The others that took turns with it take, as a multiple of it: sparq r=1 1.05×, " in words) == (others == 13)


def test_times_of_two_clocks_and_void_steps_have_no_ratio(tmp_path: Path) -> None:
    steps = [
        made_step(READS[0], 20.0, "first"),
        {**made_step("sparq r=D/8", 30.0, "first"), "gpu_ms": None},
        made_step("loki r=D/4", 60.0, "first", void=True),
    ]
    files = build_report([lines(tmp_path / "steps.jsonl", steps)], tmp_path / "out")
    assert {row["method"]: row["× Fathom"] for row in table(files, "steps-host-b1-k512")} == {
        READS[0]: "1.0",
        "sparq r=D/8": "",
        "loki r=D/4": "",
    }


def test_kernels_that_ran_side_by_side_are_not_summed_to_a_step(tmp_path: Path) -> None:
    steps = [{**record, "lanes": 2, "gpu_sum_ms": 1.2 * record["gpu_ms"]} for record in timing_records((131072,), ("host",))]
    page = read_page(build_report([lines(tmp_path / "steps.jsonl", steps)], tmp_path / "out"))
    assert "GPU ms of all kernels; of those side by side, each" in page.text
    assert "their sum is more than the step's GPU time, and no component says how much shorter the step would be without it" in page.words


def test_every_term_of_a_timing_table_is_explained(tmp_path: Path) -> None:
    steps = [{**record, "lanes": 2, "gpu_sum_ms": 1.2 * record["gpu_ms"]} for record in timing_records((131072,), ("host",))]
    terms = read_page(build_report([lines(tmp_path / "steps.jsonl", steps)], tmp_path / "out")).text.split("What the columns mean")[-1]
    for term in ("lanes", "components that overlap", "floor ms", "× Fathom", "scan of link", "rows MB", "void", "layers share buffers"):
        assert term in terms
    for part in (*PARTS, "other"):
        assert f"{part}:" in terms, "a component that the profiler names"


@pytest.mark.parametrize("kind", ["link", "kernel"])
def test_a_run_directory_of_the_bench_command_without_steps(kind: str, tmp_path: Path) -> None:
    key = {"kind": kind, "task": "copy", "context": 1024, "sample": 0, "k": None, "options": {}, "method_version": 1, "measure": "copy"}
    made = [
        {**key, "method": name, "name": name, "gpu_ms": ms, "gb_s": 50.0, "of_ceiling": 0.9}
        for name, ms in zip("abc", (1.5, 2.5, 4), strict=True)
    ]
    files = build_report([write_run(tmp_path / "bench", made, kind="bench")], tmp_path / "out")
    assert "Times of 3 kernel measurements" in read_page(files).words
    assert [row["ms"] for row in table(files, "kernels-copy")] == ["1.5", "2.5", "4"]
    assert {path.stem for path in files.figures} == {"kernels-copy"}


def test_the_lead_tells_the_first_setting_and_every_other_stands_with_its_tables(tmp_path: Path) -> None:
    records = [{**record, "aliased_layers": 1} for record in timing_records(contexts=(131072,))]
    files = build_report([lines(tmp_path / "steps.jsonl", records)], tmp_path / "out")
    text = files.markdown.read_text(encoding="utf-8")
    lead, *sections = text.split("### ")
    assert "With the index in host memory, batch 1, k = 512, at 131,072 tokens: fathom 48 takes" in lead
    assert "index in HBM" not in lead
    assert "The other setting stands below." in lead
    [own] = [section for section in sections if section.startswith("Decode step, index in HBM")]
    assert "With the index in HBM, batch 1, k = 512, at 131,072 tokens: fathom 48 takes" in own
    assert {row["notes"] for row in table(files, "steps-host-b1-k512")} == {"1 layer shares buffers"}


def test_no_two_parts_of_a_bar_look_alike() -> None:
    styles = part_styles([*PARTS, "other"])
    assert len(set(styles.values())) == len(PARTS) + 1
    assert styles["other"][0] not in PALETTE
    assert len(set(part_styles([f"part {number}" for number in range(20)]).values())) == 20


def test_beside_the_paper_stands_the_setting_of_the_plain_read_although_another_is_faster_elsewhere(tmp_path: Path) -> None:
    shape = {"model": "Qwen/Qwen3-8B", "context": 1048576}
    steps = [
        made_step(READS[0], 54.0, "first", **shape),
        made_step("sparq r=16", 62.0, "first", **shape),
        made_step(READS[5], 48.0, "first", lanes=2, **shape),
        made_step("sparq r=16", 99.0, "first", lanes=2, **shape),
    ]
    files = build_report([lines(tmp_path / "steps.jsonl", steps)], tmp_path / "out")
    assert {row["here"] for row in table(files, "paper") if row["method"] == "sparq r=16" and row["quantity"] == "GPU ms host"} == {"62.0"}
