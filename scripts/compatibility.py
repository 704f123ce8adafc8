"""Writes docs/compatibility.md from the facade's routes and fields; `--check` compares."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from http_facade.decisions import IGNORED, REFUSED, REFUSED_INSIDE
from http_facade.descriptions import description_of
from http_facade.openapi_routes import OPERATIONS
from http_facade.schema import ChatRequest, CompletionRequest

PAGE = Path(__file__).resolve().parent.parent / "docs" / "compatibility.md"

HEAD = """# The HTTP API

Written by `scripts/compatibility.py`; `make check` compares it with the code. A running server has
the same, with types, ranges and examples, at `/openapi.json` and, to read, at `/docs`.
"""

FIELDS = """## Request fields

What is done with each field of OpenAI's two generation requests and of their common extensions.
Nothing is dropped silently: a field is honoured; or ignored and named in the answer's
`x-ignored-params`; or refused with 400 and `param`. A field that is in none of these tables is
unknown: ignored and named, or refused under `--strict-params`. null is the same as absent.
"""


def routes() -> str:
    rows = ["| route | |", "|---|---|"]
    for one in OPERATIONS:
        rows.append(f"| `{one.method} {one.path}` | {one.summary} |")
    return "\n".join(rows)


def honoured() -> str:
    chat = set(ChatRequest.__struct_fields__)
    completions = set(CompletionRequest.__struct_fields__)
    rows = ["| honoured | chat completions | completions | |", "|---|---|---|---|"]
    for field in sorted(chat | completions):
        where = ["yes" if field in fields else "" for fields in (chat, completions)]
        owner = ChatRequest if field in chat else CompletionRequest
        words = description_of(owner, field)
        rows.append(f"| `{field}` | {where[0]} | {where[1]} | {words} |")
    return "\n".join(rows)


def ignored() -> str:
    rows = ["| ignored and named | why |", "|---|---|"]
    rows += [f"| `{field}` | {why} |" for field, why in sorted(IGNORED.items())]
    return "\n".join(rows)


def refused() -> str:
    rows = ["| refused with 400 | why | accepted values |", "|---|---|---|"]
    for field, refusal in sorted(REFUSED.items()):
        neutral = [f"`{msgspec.json.encode(value).decode()}`" for value in refusal.neutral]
        rows.append(f"| `{field}` | {refusal.hint} | {', '.join(neutral)} |")
    return "\n".join(rows)


def refused_inside() -> str:
    rows = ["| refused inside objects | why |", "|---|---|"]
    for struct, refusals in REFUSED_INSIDE.items():
        for field, refusal in refusals.items():
            rows.append(f"| `{field}` of a {struct.__name__.lower()} | {refusal.hint} |")
    return "\n".join(rows)


def main() -> None:
    page = "\n".join(
        [
            HEAD,
            routes(),
            "",
            FIELDS,
            honoured(),
            "",
            ignored(),
            "",
            refused(),
            "",
            refused_inside(),
            "",
        ]
    )
    if "--check" not in sys.argv:
        PAGE.write_text(page, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
        sys.exit("docs/compatibility.md is behind the code: run `make docs`")


if __name__ == "__main__":
    main()
