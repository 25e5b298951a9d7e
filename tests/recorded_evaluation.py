"""What was recorded of evaluations by the timed step on a GPU, and of the checks that ran there."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from tests.recorded_names import PACED, PUBLISHED, ROOT
from tests.recorded_steps import Record, lines_of

Pair = tuple[Record, Record]


def evaluations() -> list[Record]:
    """Records of RULER-style tasks by SmolLM2, in lock-step and with ``--runtime``."""
    return lines_of("evaluation.jsonl.gz", PACED)


def decoded_twice(dtype: str) -> list[Pair]:
    """Cases that the timed step decoded, wherever its index lay, each beside the same in lock-step."""

    def key(record: Record) -> tuple[object, ...]:
        return record["task"], record["sample"], record["label"], record["k"]

    steps = [record for record in evaluations() if record["dtype"] == dtype]
    plain = {key(record): record for record in steps if record["decoding"] == "lock-step"}
    return [(record, plain[key(record)]) for record in steps if record["decoded_by"] == "runtime"]


def phrases_of_evaluations() -> dict[str, str]:
    pairs, rounded = decoded_twice("float32"), decoded_twice("bfloat16")
    same, alike = (sum(one["token_ids"] == other["token_ids"] for one, other in found) for found in (pairs, rounded))
    score, scored = (sum(one["score"] == other["score"] for one, other in found) for found in (pairs, rounded))
    (context,), (k,) = ({one[name] for one, _ in pairs} for name in ("context", "k"))
    methods, prompts = len({one["label"] for one, _ in pairs}), len({(one["task"], one["sample"]) for one, _ in pairs})
    apart = max(abs(one["bits"] - other["bits"]) for one, other in pairs)
    checks = [line["outcome"] for line in lines_of("gpu-tests.jsonl", PACED)]
    amounts = {
        f"{name} {way}": len({(one["task"], one["sample"]) for one in evaluations() if (one["dtype"], one["decoding"]) == (name, way)})
        for name, way in (("float32", "--runtime hbm"), ("bfloat16", "--runtime host"))
    }
    return {
        "CASES": f"{len(evaluations()):,} records; a limit of time stopped that of fp32 with the index in HBM after "
        f"{amounts['float32 --runtime hbm']} of {prompts} prompts and that of bf16 with the index in host memory after "
        f"{amounts['bfloat16 --runtime host']}",
        "CHECKS": f"{checks.count('passed')} passed and {checks.count('skipped')} skipped",
        "EVALUATED": f"On an H200 SmolLM2 in fp32 decoded {methods} methods so, {prompts} prompts of {context:,} tokens, k = {k}, with the "
        f"index in either place: of {len(pairs)} cases {same} have the tokens of lock-step decoding and {score} its score, and the mean "
        f"bits of a case differ by at most {apart:.3f}. In bf16 {alike} of {len(rounded)} have the tokens and {scored} the score.",
    }


def phrases_of_checks() -> dict[str, str]:
    """What was checked beside the times."""
    suite = ElementTree.parse(PUBLISHED / "model-control.xml").getroot()[0]
    cases = [case.attrib["name"].split("[")[1] for case in suite if not len(case)]
    assert len(cases) == len(suite)
    again = [line["test"].split("[")[1] for line in lines_of("gpu-tests.jsonl", PACED) if "test_gpu_model" in line["test"]]
    assert sorted(again) == sorted(cases), "the last run of the control had the same cases"
    methods_of = {re.sub(r"-(host-1-gpu|host-3-both|hbm-1-gpu)\]$", "", case) for case in cases}
    ranked = re.search(r"\nRANKED = 2\*\*(\d+)\n", (ROOT / "kernels/topk/triton.py").read_text(encoding="utf-8"))
    tokens = re.findall(r'"tokens": \[2\*\*(\d+)', (ROOT / "tests/kernels/kernel_checks/selection.py").read_text(encoding="utf-8"))
    assert ranked is not None
    blocks = 2 ** int(ranked[1])
    return {
        "MODEL": f"SmolLM2 in fp32 on an H200 gave the evaluator's tokens in {len(cases)} of {len(suite)} cases: {len(methods_of)} "
        "methods,",
        "TOPK": f"Beyond {blocks:,} blocks ({blocks * 64 >> 20}M tokens) it failed to launch on the H200; a second kernel now ranks more "
        f"than that in pieces, checked on the GPU to {2 ** max(map(int, tokens)) >> 20}M tokens.",
    }
