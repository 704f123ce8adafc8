"""String formats as patterns. Each takes a part of what the format allows, and nothing else."""

from __future__ import annotations

from typing import Final

_HOUR: Final = r"(?:[01][0-9]|2[0-3])"
_TIME: Final = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_HOUR}:[0-5][0-9])"
_YEAR: Final = r"(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR: Final = (
    r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
)
_DATE: Final = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    rf"|{_LEAP_YEAR}-02-29)"
)
_COUNT: Final = "[0-9]{1,4}"
_MONTHS: Final = rf"{_COUNT}M(?:{_COUNT}D)?"
_DAYS: Final = rf"(?:{_COUNT}D|{_MONTHS}|{_COUNT}Y(?:{_MONTHS})?)"
_MINUTES: Final = rf"{_COUNT}M(?:{_COUNT}S)?"
_TIMES: Final = rf"T(?:{_COUNT}S|{_MINUTES}|{_COUNT}H(?:{_MINUTES})?)"
_HOST: Final = r"[a-z0-9]+(?:[.-][a-z0-9]+)*"
_BYTE: Final = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4: Final = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_WORD: Final = r"[0-9a-fA-F]{1,4}"
_IPV6: Final = "(?:" + "|".join(
    [rf"(?:{_WORD}:){{7}}{_WORD}", "::"]
    + [rf"(?:{_WORD}:){{{n}}}:(?:{_WORD}(?::{_WORD}){{0,{6 - n}}})?" for n in range(1, 7)]
    + [rf"::{_WORD}(?::{_WORD}){{0,5}}"]
) + ")"  # fmt: skip
_HEX: Final = "[0-9a-fA-F]"
_URI_CHAR: Final = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%{_HEX}{{2}})"
_PATH: Final = rf"(?:/{_URI_CHAR}*)*"
_QUERY: Final = rf"(?:\?(?:{_URI_CHAR}|[/?])*)?(?:#(?:{_URI_CHAR}|[/?])*)?"
_URI: Final = rf"[a-z]+:(?://{_HOST}(?::[0-9]{{1,4}})?{_PATH}|[A-Za-z0-9:-]+){_QUERY}"
_POINTER: Final = r"(?:/(?:[^/~\x00-\x1f]|~[01])*)*"

FORMATS: Final[dict[str, str]] = {
    name: f"^(?:{pattern})$"
    for name, pattern in {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}T{_TIME}",
        "duration": f"P(?:{_DAYS}(?:{_TIMES})?|{_TIMES}|{_COUNT}W)",
        "email": rf"[A-Za-z0-9_%+-]+(?:\.[A-Za-z0-9_%+-]+)*@{_HOST}\.[a-z]{{2,6}}",
        "hostname": _HOST,
        "ipv4": _IPV4,
        "ipv6": _IPV6,
        "uuid": rf"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
        "uri": _URI,
        "uri-reference": rf"(?:{_URI}|{_PATH}{_QUERY})",
        "json-pointer": _POINTER,
        "relative-json-pointer": rf"(?:0|[1-9]{{1,3}})(?:#|{_POINTER})",
    }.items()
}

# A label of a host name has at most 63 characters: so a name is one no longer than that.
MAX_LENGTHS: Final[dict[str, int]] = {"hostname": 63}
