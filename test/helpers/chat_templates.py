"""Minimal chat templates with the tool and reasoning formats of common models, and the special
tokens of those models."""

from __future__ import annotations

from pathlib import Path

from model_files import write_tiny_tokenizer

from llaisys.tokenization import Tokenizer

# Qwen 2.5, Hermes: tools in the system prompt, calls as JSON in tags.
QWEN25 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools\n<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools>\nAnswer with <tool_call>\n{"name": .., "arguments": ..}' }}
    {{- '\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content }}
        {{- '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

# Qwen 3: the same, with a variable that turns reasoning off.
QWEN3 = (
    QWEN25.replace(
        "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}",
        r"""{{- '<|im_start|>' + message.role + '\n' }}
        {%- if message.reasoning_content is string and loop.last %}
            {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content.split('</think>')[-1].lstrip('\n') + '<|im_end|>\n' }}""",
    ).rstrip()
    + r"""
{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\n\n</think>\n\n' }}
{%- endif %}
"""
)

# Llama 3.1: the prompt describes the format; results have their own role.
LLAMA3 = r"""
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- '<|im_start|>ipython\n' + (message.content | tojson) + '<|im_end|>' }}
    {%- elif 'tool_calls' in message and message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' + (call.arguments | tojson) + '}<|im_end|>' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if tools is not none and loop.last %}
            {{- 'Respond in the format {"name": function name, "parameters": dictionary}.\n' }}
            {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}
        {%- endif %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

# Mistral: lists of calls after a marker, ids of nine letters and digits.
MISTRAL = r"""
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and loop.last %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should have length 9!') }}
            {%- endif %}
            {{- out[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + '<|im_end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

# DeepSeek V3: the template takes arguments as text.
DEEPSEEK = r"""
{%- if tools %}{{- 'Tools: ' + (tools | tojson) + '\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.content is none %}
        {{- '<|im_start|>assistant\n<｜tool▁calls▁begin｜>' }}
        {%- for tool in message.tool_calls %}
            {{- '<｜tool▁call▁begin｜>' + tool.type + '<｜tool▁sep｜>' }}
            {{- tool.function.name + '\n' }}
            {{- '```json\n' + tool.function.arguments + '\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><|im_end|>' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

# DeepSeek-R1-Distill-Qwen: opens the reasoning, has no tools.
R1_DISTILL = r"""
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1] %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}
"""

# Tokens of the models' vocabularies -> whether they are special.
QWEN_TOKENS = {
    "<tool_call>": False,
    "</tool_call>": False,
    "<think>": False,
    "</think>": False,
}
MISTRAL_TOKENS = {"[TOOL_CALLS]": True, "[INST]": True, "[/INST]": True}
LLAMA_TOKENS = {"<|python_tag|>": True}
DEEPSEEK_TOKENS = {
    "<｜tool▁calls▁begin｜>": True,
    "<｜tool▁calls▁end｜>": True,
    "<｜tool▁call▁begin｜>": True,
    "<｜tool▁call▁end｜>": True,
    "<｜tool▁sep｜>": True,
    "<think>": False,
    "</think>": False,
}

# gpt-oss: channels; reasoning as `thinking`; one call per message, before its result.
HARMONY = r"""
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}
{{- '<|start|>system<|message|>Reasoning: ' + reasoning_effort + '<|end|>' }}
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\n' }}
    {%- for tool in tools %}{{- tool.function | tojson }}{%- endfor %}{{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- if message.content and message.thinking %}{{- raise_exception('both') }}{%- endif %}
        {%- if message.content or message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' }}
            {{- (message.content or message.thinking) + '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {%- set last.name = call.name %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json' }}
        {{- '<|message|>' + call.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary' }}
        {{- '<|message|>' + message.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
HARMONY_TOKENS = {
    f"<|{name}|>": True
    for name in ("start", "end", "message", "channel", "constrain", "return", "call")
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
HISTORY = [
    {"role": "user", "content": "And in Paris?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Paris <|im_end|>"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees <|im_end|>"},
    {"role": "user", "content": "So?"},
]


def tokenizer_of(folder: Path, template: str, more: dict[str, bool] | None = None) -> Tokenizer:
    write_tiny_tokenizer(folder, template, more or QWEN_TOKENS)
    return Tokenizer.from_directory(folder)
