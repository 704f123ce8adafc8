"""python -m http_facade.bench_output --model DIR: what a token costs on its way to a client.

    engine's Delta -> detokenizer, thought, stop strings, calls -> chunks -> JSON

Microseconds of one thread per token of one stream, for each kind of answer, as JSON; the least of
some runs, so that what else the machine does counts little. Network and event loop are not in it:
those `engine_service.bench_stream` measures, with everything else.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from clients.text.reasoning import REASONING_FORMATS, PromptThought
from clients.text.text_stream import TextStream
from clients.text.tokenizer import Tokenizer
from clients.text.tool_parsers import TOOL_FORMATS
from clients.types import Delta, TokenLogprobs
from http_facade.answers import AnswerHead, AnswerOptions
from http_facade.chat_answers import ChatFormat
from http_facade.output_processor import PromptProcessor
from http_facade.prompts import Prompt
from http_facade.tool_calls import ToolCallStream

_TEXT: Final = "The quick brown fox jumps over the lazy dog; 漢字 and émigrés look on. " * 40
_THOUGHT: Final = f"<think>\n{_TEXT}</think>\n\n{_TEXT}"
_STOP: Final = ("\n\nHuman:", "THE END", "quick red fox", "The quick brown fox jumps high")
_NUM_TOP: Final = 5
_NUM_RUNS: Final = 7
_FILES: Final = ("tokenizer.json", "tokenizer_config.json")

_HEAD: Final = AnswerHead("chatcmpl-0", 0, "model", "fp_0")
_PLAIN: Final = AnswerOptions(reasoning_fields=("reasoning", "reasoning_content"))


def measure(model_dir: Path) -> dict[str, float]:
    """Raises OSError where the directory has no tokenizer."""
    files = {name: (model_dir / name).read_bytes() for name in _FILES}
    tokenizer = Tokenizer.from_files(files)
    token_ids = tokenizer.encode(_TEXT)
    figures = {
        "plain": _cost(tokenizer, token_ids, lambda: TextStream(tokenizer)),
        "stop_strings": _cost(tokenizer, token_ids, lambda: TextStream(tokenizer, stop=_STOP)),
        "reasoning": _cost(
            tokenizer,
            tokenizer.encode(_THOUGHT),
            lambda: TextStream(
                tokenizer, reasoning=REASONING_FORMATS["qwen3"].parser(PromptThought.NONE)
            ),
        ),
        "tools": _cost(tokenizer, token_ids, lambda: TextStream(tokenizer), with_tools=True),
        "logprobs": _cost(
            tokenizer,
            token_ids,
            lambda: TextStream(tokenizer, want_logprobs=True),
            num_top=_NUM_TOP,
        ),
    }
    return {f"{name}_us": round(microseconds, 2) for name, microseconds in figures.items()}


def _cost(
    tokenizer: Tokenizer,
    token_ids: list[int],
    make_text_stream: Callable[[], TextStream],
    *,
    with_tools: bool = False,
    num_top: int | None = None,
) -> float:
    """Microseconds per token, each of which comes alone and is written at once."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    if num_top is not None:
        top = tuple((token_id, -1.0 - token_id) for token_id in range(num_top))
        logprobs = (TokenLogprobs(-1.0, 1, top),)
    events = [Delta(0, (token_id,), logprobs) for token_id in token_ids]

    def run() -> float:
        processor = PromptProcessor(
            0,
            1,
            make_text_stream,
            frozenset(),
            make_call_stream=_call_stream if with_tools else lambda: None,
        )
        answer = ChatFormat(_HEAD, prompt=Prompt(()), options=_PLAIN)
        encoder = msgspec.json.Encoder()
        began = time.perf_counter()
        for event in events:
            for delta in processor.process(event):
                for chunk in answer.chunks(delta, msgspec.UNSET):
                    encoder.encode(chunk)
        return time.perf_counter() - began

    return min(run() for _ in range(_NUM_RUNS)) / len(events) * 1e6


def _call_stream() -> ToolCallStream:
    tools = TOOL_FORMATS["hermes"]
    return ToolCallStream(
        tools.parser(["add"]), tools.new_call_id, is_named=False, is_forced=False, max_calls=None
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--model", type=Path, required=True, help="a directory with tokenizer.json")
    print(json.dumps(measure(parser.parse_args().model), indent=1))


if __name__ == "__main__":
    main()
