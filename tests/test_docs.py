"""What the documents say of recorded runs must be what was recorded, and what they show must be what the commands take."""

from __future__ import annotations

import csv
import re
import shlex
from pathlib import Path

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
