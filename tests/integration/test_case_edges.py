"""CASES V3 on the real server: what is long or costly at the very edge of what is taken."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.conftest import MakeTinyModel
from tests.serving import Served, post, serve

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_v3_a_stop_string_of_a_megabyte_is_refused_at_once(served: Served, path: str) -> None:
    start = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
    for stop, param in (("x" * 1_000_000, "stop"), (["y", "x" * 1_000_000], "stop[1]")):
        waits: list[float] = []
        for _ in range(3):
            began = time.monotonic()
            body = {"model": served.model, **start, "stop": stop, "stream": True}
            status, answer, _ = await post(served.http, path, body)
            waits.append(time.monotonic() - began)
            assert status == 400, answer
            assert answer["error"]["param"] == param
            assert len(answer["error"]["message"]) < 500  # it is not quoted
        assert min(waits) < 1.0


@pytest.mark.slow
async def test_v3_a_prompt_one_short_of_the_context_has_one_token_of_answer(
    tiny_model_dir: MakeTinyModel, tmp_path: Path
) -> None:
    with serve(tiny_model_dir("llama"), tmp_path, "--max-model-len", "200") as served:
        body = {"model": served.model, "max_tokens": 100, "ignore_eos": True}
        for length in (198, 199):
            status, answer, _ = await post(
                served.http, COMPLETIONS, {**body, "prompt": [504] * length}
            )
            assert status == 200, answer
            assert answer["usage"]["prompt_tokens"] == length
            assert answer["usage"]["completion_tokens"] == 200 - length
            assert answer["choices"][0]["finish_reason"] == "length"
        status, answer, _ = await post(served.http, COMPLETIONS, {**body, "prompt": [504] * 200})
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
