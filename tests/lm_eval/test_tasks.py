"""The tasks as lm-eval loads them: the samples of our own command, made one by one, and every documented trap."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'fathom-eval[lm-eval]'")

from transformers import AutoTokenizer

from fathom_eval.cli import main
from fathom_eval.errors import UserError
from fathom_eval.sessions import plain
from fathom_eval.sessions.tokenizers import load_tokenizer
from fathom_eval.tasks.haystack import load_haystack
from fathom_eval.tasks.lm_eval import PATH, ruler, sessions
from fathom_eval.tasks.samples import TASKS, Sample, SampleBuilder
from tests.lm_eval.conftest import Load
from tests.tiny import save_tiny

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}"
    "{% if not loop.last or add_generation_prompt %}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
NAMES = {f"fathom_ruler_{name}": name for name in TASKS}


def requests(task: Any, limit: int | None = None, **options: Any) -> list[tuple[str, dict[str, Any]]]:
    task.build_all_requests(limit=limit, **options)
    return [instance.args for instance in task.instances]


@pytest.mark.parametrize("seed", [0, 5])
def test_the_prompts_are_those_of_the_ruler_command(seed: int, load: Load, model: Path, haystack: str) -> None:
    metadata = {"max_seq_lengths": [700], "tokenizer": str(model), "haystack": haystack, "seed": seed, "decoys": 3}
    builder = SampleBuilder(load_tokenizer(str(model)), load_haystack(haystack), seed=seed, decoys=3)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tasks = load(["fathom_ruler"], metadata)
    assert set(tasks) == set(NAMES)
    for name, task in tasks.items():
        for index, (prompt, arguments) in enumerate(requests(task, limit=2)):
            sample = builder.build(NAMES[name], 700, index)
            assert prompt == sample.prompt
            assert tuple(tokenizer(prompt).input_ids) == sample.prompt_ids
            assert arguments["max_gen_toks"] == sample.max_new_tokens == TASKS[NAMES[name]].max_new_tokens
            assert arguments["until"] == []
            assert task.eval_docs[index]["outputs"] == list(sample.gold)


def test_with_the_chat_template_the_prompts_are_those_of_the_ruler_command(tmp_path: Path, load: Load, haystack: str) -> None:
    folder = save_tiny(tmp_path / "chat")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    tokenizer = load_tokenizer(str(folder))
    builder = SampleBuilder(tokenizer, load_haystack(haystack), chat_template=True)

    def apply(messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, continue_final_message=not add_generation_prompt
            )
        )

    metadata = {"max_seq_lengths": [700], "tokenizer": str(folder), "haystack": haystack, "chat_template": True}
    for name, task in load(["fathom_ruler"], metadata).items():
        [(prompt, _)] = requests(task, limit=1, apply_chat_template=True, fewshot_as_multiturn=True, chat_template=apply)
        assert prompt.startswith("<|user|>\nHere is")
        assert prompt == builder.build(NAMES[name], 700, 0).prompt


def test_only_the_samples_within_the_limit_are_built(load: Load, model: Path, haystack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    build = SampleBuilder.build

    def counted(builder: SampleBuilder, task: str, context: int, index: int) -> Sample:
        built.append(index)
        return build(builder, task, context, index)

    monkeypatch.setattr(SampleBuilder, "build", counted)
    metadata = {"max_seq_lengths": [700], "tokenizer": str(model), "haystack": haystack}
    [task] = load(["fathom_ruler_vt"], metadata).values()
    assert len(task.eval_docs) == 500
    assert len(requests(task, limit=3)) == 3
    assert len(list(task.doc_iterator(limit=3))) == 3
    assert built == [0, 1, 2]


def test_samples_and_several_lengths(load: Load, model: Path, haystack: str) -> None:
    metadata = {"max_seq_lengths": "600,700", "samples": "2", "tokenizer": str(model), "haystack": haystack}
    [task] = load(["fathom_ruler_niah_single"], metadata).values()
    documents = list(task.eval_docs)
    assert [(document["max_length"], document["index"]) for document in documents] == [(600, 0), (700, 0), (600, 1), (700, 1)]
    assert all(0.97 * document["max_length"] <= document["prompt_tokens"] <= document["max_length"] for document in documents)
    assert task.eval_docs[-1] == documents[3]
    assert task.eval_docs[1:3] == documents[1:3]
    with pytest.raises(IndexError):
        task.eval_docs[4]


def test_include_paths_may_be_a_list(load: Load, model: Path, haystack: str, tmp_path: Path) -> None:
    metadata = {"max_seq_lengths": [700], "tokenizer": str(model), "haystack": haystack}
    assert set(load(["fathom_ruler_fwe"], metadata, include_path=[str(tmp_path), str(PATH)])) == {"fathom_ruler_fwe"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_seq_lengths": None}, "the prompt length is not given"),
        ({"max_seq_lengths": []}, "max_seq_lengths in metadata is empty"),
        ({"max_seq_lengths": ["many"]}, "'many' is not a whole number of at least 1"),
        ({"max_seq_lengths": [True]}, "'True' is not a whole number"),
        ({"max_seq_lengths": None, "max_seq_length": 700}, "metadata has no 'max_seq_length'; did you mean 'max_seq_lengths'?"),
        ({"sample": 3}, "metadata has no 'sample'; did you mean 'samples'?"),
        ({"samples": 0}, "samples in metadata: '0' is not a whole number of at least 1"),
        ({"chat_template": "maybe"}, "chat_template in metadata: 'maybe' is not true or false"),
        ({"haystack": 3}, "haystack in metadata: '3' is not a string"),
        ({"haystack": "wikitxt"}, "did you mean 'wikitext'?"),
        ({"tokenizer": None}, "no tokenizer is named"),
        ({"tokenizer": ""}, "no tokenizer is named"),
        ({"tokenizer": {}}, "no tokenizer is named"),
        ({"tokenizer": {"name": "x"}}, "the tokenizer in metadata is a dict"),
        ({"tokenizer": "nowhere"}, "there is no tokenizer 'nowhere'"),
        ({"max_length": 711}, "700 tokens and 12 generated ones of niah_single exceed the model's 711: lm-eval would cut the beginning"),
        ({"max_seq_lengths": [40]}, "context 40 is too short"),
    ],
)
def test_bad_metadata_is_one_clear_line(changed: dict[str, Any], message: str, load: Load, model: Path, haystack: str) -> None:
    metadata = {"max_seq_lengths": [700], "tokenizer": str(model), "haystack": haystack, **changed}
    with pytest.raises(UserError) as error:
        load(["fathom_ruler_niah_single"], {key: value for key, value in metadata.items() if value is not None})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_prompt_that_fits_the_model_with_its_generation_is_taken(load: Load, model: Path, haystack: str) -> None:
    metadata = {"max_seq_lengths": [700], "tokenizer": str(model), "haystack": haystack, "max_length": 712}
    assert load(["fathom_ruler_niah_single"], metadata)


def test_the_limit_is_read_from_the_model(load: Load, tmp_path: Path, haystack: str) -> None:
    short = str(save_tiny(tmp_path / "short", max_positions=700))
    with pytest.raises(UserError, match=r"exceed the model's 700: .* longest possible length is 688"):
        load(["fathom_ruler_niah_single"], {"max_seq_lengths": [700], "pretrained": short, "haystack": haystack})
    metadata = {"max_seq_lengths": [1400], "pretrained": short, "haystack": haystack, "rope_scaling": "yarn:2"}
    with pytest.raises(UserError, match="exceed the model's 1400"):
        load(["fathom_ruler_niah_single"], metadata)


def test_the_tokenizer_comes_before_the_model(load: Load, model: Path, haystack: str) -> None:
    metadata = {"max_seq_lengths": [700], "haystack": haystack}
    for named in ({"pretrained": str(model)}, {"model": str(model)}, {"tokenizer": str(model), "pretrained": "owner/other"}):
        assert load(["fathom_ruler_niah_single"], {**metadata, **named})
    with pytest.raises(UserError, match="there is no tokenizer 'nowhere'"):
        load(["fathom_ruler_niah_single"], {**metadata, "tokenizer": "nowhere", "pretrained": str(model)})


def test_any_model_is_scored_with_standard_errors(load: Load, model: Path, haystack: str) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM

    class HalfRight(LM):  # type: ignore[misc]
        """Knows the answer of every other document."""

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return [" and ".join(request.doc["outputs"]) if request.doc["index"] % 2 else "?" for request in requests]

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            raise NotImplementedError

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            raise NotImplementedError

    from lm_eval.tasks import TaskManager

    metadata = {"max_seq_lengths": [600, 2048], "samples": 4, "tokenizer": str(model), "haystack": haystack}
    manager = TaskManager(include_path=str(PATH), include_defaults=False, metadata=metadata)
    results = simple_evaluate(model=HalfRight(), tasks=["fathom_ruler"], task_manager=manager, metadata=metadata)["results"]
    for name in NAMES:
        assert results[name]["hit_rate,none"] == results[name]["hit_rate_600,none"] == results[name]["hit_rate_2048,none"] == 0.5
        assert results[name]["hit_rate_stderr,none"] == pytest.approx(math.sqrt(8 / 7 * 0.25 / 8))
        assert results[name]["hit_rate_600_stderr,none"] == pytest.approx(math.sqrt(4 / 3 * 0.25 / 4))
    assert results["fathom_ruler"]["hit_rate,none"] == 0.5
    assert 0 < results["fathom_ruler"]["hit_rate_stderr,none"] < results["fathom_ruler_vt"]["hit_rate_stderr,none"]


def test_a_part_of_the_gold_strings_is_a_part_of_the_score() -> None:
    assert ruler.score_ruler({"outputs": ["12", "34", "56", "78"], "max_length": 900}, ["78 12 3"]) == {
        "hit_rate": 0.5,
        "hit_rate_900": 0.5,
    }


SESSIONS = {"session_tokens": "3000:4000", "sessions": 2}


def test_sessions_are_those_of_the_sessions_command(load: Load, model: Path) -> None:
    from fathom_eval.models import LoadedModel
    from fathom_eval.session_data import SourceSettings, prepare_sessions

    tokenizer: Any = load_tokenizer(str(model))
    none: Any = None
    settings = SourceSettings(trajectories=None, rendering="auto", sessions=2, low=3000, high=4000)
    expected = prepare_sessions(LoadedModel(none, tokenizer, none), settings).sessions
    [task] = load(["fathom_sessions"], {**SESSIONS, "tokenizer": str(model)}).values()
    asked = requests(task)
    assert len(asked) == len(expected) == 2
    for (prompt, arguments), session in zip(asked, expected, strict=True):
        # HFLM adds no special tokens to a text that begins with BOS, as these do.
        assert prompt.startswith(tokenizer.bos_token)
        assert tokenizer(prompt, add_special_tokens=False).input_ids == session.prompt_ids
        assert arguments["until"] == list(plain.STOP_STRINGS)
        assert arguments["max_gen_toks"] == sessions.MAX_NEW_TOKENS


def test_steps_are_compared_with_the_recorded_one_and_with_a_reference(load: Load, model: Path, tmp_path: Path) -> None:
    [task] = load(["fathom_sessions"], {**SESSIONS, "tokenizer": str(model)}).values()
    document = task.eval_docs[0]
    assert document["reference"] is None
    assert task.process_results(document, [document["target"]]) == {"agreement_recorded": 1.0}
    assert task.process_results(document, ["@"])["agreement_recorded"] < 0.1
    samples = tmp_path / "samples.jsonl"
    samples.write_text(json.dumps({"doc": document, "filtered_resps": ["a b c d"]}) + "\n", encoding="utf-8")
    [task] = load(["fathom_sessions"], {**SESSIONS, "tokenizer": str(model), "reference": str(samples)}).values()
    assert [document["reference"] for document in task.eval_docs] == ["a b c d", None]
    assert task.process_results(task.eval_docs[0], ["a b x y"])["agreement_reference"] == 0.5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"trajectory": "runs.jsonl"}, "metadata has no 'trajectory'; did you mean 'trajectories'?"),
        ({"session_tokens": "9"}, "session tokens '9' are no range"),
        ({"max_length": 4000}, "4000 tokens and 256 generated ones exceed the model's 4000"),
        ({"rendering": "plan"}, "unknown rendering 'plan' in metadata; did you mean 'plain'?"),
        ({"reference": "nowhere.jsonl"}, "the reference 'nowhere.jsonl' cannot be read"),
    ],
)
def test_bad_metadata_of_sessions_is_one_clear_line(changed: dict[str, Any], message: str, load: Load, model: Path) -> None:
    with pytest.raises(UserError) as error:
        load(["fathom_sessions"], {**SESSIONS, "tokenizer": str(model), **changed})
    assert message in str(error.value)


@pytest.mark.parametrize(("text", "message"), [("{}", "is no file of samples"), ("", "the reference holds none of these sessions")])
def test_a_reference_of_something_else_is_refused(text: str, message: str, load: Load, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        load(["fathom_sessions"], {**SESSIONS, "tokenizer": str(model), "reference": str(path)})


def test_the_command_prints_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lm-eval", "path"]) == 0
    printed = Path(capsys.readouterr().out.strip())
    assert {path.stem for path in printed.glob("*.yaml")} == {*NAMES, "fathom_ruler", "fathom_sessions"}
    assert main(["lm-eval", "pth"]) == 2
    assert capsys.readouterr().err == "error: unknown action 'pth' of 'lm-eval'; did you mean 'path'?\n"
