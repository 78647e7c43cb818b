"""An agent with one tool, by both clients, and a model of any kind that is made to call it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import mlx.core as mx
import openai

QUESTION, ANSWER = "What is 19 + 23?", "The sum is {}."
PARAMETERS = {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}  # fmt: skip
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 19, "b": 23}}\n</tool_call>'
# By these words mlx-lm knows how the model's calls are to be read.
TEMPLATE = (
    "{%- if tools -%}{{- '<|im_start|>system\\n' + (tools | tojson) -}}"
    "{{- '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') -}}"
    "{%- for call in message['tool_calls'] or [] %}{%- set tool_call = call['function'] -%}"
    '{{- \'<tool_call>\\n{"name": "\' + tool_call.name + \'", "arguments": \' -}}'
    "{{- (tool_call.arguments | tojson) + '}\\n</tool_call>' -}}{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def with_tools(model: Path, directory: Path) -> Path:
    """A copy of a model whose chat template knows tools."""
    directory.mkdir()
    for file in model.iterdir():
        (directory / file.name).symlink_to(file)
    config = directory / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    config.unlink()
    config.write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return directory


def made_to_call(tokenizer: Any) -> Callable[..., list[Callable[[mx.array, mx.array], mx.array]]]:
    """In place of `base_model.penalties`: every answer is a call of the tool, or once the prompt
    holds what the tool gave, the answer that names it.
    """

    def penalties(*arguments: float) -> list[Callable[[mx.array, mx.array], mx.array]]:
        start = 0
        said: list[int] = []

        def force(tokens: mx.array, logits: mx.array) -> mx.array:
            nonlocal start, said
            if not said:
                start = tokens.size
                _, gave, rest = tokenizer.decode(tokens.tolist()).rpartition("<|im_start|>tool\n")
                text = ANSWER.format(rest.partition("<|im_end|>")[0]) if gave else CALL
                said = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
            place = min(tokens.size - start, len(said) - 1)  # mlx-lm computes a token ahead
            wanted = mx.arange(logits.shape[-1]) == said[place]
            return mx.where(wanted, logits, -mx.inf)

        return [force]

    return penalties


def add(a: int, b: int) -> str:
    return str(a + b)


def openai_agent(url: str, model: str) -> list[str]:
    """Calls, and what is said in the end."""
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
    talk: list[Any] = [{"role": "user", "content": QUESTION}]
    done: list[str] = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        while len(done) < 4:
            (choice,) = client.chat.completions.create(
                model=model, messages=talk, tools=[tool], max_tokens=100
            ).choices
            talk.append(choice.message)
            if choice.finish_reason != "tool_calls":
                return [*done, choice.message.content or ""]
            for call in choice.message.tool_calls or ():
                assert call.type == "function"
                done.append(f"{call.function.name} {call.function.arguments}")
                content = add(**json.loads(call.function.arguments))
                talk.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return done


def anthropic_agent(url: str, model: str) -> list[str]:
    """The same, by streams."""
    tool: Any = {"name": "add", "input_schema": PARAMETERS}
    talk: list[Any] = [{"role": "user", "content": QUESTION}]
    done: list[str] = []
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        while len(done) < 4:
            with client.messages.stream(
                model=model, messages=talk, tools=[tool], max_tokens=100
            ) as stream:
                answer: Any = stream.get_final_message()
            talk.append({"role": "assistant", "content": answer.content})
            if answer.stop_reason != "tool_use":
                return [*done, answer.content[0].text]
            results = []
            for use in answer.content:
                done.append(f"{use.name} {json.dumps(use.input)}")
                result = {"type": "tool_result", "tool_use_id": use.id, "content": add(**use.input)}
                results.append(result)
            talk.append({"role": "user", "content": results})
    return done
