"""Chat templates with the features of more families, and what templates may do with their own literals."""

from __future__ import annotations

# Control strings put together from literals and a role: like Phi-3's.
COMPOSED_ROLES = """\
{% for message in messages %}{{ '<|' + message['role'] + '|>' + '\\n' + message['content']\
 + '<|end|>\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

# Alternation, and control strings that begin with a bracket: like Mistral's.
INSTRUCTIONS = """\
{{ bos_token }}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"""

# Headers, a date, tools within the first user message, calls as JSON: like Llama 3.1's.
HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Today Date: ' + date_string + '\\n\\n' + system_message + '<|eot_id|>' }}
{%- if tools is not none and messages | length != 0 %}
    {%- set first_user_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nFunctions:\\n\\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- '\\n\\n' }}
    {%- endfor %}
    {{- first_user_message + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'\
 + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- '}' }}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping %}{{- message.content | tojson }}{%- else %}\
{{- message.content }}{%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# ChatML that trims.
CHATML_TRIMMED = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim\
 + '<|im_end|>\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Text outside of expressions, a macro, thinking that is dropped: like GLM-4.5's.
BARE_TEXT = """\
[gMASK]<sop>
{%- macro visible_text(content) -%}
    {%- if content is string -%}{{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}{{- item.text }}
            {%- elif item is string -%}{{- item }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{- content }}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
<|system|>
# Tools
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
{%- endif -%}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking\
 and not visible_text(m.content).endswith("/nothink")) else '' -}}
{%- elif m.role == 'assistant' -%}<|assistant|>
{%- set content = visible_text(m.content) %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{{- '\\n<think></think>' }}
{%- if content.strip() -%}{{ '\\n' + content.strip() }}{%- endif -%}
{%- elif m.role == 'tool' -%}<|observation|>
{{- '\\n<tool_response>\\n' }}{{- m.content }}{{- '\\n</tool_response>' }}
{%- elif m.role == 'system' -%}<|system|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>\
{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}{%- endif -%}"""

# What templates may do with their own literals, each in the simplest form.
_LOOP = "{%% for message in messages %%}%s{%% endfor %%}"
TRICKY = {
    "joined": "{{ messages | map(attribute='content') | join('<|im_end|>') }}<|im_end|>",
    "formatted": _LOOP % "{{ '<|im_start|>%s\\n%s<|im_end|>' | format(message.role, message.content) }}",
    "percent": _LOOP % "{{ '<|im_start|>%s:%s<|im_end|>' % (message.role, message.content) }}",
    "concatenated": _LOOP % "{{ '<|im_start|>' ~ message.role ~ message.content ~ '<|im_end|>' }}",
    "two literals": _LOOP % "{{ '<|im_' ~ 'start|>' ~ message.content ~ '<|im' + '_end|>' }}",
    "set block": _LOOP % "{% set x %}<|im_start|>{{ message.content }}<|im_end|>{% endset %}{{ x | trim }}",
    "table": "{% set heads = {'user': '<|im_start|>user\\n'} %}"
    + _LOOP % "{{ heads[message.role] or '<|im_start|>' }}{{ message.content }}<|im_end|>",
    "table with default": "{% set heads = {'user': '<|im_start|>user\\n'} %}"
    + _LOOP % "{{ heads.get(message.role, '<|im_start|>') }}{{ message.content }}<|im_end|>",
    "cycle": _LOOP % "{{ loop.cycle('<|im_start|>', '<|im_end|>') }}{{ message.content }}",
    "sliced": _LOOP % "{{ '<|im_start|>!'[:-1] + message.content + '<|im_end|>' }}",
    "measured": _LOOP % "{% set x = '<|im_start|>' + message.content %}{{ x }}{{ x | length }}<|im_end|>",
    "compared": _LOOP
    % "{% set h = '<|im_start|>' if message.role == 'user' else '<|im_end|>' %}{{ h }}{{ message.content }}"
    "{% if h == '<|im_start|>' %}!{% endif %}<|im_end|>",
    "replaced": _LOOP % "{{ 'H' | replace('H', '<|im_start|>') }}{{ message.content }}<|im_end|>",
    "conditional": _LOOP
    % "{{ ('<|im_start|>' if loop.first else '<|im_end|>') + message.content }}{{ '<|im_end|>'\
 if loop.last }}",
    "gathered": "{% set ns = namespace(out='') %}"
    + _LOOP % "{% set ns.out = ns.out + '<|im_start|>' + message.content + '<|im_end|>' %}"
    + "{{ ns.out }}",
    "gathered and trimmed": "{% set ns = namespace(out=bos_token) %}"
    + _LOOP % "{% set ns.out = ns.out ~ ' <|im_start|> ' ~ message.content ~ ' <|im_end|> ' %}"
    + "{{ ns.out | trim }}",
    "macro": "{% macro turn(head, m, tail='<|im_end|>') %}{{ head }}{{ m.content }}{{ tail }}{% endmacro %}"
    + _LOOP % "{{ turn('<|im_start|>', message) }}",
    "caller": "{% macro turn(m) %}<|im_start|>{{ caller() }}<|im_end|>{% endmacro %}"
    + _LOOP % "{% call turn(message) %}{{ message.content }}{% endcall %}",
    "filter block": _LOOP % "{% filter trim %} <|im_start|>{{ message.content }}<|im_end|> {% endfilter %}",
    "upper": _LOOP % "{{ ('<|im_start|>' + message.content) | upper }}<|im_end|>",
    "repeated": _LOOP % "{{ '<|im_start|>' * 2 }}{{ message.content }}{{ '<|im_end|>' * 2 }}",
    "list": _LOOP % "{{ ['<|im_start|>', message.content, '<|im_end|>'] | join('') }}",
    "reversed text": _LOOP % "{{ message.content | reverse }}<|im_end|>",
    "searched": _LOOP
    % "{% set x = '<|im_start|>' + message.content %}{% if '<|im_end|>' in x %}!{% endif %}\
{{ x }}<|im_end|>",
}
