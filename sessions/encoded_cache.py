"""Rendered and tokenised trajectories, kept between runs.

An entry is a ``.npz`` file of numbers and UTF-8 bytes, read without pickle. Its name is a hash of content, tokenizer and rendering, never
of an id. A damaged entry counts as missing.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fathom_eval.gguf_models import cache_root


@dataclass(frozen=True)
class TokenTarget:
    """A response of the model that a session may ask for.

    Attributes:
        step: index of the step in its trajectory.
        index: position of the step in the source.
        start: number of tokens before it, the header of its turn included.
        start_character: where it starts in the text.
        end_character: where it ends.
        content: the recorded content, without tool calls.
    """

    step: int
    index: int
    start: int
    start_character: int
    end_character: int
    content: str


@dataclass(frozen=True)
class EncodedTrajectory:
    """A trajectory as text and tokens.

    Attributes:
        ids: int32 tokens, shape ``[tokens]``, without a beginning-of-sequence token.
        text: what the ids encode.
        targets: in order.
        refused: targets of which the prompt would be no prefix of the trajectory's own rendering or of its tokens.
    """

    ids: NDArray[np.int32]
    text: str
    targets: tuple[TokenTarget, ...]
    refused: int


class EncodedCache:
    """A folder of entries. Where it cannot be written, a temporary one that goes with the object."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_root() / "trajectories"
        self.temporary = False
        self._stand_in: tempfile.TemporaryDirectory[str] | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder):
                pass
        except OSError:
            self._stand_in = tempfile.TemporaryDirectory(prefix="fathom-eval-")
            self.folder = Path(self._stand_in.name)
            self.temporary = True

    def load(self, key: str) -> EncodedTrajectory | None:
        """The entry of this key, or None where there is none or it is damaged."""
        try:
            with np.load(self._path(key), allow_pickle=False) as entry:
                return _unpack(key, {name: entry[name] for name in ("header", "ids", "text", "targets")})
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError):
            return None

    def save(self, key: str, encoded: EncodedTrajectory) -> None:
        """Keep an entry. Raises OSError where the disk is full."""
        path = self._path(key)
        path.parent.mkdir(exist_ok=True)
        packed = io.BytesIO()
        np.savez(packed, **_pack(key, encoded))  # type: ignore[arg-type]
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
        try:
            with os.fdopen(descriptor, "wb") as handle:
                handle.write(packed.getbuffer())
            Path(name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.npz"


def _pack(key: str, encoded: EncodedTrajectory) -> dict[str, NDArray[np.generic]]:
    header = {"key": key, "refused": encoded.refused, "contents": [target.content for target in encoded.targets]}
    numbers = [(target.step, target.index, target.start, target.start_character, target.end_character) for target in encoded.targets]
    return {
        "header": np.frombuffer(json.dumps(header).encode(), dtype=np.uint8),
        "ids": encoded.ids,
        "text": np.frombuffer(encoded.text.encode(), dtype=np.uint8),
        "targets": np.array(numbers, dtype=np.int64).reshape(-1, 5),
    }


def _unpack(key: str, entry: dict[str, NDArray[np.generic]]) -> EncodedTrajectory:
    """Raises ValueError, KeyError or TypeError for an entry that is not what was written."""
    header = json.loads(entry["header"].tobytes())
    ids, numbers = entry["ids"], entry["targets"]
    if header["key"] != key or ids.dtype != np.int32 or ids.ndim != 1 or numbers.shape != (len(header["contents"]), 5):
        raise ValueError("another entry")
    targets = tuple(
        TokenTarget(step, index, start, start_character, end_character, str(content))
        for (step, index, start, start_character, end_character), content in zip(numbers.tolist(), header["contents"], strict=True)
    )
    return EncodedTrajectory(np.asarray(ids, dtype=np.int32), entry["text"].tobytes().decode(), targets, int(header["refused"]))
