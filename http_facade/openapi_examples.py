"""Examples for /openapi.json: requests that can be sent as they stand, and answers to them.

The answers were given by the embedded model.
"""

from __future__ import annotations

from typing import Any

_CHAT = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 16,
    "temperature": 0,
}

_REQUESTS: dict[str, dict[str, Any]] = {
    "createChatCompletion": _CHAT,
    "createCompletion": {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0},
    "renderChat": _CHAT,
    "tokenize": {"prompt": "Hello, world!", "return_token_strs": True},
    "detokenize": {"tokens": [19556, 28, 905, 17]},
}

_CHAT_TOKEN_IDS = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
    19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531,
    198,
]  # fmt: skip

_ANSWERS: dict[str, dict[str, Any]] = {
    "createChatCompletion": {
        "object": "chat.completion",
        "id": "chatcmpl-bcd62e9056eee6d39c8d48b4a03349bc",
        "created": 1796032334,
        "model": "SmolLM2-135M-Instruct",
        "system_fingerprint": "fp_462a3b819f71",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "The capital of France is Paris.",
                    "refusal": None,
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 37,
            "completion_tokens": 8,
            "total_tokens": 45,
            "prompt_tokens_details": {"cached_tokens": 24},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    },
    "createCompletion": {
        "object": "text_completion",
        "id": "cmpl-a1d369667e052fc3d93ff241193537e4",
        "created": 1796032334,
        "model": "SmolLM2-135M-Instruct",
        "system_fingerprint": "fp_462a3b819f71",
        "choices": [
            {
                "index": 0,
                "text": ", the city of Nova Haven was a",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 8,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    },
    "renderChat": {
        "prompt": "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n"
        "<|im_start|>user\n"
        "What is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n",
        "token_ids": _CHAT_TOKEN_IDS,
        "ignored": [],
    },
    "tokenize": {
        "count": 4,
        "max_model_len": 8192,
        "tokens": [19556, 28, 905, 17],
        "token_strs": ["Hello", ",", " world", "!"],
    },
    "detokenize": {"prompt": "Hello, world!"},
}


def request_example(operation: str, model: str) -> dict[str, Any] | None:
    example = _REQUESTS.get(operation)
    return None if example is None else {"model": model, **example}


def answer_example(operation: str, model: str) -> dict[str, Any] | None:
    example = _ANSWERS.get(operation)
    if example is not None and "model" in example:
        return {**example, "model": model}
    return example
