"""A load with planted troubles: requests whose first token is late for a reason that is known.

others   prompts that come while a long one, of somebody more urgent, is computed
blocks   prompts for which the KV cache has no blocks, until a long answer is over
grammar  answers whose schema takes long to compile
none     short prompts on an idle engine
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from clients import Delta, GenerateRequest, GenerateStream, StoppingCriteria
from tests.serving import Served, engine, stream, wait_idle

OTHERS, BLOCKS, GRAMMAR, NONE = "work_of_others", "no_blocks", "grammar", ""
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "head_dim": 32,
}  # whose steps take some 20 ms
# 2,064 tokens of KV cache: a long prompt leaves room for little beside it.
FLAGS = ("--num-gpu-blocks-override=129", "--num-threads=1", "--max-num-batched-tokens=128")
_COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Planted:
    trace_id: str
    cause: str


class TtftLoad:
    """Each method sends requests of one kind, one after the other with what troubles them."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._random = random.Random(7)
        self.planted: list[Planted] = []

    async def run(
        self, per_kind: int, num_plain: int, *, with_grammars: bool = True
    ) -> list[Planted]:
        """`per_kind` in groups of at most four. The first grammar loads its compiler: seconds."""
        await self._send(self._prompt(8), max_tokens=1)
        for start in range(0, per_kind, 4):
            count = min(4, per_kind - start)
            await self._others(count)
            await self._blocks(count)
            if with_grammars:
                await self._grammars(count)
        for _ in range(num_plain):
            await self._idle()
            await self._victim(NONE, self._prompt(40))
        return self.planted

    async def _others(self, count: int) -> None:
        await self._idle()
        urgent = self._send(self._prompt(1_500), max_tokens=1, priority=-1)
        long = asyncio.create_task(urgent)
        await asyncio.sleep(0.03)
        await asyncio.gather(*(self._victim(OTHERS, self._prompt(20)) for _ in range(count)))
        await long

    async def _blocks(self, count: int) -> None:
        await self._idle()
        holder = GenerateRequest(
            self._prompt(1_500), stopping=StoppingCriteria(max_tokens=530, ignore_eos=True)
        )
        async with engine(self._served) as client, client.generate(holder) as running:
            async for event in running:
                if isinstance(event, Delta):
                    break
            victims = (self._victim(BLOCKS, self._prompt(600)) for _ in range(count))
            await asyncio.gather(*victims, _to_its_end(running))

    async def _grammars(self, count: int) -> None:
        for _ in range(count):
            await self._idle()
            schema = {
                "type": "json_schema",
                "json_schema": {"name": "slow", "schema": self._schema()},
            }
            await self._victim(GRAMMAR, self._prompt(20), response_format=schema)

    async def _victim(self, cause: str, prompt: list[int], **fields: Any) -> None:
        trace_id = secrets.token_hex(16)
        traceparent = f"00-{trace_id}-{secrets.token_hex(8)}-01"
        await self._send(prompt, max_tokens=2, headers={"traceparent": traceparent}, **fields)
        self.planted.append(Planted(trace_id, cause))

    async def _send(
        self,
        prompt: list[int],
        *,
        max_tokens: int,
        headers: dict[str, str] | None = None,
        **fields: Any,
    ) -> None:
        body = {
            "model": self._served.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": "response_format" not in fields,
            **fields,
        }
        answer = await stream(self._served.http, _COMPLETIONS, body, headers)
        assert answer.status == 200, answer.raw
        assert answer.num_done == 1

    async def _idle(self) -> None:
        await wait_idle(self._served, 30)

    def _prompt(self, num_tokens: int) -> list[int]:
        """No two begin alike."""
        return [self._random.randrange(1_000, 40_000) for _ in range(num_tokens)]

    def _schema(self) -> dict[str, Any]:
        """Of its own, so that no compiled one is found; large, so that it takes long."""
        words = [f"{self._random.getrandbits(64):x}" for _ in range(60)]
        fields = {word: {"type": "string", "pattern": "^[a-z]{1,12}$"} for word in words}
        return {"type": "object", "properties": fields, "required": words}


async def _to_its_end(running: GenerateStream) -> None:
    async for _ in running:
        pass


def explained(served: Served, *arguments: str) -> dict[str, Any]:
    """What `firsttoken ttft --json` says."""
    command = [sys.executable, "-m", "clients", "ttft", *arguments, "--json"]
    answer = subprocess.run(
        [*command, "--trace-dir", str(served.trace_dir)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    said: dict[str, Any] = json.loads(answer.stdout)
    return said
