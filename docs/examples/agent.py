"""An agent loop with the OpenAI SDK: `python docs/examples/agent.py [BASE_URL [MODEL]]`.

The model must call a tool at each of three turns, and whichever it calls with whatever arguments,
the call parses and fits the tool's schema. Then it answers in words.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

TURNS = 3

TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 20},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "The sum of two whole numbers.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "minimum": 0, "maximum": 1000},
                    "b": {"type": "integer", "minimum": 0, "maximum": 1000},
                },
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    },
]


def get_weather(city: str, unit: str) -> str:
    return f"15 degrees {unit} in {city}, dry"


def add(a: int, b: int) -> str:
    return str(a + b)


FUNCTIONS: dict[str, Callable[..., str]] = {"get_weather": get_weather, "add": add}


def run(client: OpenAI, model: str, question: str) -> list[ChatCompletionMessageParam]:
    """The whole conversation, the answer in words at its end."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]
    for _ in range(TURNS):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
        )
        message = answer.choices[0].message
        messages.append(
            {
                "role": "assistant",
                "content": message.content,
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {
                            "name": call.function.name,
                            "arguments": call.function.arguments,
                        },
                    }
                    for call in message.tool_calls or ()
                    if call.type == "function"
                ],
            }
        )
        for call in message.tool_calls or ():
            if call.type == "function":
                arguments = json.loads(call.function.arguments)
                result = FUNCTIONS[call.function.name](**arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    last = client.chat.completions.create(model=model, messages=messages, max_tokens=60)
    return [*messages, {"role": "assistant", "content": last.choices[0].message.content}]


def main() -> None:
    base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    client = OpenAI(base_url=base_url, api_key="none")
    model = sys.argv[2] if len(sys.argv) > 2 else client.models.list().data[0].id
    for message in run(client, model, "What is the weather in Paris, and what is 2 + 3?"):
        print(json.dumps(message, ensure_ascii=False))


if __name__ == "__main__":
    main()
