"""Steps of agent sessions: where they end, what is compared with what, and calls of tools in them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fathom_eval.agent_sessions as sessions_module
from fathom_eval.agent_sessions import DecodeSettings, Unit, before_stop, evaluate, step_branches, with_controls
from fathom_eval.branches import Branch
from fathom_eval.decode import BranchResult, decode
from fathom_eval.errors import UserError
from fathom_eval.methods import parse_method, parse_methods
from fathom_eval.prefill import prefill
from fathom_eval.scoring import step_agreement
from fathom_eval.session_data import SessionData, check_k, choose_bounds
from fathom_eval.tool_calls import tool_call_state
from tests.agent_sessions.runs import METHODS, data_of
from tests.sessions.templates import FAILS_ON_TOOLS, WITH_TOOLS, tokenizer_with
from tests.tiny import tiny_model


def test_a_session_gives_the_same_steps_wherever_it_stands(trajectories: Path) -> None:
    loaded = tiny_model(max_positions=2048)
    data = data_of(loaded, trajectories)
    assert len(data.sessions) >= 2
    turned = dataclasses.replace(data, sessions=data.sessions[::-1])
    branches = step_branches(with_controls(parse_methods(METHODS)), [64], loaded.facts)

    def steps(of: SessionData) -> dict[Any, Any]:
        units = [Unit(index, branches) for index in range(len(of.sessions))]
        found = [record for _, unit in evaluate(loaded, of, units, DecodeSettings(8, 64)) for record in unit]
        return {(record["session_id"], record["label"]): (record["token_ids"], record["bits"]) for record in found}

    assert steps(data) == steps(turned)
    other_seed = {session.id for session in data_of(loaded, trajectories, seed=1).sessions}
    assert other_seed != {session.id for session in data.sessions}


@pytest.mark.parametrize("add_bos", [True, False])
def test_dense_equals_generate_with_stop_strings(trajectories: Path, add_bos: bool) -> None:
    loaded = tiny_model(max_positions=2048, add_bos=add_bos)
    prompt = data_of(loaded, trajectories).sessions[0].prompt_ids
    dense = [Branch(parse_method("dense"), None)]
    [free] = decode(loaded, prefill(loaded, prompt), dense, 40)
    text = loaded.tokenizer.decode(free.token_ids)
    first, second = re.findall(r"[ -~]{5,}", text)[:2]
    # Stop strings out of what the model writes: across tokens, within one, one that begins in the prompt, one that never comes.
    stops = [(first[2:5], "never this"), (second[-4:], second[-3:-1]), (f":\n{text[0]}", "no"), ("no such text",)]
    ends = set()
    for stop_strings in stops:
        [ours] = decode(loaded, prefill(loaded, prompt), dense, 40, stop_strings=stop_strings)
        loaded.model.set_attn_implementation("eager")
        theirs = loaded.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),  # else the BOS is taken for padding
            max_new_tokens=40,
            do_sample=False,
            stop_strings=list(stop_strings),
            tokenizer=loaded.tokenizer,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert list(ours.token_ids) == theirs
        assert ours.finish == ("stop" if len(theirs) < 40 else "length")
        assert ours.steps == len(theirs)
        ends.add(ours.finish)
    assert ends == {"stop", "length"}


def test_rows_stop_by_themselves(trajectories: Path) -> None:
    loaded = tiny_model(max_positions=2048)
    prefix = prefill(loaded, data_of(loaded, trajectories).sessions[0].prompt_ids)
    branches = [Branch(parse_method("dense"), None), Branch(parse_method("exact"), 64), Branch(parse_method("landmark"), 40)]
    free = decode(loaded, prefix, branches, 30)
    stop = loaded.tokenizer.decode(free[2].token_ids)[4:9]
    together = decode(loaded, prefix, branches, 30, stop_strings=(stop,))
    for branch, result, unstopped in zip(branches, together, free, strict=True):
        [alone] = decode(loaded, prefix, [branch], 30, stop_strings=(stop,))
        assert (result.token_ids, result.finish, result.steps, result.bits) == (alone.token_ids, alone.finish, alone.steps, alone.bits)
        assert result.token_ids == unstopped.token_ids[: len(result.token_ids)]
    assert together[2].finish == "stop"


def test_what_is_compared_with_what(trajectories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_model(max_positions=2048)
    data = data_of(loaded, trajectories)
    data.sessions[0] = dataclasses.replace(data.sessions[0], target_text="t i d e s")
    said = {"dense": "d i e", "exact": "t i d e", "sparq": "d i e t\n\n### User:\n", "landmark": "t i d e", "loki": ""}

    def canned(loaded: Any, prefix: Any, branches: list[Branch], *_: Any, **options: Any) -> list[BranchResult]:
        assert options["stop_strings"] == data.renderer.stop_strings
        results = []
        for branch in branches:
            name = branch.spec.method.name
            finish = {"sparq": "stop", "loki": "error"}.get(name, "length")
            ids = tuple(loaded.tokenizer(said[name], add_special_tokens=False).input_ids)
            results.append(BranchResult(branch, ids, finish, "broken" if name == "loki" else None, 1, 2, None, None, None, 1.0, 0.0))
        return results

    monkeypatch.setattr(sessions_module, "decode", canned)
    branches = step_branches(with_controls(parse_methods("sparq,landmark,loki")), [64], loaded.facts)
    [(_, found)] = list(evaluate(loaded, data, [Unit(0, branches)], DecodeSettings(8, 64)))
    by_method = {record["method"]: record for record in found if "batch" not in record["options"]}
    # The ratio is not symmetric: the step compared with stands first. ratio(tide, diet) is 0.25, ratio(diet, tide) is 0.5.
    assert step_agreement("t i d e", "d i e t") != step_agreement("d i e t", "t i d e")
    sparq = by_method["sparq"]
    assert sparq["generation"] == "d i e t"
    assert sparq["score"] == sparq["agreement_exact"] == step_agreement("t i d e", "d i e t")
    assert sparq["agreement_dense"] == step_agreement("d i e", "d i e t")
    assert sparq["agreement_recorded"] == step_agreement("t i d e s", "d i e t")
    assert (sparq["exact_match"], sparq["first_divergent_token"]) == (False, 0)
    assert by_method["exact"]["dense_agreement_exact"] == step_agreement("t i d e", "d i e")
    assert by_method["dense"]["agreement_exact"] is None
    landmark = by_method["landmark"]
    assert (landmark["score"], landmark["exact_match"], landmark["first_divergent_token"]) == (1.0, True, None)
    loki = by_method["loki"]
    assert [loki[name] for name in ("score", "agreement_dense", "agreement_recorded", "exact_match", "tool_call")] == [None] * 5
    assert loki["error"] == "broken"


def test_text_ends_before_the_stop_string() -> None:
    stops = ("\n\n### User:\n", "\n\n### Tool result (")
    assert before_stop("done\n\n### Tool result (", stops, "stop") == "done"
    assert before_stop("a\n\n### Tool result (x\n\n### User:\n", stops, "stop") == "a"
    assert before_stop("\n### User:\n", stops, "stop") == "", "the stop string began in the prompt"
    assert before_stop("talks of\n\n### User:\n", stops, "length") == "talks of\n\n### User:\n"


CALL = '<tool_call>\n{"name": "execute_bash", "arguments": {"command": "ls"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "plain", "cut", "state"),
    [
        (f"Look.\n{CALL}", True, False, "valid"),
        (f"{CALL}\n{CALL}", True, False, "valid"),
        (CALL.replace("execute_bash", "rm_all"), True, False, "unknown tool"),
        (f"{CALL}\n{CALL.replace('execute_bash', 'rm_all')}", True, False, "unknown tool"),
        (CALL.replace('"ls"}', '"ls"'), True, False, "broken"),
        (CALL.replace('{"command": "ls"}', "5"), True, False, "broken"),
        ("<tool_call>\n[1]\n</tool_call>", True, False, "broken"),
        (CALL[:40], True, True, "unfinished"),
        (CALL[:40], True, False, "broken"),
        ("I am done.", True, False, "none"),
        ('{"name": "execute_bash", "arguments": {}}', True, False, "none"),
        ('{"name": "execute_bash", "parameters": {"command": "ls"}}', False, False, "valid"),
        ('[TOOL_CALLS][{"name": "execute_bash", "arguments": "{\\"command\\": 1}"}]', False, False, "valid"),
        ("<function=execute_bash>\n<parameter=command>ls</parameter></function>", False, False, "valid"),
        ("<function=other>", False, False, "unknown tool"),
        ('[TOOL_CALLS][{"name": "exec', False, True, "unfinished"),
        ("{" * 5000 + CALL, False, False, "broken"),
        ('{"name": "a name in data"}', False, False, "none"),
    ],
)
def test_tool_calls(text: str, plain: bool, cut: bool, state: str) -> None:
    assert tool_call_state(text, {"execute_bash", "finish"}, plain=plain, cut=cut) == state


def test_a_model_with_a_template_uses_it(tmp_path: Path, trajectories: Path) -> None:
    tokenizer = tokenizer_with(WITH_TOOLS)
    loaded = dataclasses.replace(tiny_model(max_positions=2048, vocab=len(tokenizer)), tokenizer=tokenizer)
    data = data_of(loaded, trajectories)
    assert data.rendering == "the tokenizer's chat template"
    assert data.sessions[0].tools == {"execute_bash"}
    branches = step_branches(with_controls([]), [64], loaded.facts)
    [(_, found)] = list(evaluate(loaded, data, [Unit(0, branches)], DecodeSettings(6, 64)))
    assert len(found) == 4
    broken = dataclasses.replace(loaded, tokenizer=tokenizer_with(FAILS_ON_TOOLS))
    with pytest.raises(UserError, match="fails on tools"):
        data_of(broken, trajectories, rendering="template")
    assert "fails on tools" in data_of(broken, trajectories).rendering


def test_bounds_follow_the_model_and_the_set() -> None:
    facts = tiny_model(max_positions=8192).facts
    assert choose_bounds(None, facts, 256, is_builtin=True)[:2] == (6000, 7500)
    long = dataclasses.replace(facts, max_positions=131072)
    assert choose_bounds(None, long, 256, is_builtin=False) == (80_000, 100_000, "the full length")
    low, high, why = choose_bounds(None, long, 256, is_builtin=True)
    assert (low, high) == (9600, 12000)
    assert "built-in" in why
    assert choose_bounds("500:900", facts, 256, is_builtin=False) == (500, 900, "as asked")
    with pytest.raises(UserError, match=r"holds 8,192; give --session-tokens up to 7,936 or --rope-scaling yarn:13$"):
        choose_bounds("80000:100000", facts, 256, is_builtin=False)
    with pytest.raises(UserError, match=r"yarn:8$"):
        choose_bounds("30000:60000", dataclasses.replace(facts, max_positions=4 * 8192), 256, is_builtin=False, scaling=4)
    with pytest.raises(UserError, match="too few for a session"):
        choose_bounds(None, facts, 8000, is_builtin=True)
    with pytest.raises(UserError, match="k=6,000 is no selection from sessions of 6,000 to 7,500 tokens"):
        check_k([512, 6000], 6000, 7500, facts)
