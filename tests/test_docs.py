"""What the documents say of recorded runs must be what was recorded, and what they show must be what the commands take."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from fathom_eval.cli import build_parser

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))
FIDELITY = ROOT / "reports/published/fidelity-smollm2"


def errors(metric: str = "error_dense") -> dict[str, tuple[float, float]]:
    """Bits and error of every method at 4,096 tokens and k = 128."""
    with (FIDELITY / "results.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["context"] == "4096" and row["k"] and float(row["k"]) == 128]
    return {row["method"]: (float(row["bits"] or "nan"), float(row[metric])) for row in rows}


def test_the_fidelity_table_is_the_published_runs() -> None:
    published = (FIDELITY / "results.md").read_text(encoding="utf-8").split("### 4,096 tokens, k = 128")[1].splitlines()
    document = (ROOT / "docs/fidelity.md").read_text(encoding="utf-8").split("## At 32k and 90k tokens")[0]
    table = [line for line in document.splitlines() if line.startswith("|")]
    start = published.index(table[0])
    assert published[start : start + len(table)] == table
    assert not published[start + len(table)].startswith("|")
    assert len(table) == 55


def test_what_the_fidelity_document_says_of_its_table() -> None:
    found = errors()
    klt = [found[f"fathom budget={budget} basis=klt"] for budget in (40, 48, 64, 80, 128)]
    assert klt == sorted(klt, key=lambda pair: (pair[0], -pair[1]))
    assert [error for _, error in klt] == sorted((error for _, error in klt), reverse=True)
    planes = [name for name in found if re.match(r"(fathom|sparq r|double_sparsity c|loki r|thumbnail|uniform|full)", name)]
    plain = [name for name in planes if not re.search("rerank|union|bits=16", name)]
    assert min(plain, key=lambda name: found[name][1]) == "full 4-bit"
    assert errors("excess")["exact"][1] == 0
    assert found["fathom budget=48 basis=klt"][1] <= found["sparq r=D/8"][1]
    assert found["fathom budget=80 basis=klt"][1] <= 1.05 * found["sparq r=D/4"][1]
    for scan, double in (("fathom budget=48 basis=klt", "fathom budget=80 basis=klt"), ("sparq r=D/8", "sparq r=D/4")):
        assert found[f"{scan} rerank=2.0"][1] < found[double][1]


def reader_row(long: dict[str, Any], short: dict[str, Any]) -> str:
    """What a file holds, and the sessions of either length that it gives."""
    repositories = long["repositories"].values()
    sums = [f"{sum(one[key] for one in repositories):,}" for key in ("steps", "targets", "tokens")]
    skipped, notes = ("; ".join(f"{times} × {what}" for what, times in long[key].items()) for key in ("problems", "notes"))
    counts = [long["records"], long["trajectories"], len(repositories), *sums, long["sessions"], short["sessions"]]
    cells = [f"`{long['file']}`", ", ".join(long["formats"]), *map(str, counts), skipped or "none", notes or "–"]
    return f"| {' | '.join(cells)} |"


def test_the_table_of_the_readers_is_what_inspect_printed() -> None:
    recorded = json.loads((ROOT / "reports/published/readers/inspect.json").read_text(encoding="utf-8"))
    by_length = {(one["file"], one["session_tokens"]): one for one in recorded}
    files = dict.fromkeys(one["file"] for one in recorded)
    section = (ROOT / "docs/sessions.md").read_text(encoding="utf-8").split("## What the readers make of real files")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    assert table[2:] == [reader_row(by_length[file, "80000:100000"], by_length[file, "3000:4000"]) for file in files]
    assert len(files) == 6
    assert ("No record was skipped." in section) == (not any(one["problems"] for one in recorded))
    assert all("/" not in one["file"] and one["unit"] == "tokens" for one in recorded)
    without = [one["file"] for one in recorded if not sum(counts["targets"] for counts in one["repositories"].values())]
    assert set(without) == {"v0_output_fastjson2.jsonl.gz"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_shown_are_ones_that_the_parser_takes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            command = line.split("  #")[0].strip()
            if command.startswith("fathom-eval ") and "$(" not in command:
                build_parser().parse_args(shlex.split(command)[1:])


@pytest.mark.parametrize(
    "path", [*DOCUMENTS, *sorted((ROOT / "reports/published").glob("*/README.md"))], ids=lambda path: str(path.relative_to(ROOT))
)
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / link).exists(), link
