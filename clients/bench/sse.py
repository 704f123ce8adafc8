"""Server-sent events out of the pieces that a socket gave, each with the time it came.

Lines end in LF or CRLF (a lone CR, which the standard allows too, ends none); comments and fields
other than `data` are passed over; several `data` lines of one event are joined by LF. An event is
complete at its empty line. A line that the stream's end cuts off is dropped; whole lines before it
still count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def read_events(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """(seconds, data) of each event, from (seconds, bytes) of each piece."""
    seconds = 0.0
    data: list[bytes] = []
    rest = b""
    for seconds, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield seconds, b"\n".join(data)
                data = []
    if data:
        yield seconds, b"\n".join(data)
