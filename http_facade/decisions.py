"""What happens to fields that are not honoured: nothing is dropped silently.

IGNORED fields can't change the answer here, or ask for what doesn't exist; they are accepted and
named in `x-ignored-params`. REFUSED fields would change the answer and are not built: 400, unless
they hold a value that means the same as their absence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import Struct

from http_facade.schema import Message

IGNORED: dict[str, str] = {
    "service_tier": "there is one tier",
    "metadata": "nothing is stored",
    "prediction": "only a speed-up",
    "verbosity": "the model takes no such hint",
    "prompt_cache_options": "the prefix cache manages itself",
    "prompt_cache_retention": "the prefix cache manages itself",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    hint: str
    neutral: tuple[object, ...] = ()  # values that mean the same as absence
    neutral_is_ignored: bool = False  # name the field in x-ignored-params then


_NOT_YET = "not supported yet"

REFUSED: dict[str, Refusal] = {
    "functions": Refusal("not supported: use tools", ([],)),
    "function_call": Refusal("not supported: use tool_choice", ("none",)),
    "store": Refusal("nothing is stored here", (False,), neutral_is_ignored=True),
    "audio": Refusal("the model makes text only"),
    "modalities": Refusal("the model makes text only", (["text"],)),
    "web_search_options": Refusal("no URL is ever fetched"),
    "moderation": Refusal("there is no moderation here"),
    "use_beam_search": Refusal("not supported", (False,)),
    "length_penalty": Refusal("not supported: it belongs to beam search", (1, 1.0)),
    "early_stopping": Refusal("not supported: it belongs to beam search", (False,)),
    "logits_processors": Refusal("not supported: no code is taken from requests", ([],)),
    "suffix": Refusal("the model does not fill in the middle", ("",)),
    "chat_template": Refusal("only the model's own template is rendered"),
    "documents": Refusal("not supported: put them into the messages", ([],)),
    "return_tokens_as_token_ids": Refusal(_NOT_YET, (False,)),
    "add_special_tokens": Refusal(_NOT_YET),
    "spaces_between_special_tokens": Refusal("not supported: text is shown as it is"),
    "structural_tag": Refusal("say it in structured_outputs"),
}

# The same for fields inside objects. All others that are unknown there are ignored and named.
REFUSED_INSIDE: dict[type[Struct], Mapping[str, Refusal]] = {
    Message: {
        "function_call": Refusal("not supported: use tool_calls"),
        "audio": Refusal("the model reads text only"),
    },
}
