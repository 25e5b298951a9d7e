"""From a trajectory's steps to the text that a model reads: with its chat template where that takes tools, plainly otherwise."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fathom_eval.errors import UserError
from fathom_eval.sessions import plain
from fathom_eval.sessions.safe_text import visible
from fathom_eval.sessions.steps import Assistant, Step, System, ToolCall, ToolResult, Trajectory, User
from fathom_eval.tasks.encoding import TEMPLATE_DATE

RENDERINGS = ("auto", "template", "plain")


class UnrenderableError(Exception):
    """A chat template refuses a trajectory, or rewrites what it wrote before. The message is safe to print."""


@dataclass(frozen=True)
class TargetSpan:
    """Where a response of the model lies in the rendering of its trajectory.

    Attributes:
        step: index of the step.
        start: character at which the model went on by itself: just after the header of its turn.
        end: character at which its turn ends.
    """

    step: int
    start: int
    end: int


@dataclass(frozen=True)
class Rendering:
    """The text of a whole trajectory.

    Attributes:
        text: everything the model read and wrote.
        targets: of :attr:`Trajectory.targets`, those of which the prompt is a prefix of ``text``.
        refused: targets for which it is not: the template renders the steps before them differently once later ones follow.
    """

    text: str
    targets: tuple[TargetSpan, ...]
    refused: int


class Renderer(Protocol):
    """Renders trajectories. ``identity`` names everything its output depends on but the trajectory."""

    identity: str
    stop_strings: tuple[str, ...]
    raw_special_tokens: bool
    """Whether special tokens that stand in the text act as such. They must where the rendering itself is made of them."""

    def render(self, trajectory: Trajectory) -> Rendering:
        """The trajectory's text. Raises UnrenderableError."""


class PlainRenderer:
    """Renders as :mod:`fathom_eval.sessions.plain` lays out. A special token that a trajectory quotes is text like any other."""

    identity = f"plain-{plain.PLAIN_VERSION}"
    stop_strings: tuple[str, ...] = plain.STOP_STRINGS
    raw_special_tokens = False

    def render(self, trajectory: Trajectory) -> Rendering:
        """The trajectory's text."""
        tools = plain.plain_tools(trajectory.tools)
        steps: list[Step] = list(trajectory.steps)
        if tools and not (steps and isinstance(steps[0], System)):
            return self._join([(plain.SYSTEM_HEADER, tools, -1), *self._parts(steps, "")], trajectory)
        return self._join(self._parts(steps, tools), trajectory)

    @staticmethod
    def _parts(steps: Sequence[Step], tools: str) -> list[tuple[str, str, int]]:
        parts = [(plain.plain_header(step), plain.plain_body(step), position) for position, step in enumerate(steps)]
        if tools:
            header, body, position = parts[0]
            parts[0] = (header, f"{body}{plain.GAP}{tools}" if body else tools, position)
        return parts

    @staticmethod
    def _join(parts: Sequence[tuple[str, str, int]], trajectory: Trajectory) -> Rendering:
        wanted = set(trajectory.targets)
        texts: list[str] = []
        targets: list[TargetSpan] = []
        length = 0
        for header, body, position in parts:
            start = length + len(header)
            if position in wanted:
                targets.append(TargetSpan(position, start, start + len(body)))
            texts.append(f"{header}{body}{plain.GAP}")
            length += len(texts[-1])
        return Rendering("".join(texts), tuple(targets), 0)


class TemplateRenderer:
    """Renders with the tokenizer's own chat template.

    Ids of calls become nine letters and digits, the one form that every template takes. A template that writes a beginning-of-sequence
    token is cut by it: a session has one, and it belongs to the session.
    """

    stop_strings: tuple[str, ...] = ()
    raw_special_tokens = True

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        self.identity = f"template-{hashlib.sha256(repr(template).encode()).hexdigest()[:12]}"

    def render(self, trajectory: Trajectory) -> Rendering:
        """The trajectory's text. Raises UnrenderableError where the template refuses its messages."""
        messages = [_message(step) for step in trajectory.steps]
        tools = [dict(tool) for tool in trajectory.tools] or None
        text = self._apply(messages, tools)
        targets: list[TargetSpan] = []
        refused = 0
        for position in trajectory.targets:
            prompt = self._apply(messages[:position], tools, prompt=True)
            with_step = self._apply(messages[: position + 1], tools)
            if text.startswith(prompt):
                end = len(with_step) if text.startswith(with_step) else len(prompt)
                targets.append(TargetSpan(position, len(prompt), max(end, len(prompt))))
            else:
                refused += 1
        return Rendering(text, tuple(targets), refused)

    def _apply(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, prompt: bool = False) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt, date_string=TEMPLATE_DATE
            )
        # A template is a program of its own: jinja errors, and errors of what it calls.
        except Exception as error:
            raise UnrenderableError(f"the chat template refuses it: {visible(' '.join(str(error).split()), 120)}") from None
        bos = self._tokenizer.bos_token
        return str(text).removeprefix(bos) if bos else str(text)


def _message(step: Step) -> dict[str, Any]:
    match step:
        case System():
            return {"role": "system", "content": step.content}
        case User():
            return {"role": "user", "content": step.content}
        case Assistant():
            message: dict[str, Any] = {"role": "assistant", "content": step.content}
            if step.tool_calls:
                message["tool_calls"] = [_call(call) for call in step.tool_calls]
            return message
        case ToolResult():
            return {"role": "tool", "content": step.content, "name": step.name, "tool_call_id": _template_id(step.call_id)}


def _call(call: ToolCall) -> dict[str, Any]:
    parsed = call.parsed()
    # Templates write objects as JSON themselves; broken arguments can only be given as the text they are.
    arguments: Mapping[str, Any] | str = call.arguments if parsed is None else parsed
    return {"id": _template_id(call.id), "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _template_id(call_id: str) -> str:
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def choose_renderer(tokenizer: Any, choice: str = "auto") -> tuple[Renderer, str]:
    """The renderer for a tokenizer, and why it is that one.

    Args:
        tokenizer: of transformers.
        choice: ``template``, ``plain``, or ``auto``: the chat template if it takes tools, plainly otherwise.

    Raises:
        UserError: ``template`` was asked for and there is none that takes tools.
    """
    if choice == "plain":
        return PlainRenderer(), "plain rendering, as asked"
    problem = template_problem(tokenizer)
    if problem is None:
        return TemplateRenderer(tokenizer), "the tokenizer's chat template"
    if choice == "template":
        raise UserError(f"sessions cannot use the chat template: {problem}; leave the choice out or take the plain rendering")
    return PlainRenderer(), f"plain rendering: {problem}"


def template_problem(tokenizer: Any) -> str | None:
    """Why the tokenizer's chat template cannot render tool use, or None if it can: a small conversation is tried."""
    if not getattr(tokenizer, "chat_template", None):
        return "the tokenizer has no chat template"
    tool = {
        "type": "function",
        "function": {
            "name": "probe_tool",
            "description": "probe",
            "parameters": {"type": "object", "properties": {"probe_argument": {"type": "string"}}},
        },
    }
    steps = (
        System("probe system", 0),
        User("probe task", 1),
        Assistant("probe thought", (ToolCall("probe", "probe_tool", '{"probe_argument": "probe value"}'),), 2),
        ToolResult("probe", "probe result", "probe_tool", 3),
        Assistant("probe answer", (), 4),
    )
    trajectory = Trajectory("probe", "", (tool,), steps, "swe-gym", None, "probe")
    try:
        rendering = TemplateRenderer(tokenizer).render(trajectory)
    except UnrenderableError as error:
        return str(error).replace("refuses it", "fails on tools")
    expected = ("probe system", "probe task", "probe thought", "probe value", "probe result", "probe answer")
    if rendering.text.count("probe_tool") < 2 or "probe_argument" not in rendering.text:
        return "the chat template takes no tools"
    lost = [text for text in expected if text not in rendering.text]
    if lost:
        return f"the chat template leaves out the {lost[0].removeprefix('probe ')}"
    return None
