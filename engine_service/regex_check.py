"""What is wrong with a regular expression that the whole output has to match."""

from __future__ import annotations

import re

from engine_service.errors import InvalidRequest
from engine_service.regex_cost import check_cost


def check_regex(pattern: str, *, field: str, place: str = "$") -> None:
    """Raises InvalidRequest. `place`: where within the field's document, for the message.

    Anchors at the ends are implied; elsewhere the compiler would drop them. What else it can't
    do, it says itself.
    """
    try:
        re.compile(pattern)
        check_cost(place, pattern)
    except InvalidRequest as error:
        raise InvalidRequest(error.message.removeprefix("$: "), field=field) from error
    except (re.error, RecursionError, OverflowError) as error:
        message = "is not a regular expression that is supported"
        raise InvalidRequest(
            message if place == "$" else f"{place}: {message}", field=field
        ) from error
