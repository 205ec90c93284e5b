"""The address of a crew's store: "host:port", or "[address]:port" for IPv6."""

from __future__ import annotations

import re

from distlion.errors import InvalidArgumentError, UnsupportedTypeError

_EXAMPLES = 'expected "host:port", such as "head:29400", "10.0.0.1:29400" or "[::1]:29400"'
_PATTERN = re.compile(r"(?:\[([0-9A-Fa-f:.]+(?:%\w+)?)\]|([\w.-]+)):([0-9]{1,5})")
MOST_PORTS = 65_535


def parse_endpoint(endpoint: object) -> tuple[str, int]:
    """Return the host and the port of an endpoint.

    Raises:
        UnsupportedTypeError: It is not text.
        InvalidArgumentError: It has no host or no port, or is an IPv6 address without brackets.
    """
    if not isinstance(endpoint, str):
        raise UnsupportedTypeError(f"endpoint={endpoint!r}: {_EXAMPLES}")
    found = _PATTERN.fullmatch(endpoint.strip())
    if found is None or not 0 < int(found[3]) <= MOST_PORTS:
        raise InvalidArgumentError(f"endpoint={endpoint!r}: {_EXAMPLES}")
    return found[1] or found[2], int(found[3])
