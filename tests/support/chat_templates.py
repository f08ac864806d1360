"""Chat templates with tool support, in the formats of several model families."""

from __future__ import annotations

HERMES_TEMPLATE = (
    "{%- if tools %}<|system|>"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}"
    "{{- '<tools>' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}"
    "{{- '\\n</tools>' + '<|end|>' }}{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{{- '<|user|><tool_response>\\n' + message.content + '\\n</tool_response><|end|>' }}"
    "{%- elif not (tools and loop.first and message.role == 'system') %}"
    "{{- '<|' + message.role + '|>' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}"
    "{{- '<|end|>' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
LLAMA_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.role == 'user' and tools and loop.first %}"
    '<|user|>Answer with {"name": function, "parameters": arguments}.'
    "{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ message.content }}"
    "{%- elif 'tool_calls' in message %}"
    "{%- if message.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{%- set call = message.tool_calls[0].function %}"
    '{{- \'<|assistant|>{"name": "\' + call.name + \'", "parameters": \' }}'
    "{{- (call.arguments | tojson) + '}' }}"
    "{%- elif message.role == 'tool' %}<|ipython|>{{ message.content | tojson }}"
    "{%- else %}<|{{ message.role }}|>{{ message.content }}{% endif %}<|end|>{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MISTRAL_TEMPLATE = (
    "{%- if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' and message.tool_calls %}[TOOL_CALLS] ["
    "{%- for call in message.tool_calls %}"
    "{%- if call.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}"
    '{{- \'{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- (call.function.arguments | tojson) + ', \"id\": \"' + call.id + '\"}' }}"
    "{%- if not loop.last %}, {% endif %}{% endfor %}]</s>"
    "{%- else %}[{{ message.role }}]{{ message.content }}{% endif %}{% endfor %}"
)
MISTRAL_ARGS_TEMPLATE = (
    "{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{%- for message in messages %}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' }}"
    "{{- call.function.arguments | tojson }}{% endfor %}"
    "[{{ message.role }}]{{ message.content }}{% endfor %}"
)
QWEN3_CODER_TEMPLATE = (
    "{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{%- for message in messages %}{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "<tool_call>\n<function={{ call.function.name }}>\n"
    "{%- for name, value in call.function.arguments.items() %}"
    "<parameter={{ name }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{%- endfor %}{% endfor %}"
)
THINKING_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}</think>\n{% endif %}{% endif %}"
)
"""Opens the reasoning; `enable_thinking` false closes it again."""
_TALK = (
    "{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{%- for message in messages %}{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}{% set call = call.function %}CALL"
    "{%- endfor %}{% endfor %}"
)
GLM45_TEMPLATE = _TALK.replace(
    "CALL",
    "<tool_call>{{ call.name }}\n{% for key, value in call.arguments.items() %}"
    "<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value }}</arg_value>\n{% endfor %}</tool_call>",
)
MINIMAX_M2_TEMPLATE = _TALK.replace(
    "CALL",
    '<minimax:tool_call>\n<invoke name="{{ call.name }}">\n'
    "{% for key, value in call.arguments.items() %}"
    '<parameter name="{{ key }}">{{ value }}</parameter>\n{% endfor %}'
    "</invoke>\n</minimax:tool_call>",
)
SEED_OSS_TEMPLATE = QWEN3_CODER_TEMPLATE.replace("tool_call>", "seed:tool_call>")
DEEPSEEK_V3_TEMPLATE = _TALK.replace(
    "CALL",
    "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.name "
    "+ '\n```json\n' + call.arguments + '\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}",
)
"""It appends arguments to a text, so they have to be one."""
DEEPSEEK_V31_TEMPLATE = _TALK.replace(
    "CALL",
    "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + call.name + '<｜tool▁sep｜>' "
    "+ call.arguments + '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}",
)
JAMBA_TEMPLATE = _TALK.replace(
    "CALL",
    '<tool_calls>[\n    {"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}\n]'
    "</tool_calls>",
)
GRANITE_TEMPLATE = _TALK.replace(
    "CALL",
    '<|tool_call|>[{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}]',
)
PHI4_MINI_TEMPLATE = _TALK.replace(
    "CALL",
    'functools[{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}]',
)
INTERNLM_TEMPLATE = _TALK.replace(
    "CALL",
    '<|action_start|><|plugin|>\n{"name": "{{ call.name }}", "parameters": '
    "{{ call.arguments | tojson }}}<|action_end|>\n",
)
HUNYUAN_TEMPLATE = _TALK.replace(
    "CALL",
    '<tool_calls>[{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}]'
    "</tool_calls>",
)
XLAM_TEMPLATE = _TALK.replace(
    "CALL", '{{ "\\n" }}[{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}]'
)
KIMI_K2_TEMPLATE = (
    "{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}## Return of {{ message.tool_call_id }}\n{% endif %}"
    "{{ message.content }}"
    "{%- if message.tool_calls %}<|tool_calls_section_begin|>"
    "{%- for call in message.tool_calls %}"
    "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
    "{{ call.function.arguments | tojson }}<|tool_call_end|>"
    "{%- endfor %}<|tool_calls_section_end|>{% endif %}{% endfor %}"
)
"""It writes a call's id, which contains the name."""
STEP3_TEMPLATE = _TALK.replace(
    "CALL",
    "{{ '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
    "<steptml:invoke name=\"' + call.name + '\">' }}\n"
    "{% for key, value in call.arguments.items() %}"
    '<steptml:parameter name="{{ key }}">{{ value }}</steptml:parameter>\n{% endfor %}'
    "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>",
)
UNKNOWN_CALLS_TEMPLATE = _TALK.replace("CALL", "{{ call.name }} <- {{ call.arguments | tojson }}")
"""Calls in a form of its own."""
PYTHONIC_TEMPLATE = _TALK.replace(
    "CALL",
    "{{ '\\n' }}[{{ call.name }}("
    "{% for key, value in call.arguments.items() %}{{ key }}={{ value }}"
    "{% endfor %})]",
)
HARMONY_TEMPLATE = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{%- for tool in tools or [] %}<|start|>developer<|message|>type {{ tool.function.name }}"
    "<|end|>{% endfor %}"
    "{%- for message in messages %}"
    "{%- if message.tool_calls %}"
    "{%- if message.content and message.thinking %}{{ raise_exception('not both') }}{% endif %}"
    "{%- if message.content or message.thinking %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{- message.content or message.thinking }}<|end|>{% endif %}"
    "{%- set call = message.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{- call.arguments | tojson }}<|call|>"
    "{%- elif message.role == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>"
    "{%- elif message.role == 'tool' %}<|start|>functions.{{ message.name }} to=assistant"
    "<|channel|>commentary<|message|>{{ message.content | tojson }}<|end|>"
    "{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""It writes calls with the recipient before the channel."""
LLAMA4_PYTHONIC_TEMPLATE = "<|header_start|>" + PYTHONIC_TEMPLATE
LFM2_TEMPLATE = PYTHONIC_TEMPLATE.replace("[{{", "<|tool_call_start|>[{{", 1).replace(
    ")]", ")]<|tool_call_end|>"
)
