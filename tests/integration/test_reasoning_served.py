"""A model that thinks before it answers, and constraints that wait for it, on the real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tests.integration.test_facade_reasoning import TEMPLATE
from tests.serving import Served, post, serve, stream

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}


@pytest.fixture(scope="module")
def thinker(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The embedded model with the template of one that thinks: it goes along."""
    directory = tmp_path_factory.mktemp("thinker")
    for path in embedded_model_dir.iterdir():
        if path.name != "chat_template.jinja":
            (directory / path.name).symlink_to(path)
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    with serve(directory, tmp_path_factory.mktemp("served")) as running:
        yield running


async def ask(served: Served, **fields: Any) -> dict[str, Any]:
    """The message, the same in a stream."""
    body = {
        "model": served.model,
        "messages": [{"role": "user", "content": "Capital of France?"}],
        "temperature": 0,
        "max_tokens": 60,
        "response_format": FORMAT,
        **fields,
    }
    status, answer, _ = await post(served.http, CHAT, body)
    assert status == 200, answer
    message: dict[str, Any] = answer["choices"][0]["message"]
    streamed = await stream(served.http, CHAT, body)
    assert streamed.text() == (message["content"] or "")
    thought = "".join(one["delta"].get("reasoning", "") for one in streamed.choice_chunks())
    assert thought == message.get("reasoning", "")
    return message


async def test_a_thought_and_then_the_schema(thinker: Served, tok: PreTrainedTokenizerBase) -> None:
    end = tok.encode("x</think>")[1:]  # three tokens that the model is made to want
    message = await ask(
        thinker,
        logit_bias={str(token_id): 100 for token_id in end},
        chat_template_kwargs={"opens_thought": True},
    )
    assert json.loads(message["content"]) == {"city": "Paris"}


async def test_a_thought_takes_what_tokens_there_are(thinker: Served) -> None:
    message = await ask(thinker, max_tokens=8, chat_template_kwargs={"opens_thought": True})
    assert message["content"] is None and message["reasoning"]


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
async def test_the_schema_holds_with_or_without_a_thought(
    thinker: Served, kwargs: dict[str, bool]
) -> None:
    message = await ask(thinker, chat_template_kwargs=kwargs)
    assert json.loads(message["content"]) == {"city": "Paris"}
    assert kwargs == {} or "reasoning" not in message


async def test_a_bad_schema_is_named_as_the_caller_wrote_it(thinker: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "nope"}}}
    body = {
        "model": thinker.model,
        "messages": [{"role": "user", "content": "?"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
    }
    status, answer, _ = await post(thinker.http, CHAT, body)
    assert status == 400
    expected = "response_format.json_schema.schema.properties.a.type"
    assert answer["error"]["param"] == expected
