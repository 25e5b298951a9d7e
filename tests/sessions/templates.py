"""Chat templates for tests, in the style of common ones."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_tokenizer

_TOOLS = "{% if tools %}<|start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>\n{% endif %}"
_CALLS = "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}"
_PROMPT = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"

WITH_TOOLS = (
    f"{{{{ bos_token }}}}{_TOOLS}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}" + _CALLS + "<|end|>\n{% endfor %}" + _PROMPT
)
WITHOUT_TOOLS = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}" + _PROMPT
# The content of all but the last response is cut to what follows the first word, as templates do that strip earlier thinking.
STRIPS_EARLIER = (
    _TOOLS + "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last and loop.nextitem.role == 'user' %}(stripped){% else %}{{ m.content }}{% endif %}"
    + _CALLS
    + "<|end|>\n{% endfor %}"
    + _PROMPT
)
FAILS_ON_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no\x1b[31m tools here') }}{% endif %}{{ m.content }}{% endfor %}"
)
NEEDS_TURNS = (
    _TOOLS + "{% for m in messages %}{% if loop.previtem and loop.previtem.role == m.role and m.role == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|start|>{{ m.role }}\n{{ m.content }}"
    + _CALLS
    + "<|end|>\n{% endfor %}"
    + _PROMPT
)


def tokenizer_with(template: str | None, *, add_bos: bool = True) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer(add_bos=add_bos)
    if template is not None:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|end|>"]})
        tokenizer.chat_template = template
    return tokenizer
