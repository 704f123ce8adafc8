"""What a model's small text files say: special tokens by name, and chat templates.

`tokenizer_config.json` wins over the older `special_tokens_map.json`; `chat_template.jinja` wins
over a `chat_template` inside the config, which may be one template or a list of named ones.
Other files (generation_config.json, vocab.json, ...) are none of the text layer's business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from clients.text.chat_template import ChatTemplate
from clients.text.errors import ChatTemplateError, TokenizerFilesError

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"

_NAMED_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


def read_special_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    """{"eos_token": "<|im_end|>", ...}: the names that templates use, those that the model sets."""
    config, older = _json_object(files, CONFIG), _json_object(files, SPECIAL_TOKENS)
    tokens = {}
    for name in _NAMED_TOKENS:
        # Named in the config as null is a decision: the model has no such token.
        file, value = (
            (CONFIG, config[name]) if name in config else (SPECIAL_TOKENS, older.get(name))
        )
        if isinstance(value, Mapping):  # an AddedToken, written out
            value = value.get("content")
        if value is None:
            continue
        if not isinstance(value, str):
            raise TokenizerFilesError(f"{file}: {name} is not a string")
        tokens[name] = value
    return tokens


def read_chat_template(
    files: Mapping[str, bytes], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """None: the model has no template (a base model)."""
    if TEMPLATE in files:
        file, sources = TEMPLATE, {"default": _text(files, TEMPLATE)}
    else:
        file, sources = CONFIG, _templates_in_config(_json_object(files, CONFIG))
    if not sources:
        return None
    if "default" not in sources:
        raise TokenizerFilesError(f"{file}: chat_template has no template named default")
    try:
        return ChatTemplate(
            sources["default"], special_tokens, source_with_tools=sources.get("tool_use")
        )
    except ChatTemplateError as error:
        raise TokenizerFilesError(f"{file}: {error.message}") from error


def _templates_in_config(config: Mapping[str, object]) -> dict[str, str]:
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    named: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [None]:
        name = entry.get("name") if isinstance(entry, Mapping) else None
        source = entry.get("template") if isinstance(entry, Mapping) else None
        if not isinstance(name, str) or not isinstance(source, str):
            raise TokenizerFilesError(
                f"{CONFIG}: chat_template is neither a string nor a list of named templates"
            )
        named[name] = source
    return named


def _json_object(files: Mapping[str, bytes], name: str) -> Mapping[str, object]:
    """An absent file says nothing; a broken one is refused."""
    if name not in files:
        return {}
    try:
        value = json.loads(_text(files, name))
    except (ValueError, RecursionError) as error:
        raise TokenizerFilesError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerFilesError(f"{name} does not hold a JSON object")
    return value


def _text(files: Mapping[str, bytes], name: str) -> str:
    try:
        return files[name].decode()
    except UnicodeDecodeError as error:
        raise TokenizerFilesError(f"{name} is not valid UTF-8: {error.reason}") from error
