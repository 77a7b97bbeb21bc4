"""Chat templates: text equal to transformers, limits for hostile templates."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import model_files
import pytest
from error_helpers import invalid_input

from llaisys.common.errors import InvalidInputError, LlaisysError, ModelLoadError
from llaisys.tokenization import ChatTemplate

QWEN25 = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\n\n# Tools\n\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
           or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
VARIED = r"""{% macro say(role, text) -%}
  [{{ role|upper }}]{{ text|trim }}[/{{ role }}]
{%- endmacro %}
{%- set ns = namespace(found=false, parts=[]) %}
{%- for m in messages[::-1] %}
  {%- set ns.parts = ns.parts + [m.content|default('')|string|length] %}
  {%- if m.role == 'user' and not ns.found %}{% set ns.found = true %}{% endif %}
{%- endfor %}
{{ say(messages[0].role, messages[0].content) }}
{% generation %}gen{{ ns.found }}{% endgeneration %}
{% for m in messages if m.role != 'tool' %}
  {% if m.role == 'assistant' %}{% continue %}{% endif %}
  {{ loop.index ~ '/' ~ loop.length }} {{ m.content.split('l')|join('L') }} {{ 'a' in m.content }}
  {{ m.content[:3] + m.content[-2:] }} {{ m.content.replace('e', '') }}
  {{ '%s-%03d' % (m.role, 7) }}
{% else %}none{% endfor %}
{{ ns.parts|tojson }} {{ ns.parts|sum }} {{ messages|map(attribute='role')|unique|list }}
{{ messages|selectattr('role', 'equalto', 'user')|list|length }} {{ undefined_thing }}
{{ {'b': 1, 'a': [1, 2.5, none, true]}|tojson(indent=2) }} {{ {'b': '<é>'}|tojson }}
{{ 'x' if tools is none else 'y' }} {{ 7 // 2 }} {{ 7 % 4 }} {{ 2 ** 5 }} {{ [1, 2] == [1, 2] }}
{{ dict(a=1).items()|list }} {{ range(3)|list }} {{ "{}-{:.1f}".format('q', 2) }} {{ [3,1,2]|sort }}
{{- bos_token }}{% raw %}{{ raw }}{% endraw %}{# comment #}
"""
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello, <world>!"}],
    [{"role": "system", "content": " s "}, {"role": "user", "content": "你好\n\n"}],
    [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": "w", "arguments": {"city": "北京", "n": 1}},
                }
            ],
        },
        {"role": "tool", "content": '{"t": 3}'},
        {"role": "tool", "content": "x"},
        {"role": "assistant", "content": "cold"},
        {"role": "user", "content": "thanks & bye 'x' \"y\""},
    ],
]
TOOL = {
    "type": "function",
    "function": {
        "name": "w",
        "description": "It's <b>weather</b>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("source", [model_files.CHATML, QWEN25, VARIED])
def test_rendered_text_equals_transformers(source: str, prompt: bool, tools: Any) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = ChatTemplate(source)
    for chat in CHATS:
        expected = render_jinja_template(
            [chat], tools=tools, chat_template=source, add_generation_prompt=prompt, bos_token="<s>"
        )[0][0]
        found = template.render(
            chat, add_generation_prompt=prompt, tools=tools, variables={"bos_token": "<s>"}
        )
        assert found == expected


def test_strftime_and_raise_exception_work() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}")
    assert template.render([], now=datetime(2024, 5, 6)) == "2024-05-06"
    with invalid_input("messages"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render([])


def test_long_chats_are_within_the_limits() -> None:
    chat = [{"role": "user", "content": "x" * 1000 + str(i)} for i in range(2000)]
    text = ChatTemplate(QWEN25).render(chat)
    assert text.count("<|im_end|>") == 2001
    one = [{"role": "user", "content": "y" * 5_000_000}]
    assert len(ChatTemplate(QWEN25).render(one)) > 5_000_000


GROW = "{%% set ns = namespace(x=%s, y=%s) %%}{%% for i in range(60) %%}%s{%% endfor %%}%s"
DOUBLE_LIST = "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}"
LOOP = "{%% for i in range(99999) %%}%s{%% endfor %%}"
HOSTILE = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in 'a' * 900000 %}{% for b in range(50000)|reverse %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**9 }}",
    "{{ [0] * 10**9 }}",
    "{{ 10 ** (10 ** 9) }}",
    "{{ (10 ** 1000) * (10 ** 1000) }}",
    GROW % ("'a'", "1", "{% set ns.x = ns.x ~ ns.x %}", ""),
    GROW % ("'a'", "1", "{% set ns.x = ns.x + ns.x %}", ""),
    GROW % ("[1]", "1", "{% set ns.x = ns.x + ns.x %}", ""),
    GROW % ("1", "1", "{% set ns.x = ns.x * 9**999 %}", ""),
    GROW % ("[1]", "[1]", DOUBLE_LIST, "{{ ns.x }}"),
    GROW % ("[1]", "[1]", DOUBLE_LIST, "{{ ns.x|tojson }}"),
    GROW % ("[1]", "[1]", DOUBLE_LIST, "{{ ns.x == ns.y }}"),
    GROW % ("[1]", "[1]", DOUBLE_LIST, "{{ ns.x in [ns.y] }}"),
    GROW % ("[1]", "[1]", DOUBLE_LIST, "{{ [ns.x, ns.y]|sort }}"),
    GROW % ("[1]", "[1]", DOUBLE_LIST, "{{ [ns.x].index(ns.y) }}"),
    GROW % ("[1]", "[1]", DOUBLE_LIST, "{{ 'a' ~ ns.x }}"),
    GROW % ("[1]", "[1]", DOUBLE_LIST, "{{ '%s' % ns.x }}"),
    GROW % ("1", "1", "{% set ns.x = (ns.x, ns.x) %}", "{{ {ns.x: 1} }}"),
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 999999999) }}",
    "{{ ('%s' * 9000) % (('a' * 900,) * 9000) }}",
    "{{ 'x'.ljust(999999999) }}",
    "{{ 'x'|center(999999999) }}",
    "{{ 'x'.expandtabs(999999999) }}",
    "{{ 'x'|indent(999999999) }}",
    "{{ 1.5|round(999999999, 'floor') }}",
    "{{ [1]|tojson(indent=999999999) }}",
    "{{ ('a' * 1000).replace('', 'b' * 900000) }}",
    "{{ ('a' * 1000)|replace('a', 'b' * 900000) }}",
    "{{ ('b' * 9000).join(('a' * 9000)|list) }}",
    "{{ ('a' * 9000)|join('b' * 9000) }}",
    "{{ (['a' * 900000] * 60000)|join }}",
    "{{ (['a' * 900000] * 60000)|string|length }}",
    "{% set f = ''.join %}{{ f(['a' * 900000] * 60000)|length }}",
    "{{ range(99999)|map('string')|map('upper')|join('x' * 999)|length }}",
    "{{ ([[1]] * 60000)|sum(start=[]) }}",
    "{{ range(10**9)|list }}",
    "{{ lipsum(n=10**6) }}",
    "{% set x %}" + LOOP % "{{ 'a' * 900000 }}" + "{% endset %}{{ x }}",
    "{% macro m() %}" + LOOP % ("z" * 100_000) + "{% endmacro %}{{ m() }}",
    "{% filter upper %}" + LOOP % "{{ 'a' * 900000 }}" + "{% endfilter %}",
    LOOP % "{{ ('a' * 900000).split('b') and '' }}",
    LOOP % "{{ 'b' in 'a' * 900000 and '' }}",
    LOOP % "{{ ('a' * 900000).title()[5:1] }}",
    "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) }}{% endmacro %}{{ f(200) }}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "{% for x in [1] recursive %}{{ loop([1, 1]) }}{{ loop([1, 1]) }}{% endfor %}",
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__.os }}",
    "{{ strftime_now.__closure__[0] }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ namespace(__class__=1) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ ('{0.__class__.__mro__}').format(messages) }}",
    "{% include 'x' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{% autoescape true %}{% endautoescape %}",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "{{ " + "-" * 50_000 + "1 }}",
    "{% if x %}" * 3000,
    "{% for a in b %}" * 100 + "{% endfor %}" * 100,
    "{{ 'x' }" + "}" * 3 + "{% endfor %}",
    "{{ x|nofilter }}",
    "x" * 300_000,
    "{{ [a, a] }}" * 5000,
    "{{ a ~ a == a }}" * 4000,
]


@pytest.mark.parametrize("source", HOSTILE, ids=[s[:40] for s in HOSTILE])
def test_hostile_templates_end_within_a_second(source: str) -> None:
    cpu = time.thread_time()
    with pytest.raises(LlaisysError) as caught:
        ChatTemplate(source).render([{"role": "user", "content": "hi"}])
    assert isinstance(caught.value, (InvalidInputError, ModelLoadError))
    assert "chat template" in str(caught.value)
    assert time.thread_time() - cpu < 1.0


def test_templates_get_plain_data_only() -> None:
    class Sly(str):
        def upper(self) -> str:
            raise AssertionError("called")

    chat = [{"role": "user", "content": Sly("abc")}]
    assert ChatTemplate("{{ messages[0].content.upper() }}").render(chat) == "ABC"
    with invalid_input("messages"):
        ChatTemplate("").render([{"role": "user", "content": object()}])
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    with invalid_input("messages"):
        ChatTemplate("").render([{"role": "user", "content": deep}])
    with invalid_input("messages"):
        ChatTemplate("{{ raise_exception('no') }}").render(chat)
