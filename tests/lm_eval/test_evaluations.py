"""Whole evaluations by lm-eval with ``--model fathom``: dense ones equal those of ``hf``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'fathom-eval[lm-eval]'")

import lm_eval
from lm_eval import simple_evaluate
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from fathom_eval.lm_eval import FathomLM, compat
from fathom_eval.methods import parse_method
from fathom_eval.models import LoadedModel
from fathom_eval.tasks.lm_eval import PATH


def manager(metadata: dict[str, Any], folder: Path = PATH) -> TaskManager:
    return TaskManager(include_path=str(folder), include_defaults=False, metadata=metadata)


def evaluated(
    lm: Any, tasks: list[str], metadata: dict[str, Any], limit: int, folder: Path = PATH
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results, and the answers by task."""
    output = simple_evaluate(model=lm, tasks=tasks, limit=limit, task_manager=manager(metadata, folder), metadata=metadata)
    answers = {task: [sample["filtered_resps"] for sample in samples] for task, samples in output["samples"].items()}
    return output["results"], answers


def same_scores(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        {k: v for k, v in one[task].items() if "name" not in k} == {k: v for k, v in other[task].items() if "name" not in k} for task in one
    )


def test_dense_equals_hf_on_the_ruler_tasks(loaded: LoadedModel, hf: HFLM, model: Path, haystack: str) -> None:
    metadata = {"max_seq_lengths": [700], "tokenizer": str(model), "haystack": haystack}
    ours, our_answers = evaluated(FathomLM(loaded, "dense"), ["fathom_ruler"], metadata, 2)
    theirs, their_answers = evaluated(hf, ["fathom_ruler"], metadata, 2)
    assert our_answers == their_answers
    assert any(answer[0] for answers in our_answers.values() for answer in answers)
    assert same_scores(ours, theirs)


def test_lm_eval_finds_the_model_by_name(model: Path, haystack: str) -> None:
    compat.register()
    compat.register()
    assert get_model("fathom") is FathomLM
    assert get_model("hf") is HFLM
    metadata = {"max_seq_lengths": [700], "haystack": haystack, "pretrained": str(model)}
    output = simple_evaluate(
        model="fathom",
        model_args=f"pretrained={model},method=fathom,budget=24,k=64",
        tasks=["fathom_ruler_vt"],
        limit=1,
        device="cpu",
        task_manager=manager(metadata),
    )
    assert output["config"]["method"] == parse_method("fathom:budget=24").label
    assert output["config"]["scan_bits_per_token"] > 0


def test_the_documented_task_manager_gives_the_tasks_their_metadata(
    loaded: LoadedModel, model: Path, haystack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of docs/lm-eval.md, with the tiny model and text in place of what has to be fetched."""
    page = Path(__file__).resolve().parents[2] / "docs" / "lm-eval.md"
    if not page.is_file():
        pytest.skip("needs the repository")
    snippets = [part.split("```")[0] for part in page.read_text(encoding="utf-8").split("```python\n")[1:]]
    [snippet] = [one for one in snippets if "TaskManager" in one]
    for written, instead in (
        ('FathomLM("smollm2", "fathom", k=128, budget=48)', 'FathomLM(LOADED, "fathom", k=64, budget=24)'),
        ('"max_seq_lengths": [1024], "haystack": "python-docs", "tokenizer": "smollm2"', "**METADATA"),
        ("limit=4", "limit=1"),
    ):
        assert snippet.count(written) == 1, written
        snippet = snippet.replace(written, instead)
    asked: list[dict[str, Any]] = []

    def only_this_folder(**given: Any) -> TaskManager:
        asked.append(given)
        return TaskManager(include_defaults=False, **given)

    monkeypatch.setattr("lm_eval.tasks.TaskManager", only_this_folder)
    metadata = {"max_seq_lengths": [700], "haystack": haystack, "tokenizer": str(model)}
    names: dict[str, Any] = {"LOADED": loaded, "METADATA": metadata}
    exec(compile(snippet, str(page), "exec"), names)
    assert asked == [{"include_path": str(PATH), "metadata": metadata}]
    [row] = names["results"]["results"].values()
    assert 0 <= row["hit_rate_700,none"] <= 1


@pytest.mark.slow
def test_the_built_in_ruler_tasks_that_need_no_network(loaded: LoadedModel, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their essays and question sets need the hub. ``ruler_vt`` never ends with a tokenizer that makes as many tokens as the tiny one."""
    nltk = pytest.importorskip("nltk")
    pytest.importorskip("wonderwords", reason="lm-eval's RULER tasks need wonderwords: pip install 'lm-eval[ruler]'")
    # They ask for data of nltk that only the essays use.
    monkeypatch.setattr(nltk, "download", lambda *arguments, **options: False)
    folder = Path(lm_eval.__file__).parent / "tasks" / "ruler"
    metadata = {"max_seq_lengths": [1024], "tokenizer": str(model)}
    tasks = ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_fwe"]
    lm = FathomLM(loaded, "fathom", 64, budget=24)
    results, answers = evaluated(lm, tasks, metadata, 1, folder)
    assert [len(answers[task]) for task in tasks] == [1, 1, 1, 1]
    assert all(0 <= results[task]["1024,none"] <= 1 for task in tasks)
    assert len(lm.results) == 4
    assert all(result.fired == result.steps * loaded.facts.layers for result in lm.results)


@pytest.mark.model
@pytest.mark.slow
def test_dense_equals_hf_on_smollm2(smollm2: LoadedModel, haystack: str) -> None:
    metadata = {"max_seq_lengths": [600], "pretrained": "smollm2", "haystack": haystack}
    tasks = ["fathom_ruler_niah_single", "fathom_ruler_fwe"]
    ours, our_answers = evaluated(FathomLM(smollm2, "dense"), tasks, metadata, 2)
    folder = Path(str(smollm2.tokenizer.name_or_path))
    theirs, their_answers = evaluated(HFLM(pretrained=str(folder), dtype="float32", device="cpu"), tasks, metadata, 2)
    assert our_answers == their_answers
    assert same_scores(ours, theirs)
    assert ours["fathom_ruler_niah_single"]["hit_rate,none"] > 0
