"""Chat templates in the shapes that published models have, for tests of limits."""

_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}"
    "{{ messages[0].content + '\n\n' }}{% endif %}<tools>{% for tool in tools %}\n"
    "{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n{% elif messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}"
)
_CALLS = (
    "{% for call in m.tool_calls or [] %}{% if call.function %}{% set call = call.function %}"
    '{% endif %}\n<tool_call>\n{"name": "{{ call.name }}", "arguments": '
    "{% if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}"
    "{% endif %}}\n</tool_call>{% endfor %}"
)
_FIRST_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = messages[0]['content'] %}{% else %}{% set rest = messages %}"
    "{% set system = '' %}{% endif %}"
)

SHAPES = {
    "qwen2.5": _TOOLS
    + "{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and not "
    "m.tool_calls)"
    " %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
    + _CALLS
    + "<|im_end|>\n"
    "{% elif m.role == 'tool' %}{% if loop.index0 == 0 or messages[loop.index0 - 1].role != "
    "'tool' %}"
    "<|im_start|>user{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>{% if "
    "loop.last "
    "or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}",
    "qwen3": _TOOLS + "{% set ns = namespace(searching=true, last=messages|length - 1) %}"
    "{% for m in messages[::-1] %}{% set index = (messages|length - 1) - loop.index0 %}"
    "{% if ns.searching and m.role == 'user' and m.content is string and not "
    "(m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
    "{% set ns.searching = false %}{% set ns.last = index %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.content is string %}{% set content = m.content %}{% else %}"
    "{% set content = '' %}{% endif %}{% if m.role == 'assistant' %}{% set thought = '' %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in content %}{% set thought = content.split('</think>')[0].rstrip('\n')"
    ".split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last %}{{ '<|im_start|>' + m.role + '\n<think>\n' + "
    "thought.strip('\n') "
    "+ '\n</think>\n\n' + content.lstrip('\n') }}{% else %}{{ '<|im_start|>' + m.role + '\n' + "
    "content }}{% endif %}" + _CALLS + "<|im_end|>\n{% else %}{{ content }}{% endif %}{% endfor %}",
    "qwen3.5": "{% macro render(content, count) %}{% if content is string %}{{ content }}"
    "{% elif content is iterable and content is not mapping %}{% for item in content %}"
    "{{ item.text }}{% endfor %}{% endif %}{% endmacro %}{% for m in messages %}"
    "{% set content = render(m.content, true)|trim %}{% if m.role == 'assistant' %}"
    "{% set thought = (m.reasoning_content or '')|trim %}<think>\n{{ thought }}\n</think>\n"
    "{{ content }}{% for call in m.tool_calls or [] %}<function={{ call.function.name }}>"
    "{% for name, value in call.function.arguments|items %}<parameter={{ name }}>"
    "{{ value | tojson | safe if value is mapping or (value is sequence and value is not string) "
    "else value | string }}</parameter>{% endfor %}</function>{% endfor %}"
    "{% else %}{{ m.role }}{{ content }}{% endif %}{% endfor %}",
    "llama3.1": "{% if messages[0]['role'] == 'system' %}{% set system = "
    "messages[0]['content']|trim %}"
    "{% set messages = messages[1:] %}{% endif %}{{ system }}{% for t in tools %}"
    "{{ t | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}{% for m in messages %}"
    "{% if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}"
    "{{ '<|start_header_id|>' + m['role'] + m['content'] | trim + '<|eot_id|>' }}"
    "{% elif 'tool_calls' in m %}{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% elif m.content is mapping or m.content is iterable %}{{ m.content | tojson }}"
    "{% endif %}{% endfor %}",
    "mistral": _FIRST_SYSTEM
    + "{% set asked = rest | selectattr('role', 'equalto', 'user') | list %}{% for m in rest %}"
    "{% if m.role == 'user' %}{% if m == asked[-1] %}[AVAILABLE_TOOLS] [{% for tool in tools %}"
    "{% for key, value in tool.function.items() if key != 'return' %}{% if value is string %}"
    "{{ key }}{{ value }}{% else %}{{ value | tojson }}{% endif %}{% endfor %}{% endfor %}]"
    "{% endif %}{% if loop.last and system %}{{ system + '\n\n' }}{% endif %}"
    "{{ '[INST] ' + m['content'] + '[/INST]' }}{% elif m.tool_calls is defined %}"
    "{% for call in m.tool_calls %}{% set out = call.function | tojson %}{{ out[:-1] }}"
    "{% endfor %}{% else %}{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}",
    "deepseek": "{% set ns = namespace(system='', is_first=true) %}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{% if ns.is_first %}{% set ns.system = ns.system + "
    "m['content'] %}"
    "{% set ns.is_first = false %}{% else %}{% set ns.system = ns.system + '\n\n' + m['content'] %}"
    "{% endif %}{% endif %}{% endfor %}{{ bos_token }}{{ ns.system }}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}{% set content = m['content'] %}{% if '</think>' in content "
    "%}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}{{ content + eos_token }}"
    "{% for call in m.get('tool_calls', []) %}{{ '```json\n' + "
    "call['function']['arguments']|tojson "
    "+ '\n```' }}{% endfor %}{% elif m['role'] == 'tool' %}{{ m.content }}{% endif %}{% endfor %}",
    "glm4": "[gMASK]{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set content = m.content %}{% if '</think>' in content %}{% set thought = (content.split("
    "'</think>')|first).rstrip('\n').split('<think>')|last %}{% set content = (content.split("
    "'</think>')|last).lstrip('\n') %}{% else %}{% set thought = m.reasoning_content or '' %}"
    "{% endif %}{{ '\n<think>' + thought.strip() + '</think>' }}{% if content.strip() %}"
    "{{ '\n' + content.strip() }}{% endif %}{% for tc in m.tool_calls or [] %}"
    "{% for k, v in tc.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>"
    "{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>{% endfor %}"
    "{% endfor %}{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}",
    "smollm3": "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set mode = '/no_think' if '/no_think' in system else '/think' %}{% set custom = "
    "system.replace('/no_think', '').replace('/think', '').rstrip() %}{% endif %}"
    "{{ custom ~ mode ~ strftime_now('%d %B %Y') }}{% for m in messages %}"
    "{% set content = m.content if m.content is string else '' %}{{ m.role }}"
    "{{ content.lstrip('\n') }}{% endfor %}",
    "granite": "{% set ns = namespace(system='You are') %}{% if documents is defined %}x{% endif %}"
    "{% for m in messages %}{% if m.content is string %}{% set text = m.content %}{% endif %}"
    "<|start_of_role|>{{ m['role'] }}<|end_of_role|>{{ text }}{% for item in "
    "m['content'].split('\n\n')"
    " %}{% if loop.first %}{{ item|length }}{% endif %}{% endfor %}{% endfor %}"
    "{{ tools | tojson(indent=4) if tools }}{{ tools | map('tojson') | join('\n') }}",
    "hermes": "{% macro kind(spec) %}{% if spec.type is iterable and spec.type is not string %}"
    "{{ spec.type | map('string') | join(' | ') }}{% else %}{{ spec.type }}{% endif %}{% endmacro "
    "%}"
    "{% for tool in tools %}{{ tool.function.name }}({% for name, spec in "
    "tool.function.parameters.properties|items %}{{ name + ': ' + kind(spec) }}{{ ', ' if not "
    "loop.last }}{% endfor %}){{ tool.function.description | indent(4) }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + _CALLS + "{% endfor %}",
    "command-r": _FIRST_SYSTEM
    + "{{ system.strip() }}{% for m in rest %}{% set content = m['content'] %}"
    "{% if m['role'] == 'user' %}{{ '<|USER_TOKEN|>' + content.strip() }}"
    "{% else %}{{ '<|CHATBOT_TOKEN|>' + content.strip() }}{% endif %}{% endfor %}"
    "{% for tool in tools %}{{ tool.function.name | replace('_', ' ') | title }}"
    "{{ tool.function.parameters.properties | dictsort | map('first') | list | join(', ') }}"
    "{{ '{}: {}'.format('about', tool.function.description) }}{{ '%s' | "
    "format(tool.function.name) }}"
    "{% endfor %}",
    "kimi": "{{ tools | tojson(separators=(',', ':')) }}{% for m in messages %}{{ m.role|upper }}"
    "{{ m | tojson(separators=(',', ':'), ensure_ascii=False) }}{{ m.name or m.role|capitalize }}"
    "{% endfor %}{{ messages | map(attribute='content') | join('\n' + '-' * 200 + '\n') }}",
    "alpaca": "{% for m in messages %}{{ '### ' ~ m.role|title ~ ':\n' ~ m.content.replace("
    "'a pattern of some ninety characters, which stands in no text at all, and is taken out', '')"
    ".replace('\r\n', '\n').rstrip() ~ '\n\n' }}{{ m.content|e|length }}{{ m.content.upper()[:9] }}"
    "{{ m.content.splitlines()|last }}{{ m.content.rsplit('\n', 1)[-1] }}"
    "{{ m.content.rfind('</think>', 0, m.content|length) }}{{ m.content|truncate(99)|wordcount }}"
    "{{ m.content.center(9999)|length }}{{ ('%s is a long text before what it says: %s' % "
    "(m.role, m.content))|length }}{{ m.content[:999].title()|length }}"
    "{{ m.content.lower().capitalize()|length }}"
    "{{ range(99)|join(' ') }}{% endfor %}",
}
