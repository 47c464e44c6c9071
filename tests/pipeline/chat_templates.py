"""Small chat templates, each with the features of a family of real ones."""

from __future__ import annotations

# ChatML with a system default: strings only.
CHATML = """\
{%- if messages[0]['role'] != 'system' -%}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

# Tools, dropped reasoning, a namespace, slices, macros' scope, template arguments: like Qwen3's.
WITH_TOOLS = """\
{{- bos_token }}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' %}
        {%- if '</think>' in content and loop.index0 < ns.last %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {% generation %}
        {{- content | trim }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function.name + ' ' }}{{ call.function.arguments | tojson(indent=1) }}
            {%- if loop.index0 > 2 %}{% break %}{% endif %}
        {%- endfor %}
        {% endgeneration %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role in ['user', 'system', 'tool'] %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- else %}
        {{- raise_exception('Unknown role: ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- for document in documents or [] %}
    {{- document.title + ': ' + document.text + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

# Parts or strings: like Gemma 3's.
PARTS_OR_STRINGS = """\
{%- for message in messages -%}
    {{ '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

# Parts only: like Idefics3's.
PARTS_ONLY = """\
{% for message in messages %}{{ message['role'] + ':' }}\
{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}{% endfor %}
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

# A macro that loops over the content which calls give it.
PARTS_IN_MACRO = """\
{%- macro show(value, prefix) -%}
    {%- if value is string -%}{{ prefix + value }}
    {%- else -%}{%- for part in value -%}{{ prefix + part.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set turns = messages[0:] -%}
{%- for turn in turns -%}{{ turn.role + ' ' + show(turn.content, prefix='> ') + '\\n' }}{%- endfor -%}"""

WITH_DATE = "{{ strftime_now('%Y-%m-%d %H:%M') }} {{ messages[-1].content }}"
