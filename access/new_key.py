"""`firsttoken keys new`: makes a key, prints it once, and the entry for the keys file."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Sequence

from access.keys import NAME, digest_of

_NUM_BYTES = 32


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    key = f"ft-{secrets.token_urlsafe(_NUM_BYTES)}"
    entry = {
        "id": given.id,
        "sha256": digest_of(key).hex(),
        "tenant": given.tenant,
        "max_concurrent_requests": given.max_concurrent_requests,
        "requests_per_minute": given.requests_per_minute,
        "tokens_per_minute": given.tokens_per_minute,
        "admin": given.admin or None,
        "trusted": given.trusted or None,
    }
    # JSON's scalars are YAML's, and quoted: an id of digits stays a text
    lines = [f"{name}: {json.dumps(value)}" for name, value in entry.items() if value is not None]
    print("The key, which is shown only now:", file=sys.stderr)
    print(f"  {key}\n", file=sys.stderr)
    print("Its entry in the keys file, under `keys:`:", file=sys.stderr)
    print("- " + "\n  ".join(lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="firsttoken keys",
        description="Makes an API key. The key goes to stderr, the keys file's entry to stdout.",
    )
    parser.add_argument("action", choices=("new",))
    parser.add_argument(
        "--id", type=_name, default=f"key-{secrets.token_hex(4)}", help="what logs call it"
    )
    parser.add_argument("--tenant", type=_name, help="whose requests it makes; none: the id")
    for limit in ("--max-concurrent-requests", "--requests-per-minute", "--tokens-per-minute"):
        parser.add_argument(limit, type=_count, help="none: no limit")
    parser.add_argument("--admin", action="store_true", help="it opens what is for operators")
    parser.add_argument(
        "--trusted", action="store_true", help="a facade's key for its engine: it names tenants"
    )
    return parser


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError("a whole number of at least 1 expected")
    return count


def _name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError("1 to 128 letters, digits and ._:@- expected")
    return text


if __name__ == "__main__":
    sys.exit(main())
