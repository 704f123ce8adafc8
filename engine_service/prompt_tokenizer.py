"""Text prompts to token ids, off the event loop, for callers that bring no tokenizer."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from tokenizers import Tokenizer

from engine_service.errors import ContextLengthExceeded
from engine_service.model_error import ModelError

_NUM_THREADS: Final = 2  # the tokenizer releases the GIL; the step loop wants the other cores


class PromptTokenizer:
    def __init__(self, tokenizer_json: bytes) -> None:
        """Takes a moment: run it in a thread. Raises ModelError for a broken file."""
        try:
            self._tokenizer = Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # the library raises this very type
            raise ModelError(f"tokenizer.json can't be read: {error}") from error
        self._tokenizer.no_truncation()  # a cut prompt would be another prompt
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._longest_token = max((len(token) for token in vocabulary), default=1)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")

    async def encode(self, text: str, max_tokens: int) -> list[int]:
        """Special tokens are added as the tokenizer does.

        Text that can't fit into `max_tokens` even if every token were the longest one is refused
        unread, so that nobody keeps the threads busy with what will be refused anyway.
        """
        min_tokens = len(text) // self._longest_token
        if min_tokens > max_tokens:
            raise ContextLengthExceeded(
                f"the prompt has at least {min_tokens} tokens, more than the context of"
                f" {max_tokens} tokens",
                field="prompt",
            )
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode, text)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str) -> list[int]:
        # Unlike `encode`, the batch form releases the interpreter lock.
        (encoding,) = self._tokenizer.encode_batch_fast([text])
        ids: list[int] = encoding.ids
        return ids
