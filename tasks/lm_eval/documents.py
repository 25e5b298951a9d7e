"""A split of an lm-eval task whose documents are made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

Document = dict[str, Any]


class Documents(Sequence[Document]):
    """Stands where lm-eval expects a dataset. With ``--limit 6`` it takes six documents, and six are made.

    Attributes:
        features: The fields of every document, as the keys that lm-eval looks for.
    """

    def __init__(self, count: int, make: Callable[[int], Document], fields: Sequence[str]) -> None:
        self.features: dict[str, None] = dict.fromkeys(fields)
        self._count = count
        self._make = make
        self._made: dict[int, Document] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Document: ...

    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...

    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(self._count))]
        position = index + self._count if index < 0 else index
        if not 0 <= position < self._count:
            raise IndexError(f"document {index} of {self._count}")
        if position not in self._made:
            self._made[position] = self._make(position)
        return self._made[position]
