"""Rendering, plain and with chat templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from fathom_eval.errors import UserError
from fathom_eval.sessions import plain
from fathom_eval.sessions.rendering import PlainRenderer, TemplateRenderer, UnrenderableError, choose_renderer, template_problem
from tests.sessions.rows import TOOL, chat_call, chat_messages, message, read_row, rebench_row
from tests.sessions.templates import FAILS_ON_TOOLS, NEEDS_TURNS, STRIPS_EARLIER, WITH_TOOLS, WITHOUT_TOOLS, tokenizer_with

PLAIN = """\
### System:
You are an agent.

Tools, as JSON schemas, one a line:
{"function": {"description": "run", "name": "execute_bash", "parameters": {"properties": {"command": {"type": "string"}}, "required": \
["command"], "type": "object"}}, "type": "function"}

### User:
Fix the bug.

### Assistant:
thought0
<tool_call>
{"name": "execute_bash", "arguments": {"command": "ls"}}
</tool_call>

### Tool result (execute_bash):
file0.py

### Assistant:
<tool_call>
{"name": "execute_bash", "arguments": {"command": "ls}
</tool_call>

"""


def test_plain_rendering_version_1(tmp_path: Path) -> None:
    broken = message("assistant", "", tool_calls=[chat_call("b", '{"command": "ls')])
    trajectory = read_row(tmp_path, rebench_row([*chat_messages(1, words=1), broken]))
    rendering = PlainRenderer().render(trajectory)
    assert rendering.text == PLAIN
    assert plain.PLAIN_VERSION == 1
    [target] = rendering.targets
    assert target.step == 2
    assert rendering.text[: target.start].endswith("### Assistant:\n")
    assert rendering.text[target.start : target.end].startswith("thought0\n<tool_call>")
    assert any(rendering.text[target.end :].startswith(stop) for stop in plain.STOP_STRINGS)


def test_plain_rendering_without_system_prompt(tmp_path: Path) -> None:
    messages = chat_messages(1)[1:]
    with_tools = PlainRenderer().render(read_row(tmp_path, rebench_row(messages, tools=[TOOL])))
    assert with_tools.text.startswith("### System:\nTools, as JSON schemas")
    assert PlainRenderer().render(read_row(tmp_path, rebench_row(messages, tools=None))).text.startswith("### User:\nFix the bug.")
    [target] = with_tools.targets
    assert with_tools.text[target.start :].startswith("thought0")


def test_thinking_is_not_rendered(tmp_path: Path) -> None:
    messages = [message("user", "T"), message("assistant", "<think>secret</think>Open.")]
    assert "secret" not in PlainRenderer().render(read_row(tmp_path, rebench_row(messages))).text


def test_template_rendering(tmp_path: Path) -> None:
    trajectory = read_row(tmp_path, rebench_row(chat_messages(2, words=1)))
    rendering = TemplateRenderer(tokenizer_with(WITH_TOOLS)).render(trajectory)
    # The one beginning-of-sequence token belongs to the session.
    assert rendering.text.startswith("<|start|>tools\n")
    assert '<call>execute_bash {"command": "ls"}</call>' in rendering.text
    for target, thought in zip(rendering.targets, ("thought0", "thought1"), strict=True):
        assert rendering.text[: target.start].endswith("<|start|>assistant\n")
        assert rendering.text[target.start : target.end] == f'{thought}<call>execute_bash {{"command": "ls"}}</call><|end|>\n'
    assert rendering.refused == 0


def test_template_that_strips_earlier_turns_is_caught(tmp_path: Path) -> None:
    messages = [
        message("user", "T"),
        message("assistant", "First."),
        message("user", "Go on."),
        message("assistant", "Second."),
        message("user", "And?"),
        message("assistant", "Third."),
    ]
    rendering = TemplateRenderer(tokenizer_with(STRIPS_EARLIER)).render(read_row(tmp_path, rebench_row(messages)))
    # Before the second response the first is stripped in the prompt and in the whole alike, so all prompts are prefixes.
    assert [target.step for target in rendering.targets] == [1, 3, 5]
    rewriting = WITH_TOOLS.replace("{{ m.content }}", "{{ m.content if loop.revindex < 3 else '(old)' }}")
    rendering = TemplateRenderer(tokenizer_with(rewriting)).render(read_row(tmp_path, rebench_row(messages)))
    assert rendering.refused == 3
    assert rendering.targets == ()


def test_choice_of_renderer() -> None:
    renderer, why = choose_renderer(tokenizer_with(WITH_TOOLS))
    assert isinstance(renderer, TemplateRenderer)
    assert why == "the tokenizer's chat template"
    for template, reason in (
        (None, "the tokenizer has no chat template"),
        (WITHOUT_TOOLS, "the chat template takes no tools"),
        (FAILS_ON_TOOLS, "the chat template fails on tools: no\\x1b[31m tools here"),
        (WITH_TOOLS.replace("{{ m.content }}", "{{ '' if m.role == 'tool' else m.content }}"), "the chat template leaves out the result"),
    ):
        tokenizer = tokenizer_with(template)
        renderer, why = choose_renderer(tokenizer)
        assert isinstance(renderer, PlainRenderer)
        assert why == f"plain rendering: {reason}"
        with pytest.raises(UserError, match="sessions cannot use the chat template"):
            choose_renderer(tokenizer, "template")
    assert isinstance(choose_renderer(tokenizer_with(WITH_TOOLS), "plain")[0], PlainRenderer)
    assert template_problem(tokenizer_with(WITH_TOOLS)) is None


def test_template_that_refuses_a_trajectory(tmp_path: Path) -> None:
    messages = [*chat_messages(1), message("user", "a"), message("user", "b")]
    renderer = TemplateRenderer(tokenizer_with(NEEDS_TURNS))
    with pytest.raises(UnrenderableError, match="roles must alternate"):
        renderer.render(read_row(tmp_path, rebench_row(messages)))


def test_template_gets_nine_character_ids(tmp_path: Path) -> None:
    template = WITH_TOOLS.replace("<call>", "<call {{ call.id }}>").replace("{{ m.content }}", "{{ m.tool_call_id or '' }}{{ m.content }}")
    text = TemplateRenderer(tokenizer_with(template)).render(read_row(tmp_path, rebench_row(chat_messages(1)))).text
    identifier = text.split("<call ")[1].split(">")[0]
    assert len(identifier) == 9
    assert identifier.isalnum()
    assert f"{identifier}file0.py" in text
