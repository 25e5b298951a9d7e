"""The plain rendering, for models whose chat template takes no tools. All of its layout is here.

A change of anything in this file needs a new :data:`PLAIN_VERSION`: it is part of the identity of sessions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fathom_eval.sessions.steps import Assistant, Step, System, ToolCall, ToolResult, User

PLAIN_VERSION = 1

SYSTEM_HEADER = "### System:\n"
TOOLS_HEADER = "Tools, as JSON schemas, one a line:\n"
USER_HEADER = "### User:\n"
ASSISTANT_HEADER = "### Assistant:\n"
RESULT_HEADER = "### Tool result ({name}):\n"
CALL = "<tool_call>\n{call}\n</tool_call>"
GAP = "\n\n"
STOP_STRINGS = (f"{GAP}### System:\n", f"{GAP}### User:\n", f"{GAP}### Assistant:\n", f"{GAP}### Tool result (")
"""A generation that reaches one of these has gone past its step."""


def plain_tools(tools: tuple[Mapping[str, Any], ...]) -> str:
    """The tools that a system prompt ends with; empty without tools."""
    lines = [json.dumps(tool, ensure_ascii=False, sort_keys=True) for tool in tools]
    return TOOLS_HEADER + "\n".join(lines) if lines else ""


def plain_call(call: ToolCall) -> str:
    """A tool call, its arguments as recorded, broken or not."""
    return CALL.format(call=f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {call.arguments}}}')


def plain_header(step: Step) -> str:
    """What stands before a step's text. For the model's responses it ends where the model goes on."""
    match step:
        case System():
            return SYSTEM_HEADER
        case User():
            return USER_HEADER
        case Assistant():
            return ASSISTANT_HEADER
        case ToolResult():
            return RESULT_HEADER.format(name=step.name or "tool")


def plain_body(step: Step) -> str:
    """A step's text, without header."""
    if isinstance(step, Assistant):
        return "\n".join(part for part in (step.content, *map(plain_call, step.tool_calls)) if part)
    return step.content
