"""The text layer around token streams: templates, tokenizer, detokenizer, stop strings.

Shared by the HTTP facade and by Python callers of the gRPC stream.
"""

from clients.text.chat_template import ChatTemplate
from clients.text.detokenizer import Detokenizer
from clients.text.errors import (
    ChatTemplateError,
    InvalidText,
    TextLayerError,
    TokenizerFilesError,
)
from clients.text.stop_strings import StopChecker, StopResult
from clients.text.text_stream import LogprobEntry, TextDelta, TextStream, TopLogprob
from clients.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "Detokenizer",
    "InvalidText",
    "LogprobEntry",
    "StopChecker",
    "StopResult",
    "TextDelta",
    "TextLayerError",
    "TextStream",
    "Tokenizer",
    "TokenizerFilesError",
    "TopLogprob",
]
