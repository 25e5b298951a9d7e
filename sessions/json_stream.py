"""Records of large JSON files in bounded memory: one line, or one element of an array, at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MAX_RECORD_BYTES = 256 * 2**20
"""A longer record is left out, since it would have to be held whole."""

_IN_STRING = re.compile(rb'["\\]')
_OUTSIDE = re.compile(rb'["{}\[\]]')


@dataclass(frozen=True)
class Piece:
    """Bytes of one record.

    Attributes:
        number: of the line or element, from 1.
        content: the bytes; None where the record is longer than the limit.
        complete: whether the source went on to the record's end.
    """

    number: int
    content: bytes | None
    complete: bool = True


class _Buffer:
    """Collects the parts of one record up to the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self._limit:
            self._parts = []
        else:
            self._parts.append(part)

    def take(self) -> bytes | None:
        content = b"".join(self._parts) if self._size <= self._limit else None
        self._parts, self._size = [], 0
        return content

    @property
    def size(self) -> int:
        return self._size


def split_lines(chunks: Iterable[bytes], limit: int = MAX_RECORD_BYTES) -> Iterator[Piece]:
    r"""Lines, ended by ``\n`` alone: JSON strings may hold any other line separator. The last one is complete without a line end."""
    buffer = _Buffer(limit)
    number = 1
    for chunk in chunks:
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            buffer.add(chunk[start:end])
            yield Piece(number, buffer.take())
            number += 1
            start = end + 1
        buffer.add(chunk[start:])
    if buffer.size:
        yield Piece(number, buffer.take())


def split_values(chunks: Iterable[bytes], limit: int = MAX_RECORD_BYTES) -> Iterator[Piece]:
    """Objects and arrays that are elements of a top-level array, or stand at the top level themselves, one after another.

    Only brackets and strings are looked at: whether a piece is valid JSON is for the caller to see.
    """
    buffer = _Buffer(limit)
    number = depth = base = 0
    in_string = False
    skip = 0
    for chunk in chunks:
        position, skip = skip, 0
        start = 0
        while match := (_IN_STRING if in_string else _OUTSIDE).search(chunk, position):
            position = match.end()
            character = match.group()
            if character == b'"':
                in_string = not in_string
            elif character == b"\\":
                position += 1
                # An escaped character may be the first of the next chunk.
                skip = max(position - len(chunk), 0)
            elif character in b"{[":
                if depth == base == 0 and character == b"[" and number == 0:
                    base = depth = 1
                    continue
                if depth == base:
                    start = match.start()
                    number += 1
                depth += 1
            elif depth > base:
                depth -= 1
                if depth == base:
                    buffer.add(chunk[start:position])
                    yield Piece(number, buffer.take())
            else:
                base = depth = 0
        if depth > base:
            buffer.add(chunk[start:])
    if depth > base:
        yield Piece(number, buffer.take(), complete=False)
