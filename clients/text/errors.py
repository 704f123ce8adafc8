"""Everything the text layer raises about what it was given, as one tree.

TextLayerError            base; the message is fit for the caller
├── TokenizerFilesError   a model's tokenizer files are missing, broken or of an unknown kind
├── ChatTemplateError     the chat template refused the messages, or failed on them
└── InvalidText           a text is not valid Unicode
"""

from __future__ import annotations


class TextLayerError(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class TokenizerFilesError(TextLayerError):
    pass


class ChatTemplateError(TextLayerError):
    pass


class InvalidText(TextLayerError):
    pass
