"""Trajectories as tokens: rendered and tokenised once each, with the token position of every possible target."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fathom_eval.errors import UserError
from fathom_eval.fingerprints import fingerprint_tokenizer
from fathom_eval.run_files import raise_file_error
from fathom_eval.sessions.encoded_cache import EncodedCache, EncodedTrajectory, TokenTarget
from fathom_eval.sessions.rendering import Renderer, Rendering, UnrenderableError
from fathom_eval.sessions.report import ReadReport
from fathom_eval.sessions.steps import Trajectory
from fathom_eval.tasks.encoding import PromptEncoder

ENCODING_VERSION = 1
"""Part of every cache key: a change of rendering or of target positions that no other identity shows needs a new one."""
_BATCH_CHARACTERS = 1_000_000
_JOINTS_TRIED = 8


@dataclass(frozen=True)
class Candidate:
    """What assembly needs to know of an encoded trajectory; text and tokens stay in the cache.

    Attributes:
        id: of the trajectory.
        repo: its repository.
        source: where it was read.
        content_hash: of its steps and tools.
        key: of its cache entry.
        length: tokens of the whole trajectory.
        targets: ``(step, tokens before it)`` of every possible target, in order.
        refused: targets that cannot be used, see :class:`EncodedTrajectory`.
    """

    id: str
    repo: str
    source: str
    content_hash: str
    key: str
    length: int
    targets: tuple[tuple[int, int], ...]
    refused: int


class TrajectoryEncoder:
    """Renders and tokenises trajectories, through the cache.

    Raises UserError for a tokenizer that is none.
    """

    def __init__(self, tokenizer: Any, renderer: Renderer, cache: EncodedCache) -> None:
        self.renderer = renderer
        self.cache = cache
        self.prefix = tuple(PromptEncoder(tokenizer, chat_template=False).encode(""))
        """Ids that stand once before a session, e.g. a beginning-of-sequence token."""
        self.tokenizer_fingerprint = fingerprint_tokenizer(tokenizer)
        self.computed = 0
        """Trajectories that were not in the cache."""
        self._tokenizer = tokenizer

    def key(self, trajectory: Trajectory) -> str:
        """Cache key of a trajectory."""
        parts = (str(ENCODING_VERSION), trajectory.content_hash, self.tokenizer_fingerprint, self.renderer.identity)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def candidates(self, trajectories: Iterable[Trajectory], report: ReadReport) -> Iterator[Candidate]:
        """Encode trajectories; one that the chat template refuses is reported and left out.

        Raises UserError where the cache cannot take an entry.
        """
        batch: list[tuple[Trajectory, str, Rendering]] = []
        size = 0
        for trajectory in trajectories:
            key = self.key(trajectory)
            if (cached := self.cache.load(key)) is not None:
                yield _candidate(trajectory, key, cached)
                continue
            try:
                rendering = self.renderer.render(trajectory)
            except UnrenderableError as error:
                report.skip(f"{trajectory.source} ({trajectory.id})", str(error), "trajectories that cannot be rendered")
                continue
            batch.append((trajectory, key, rendering))
            size += len(rendering.text)
            if size >= _BATCH_CHARACTERS:
                yield from self._encode(batch)
                batch, size = [], 0
        yield from self._encode(batch)

    def load(self, candidate: Candidate) -> EncodedTrajectory:
        """Text and tokens of a candidate. Raises UserError where its entry has gone meanwhile."""
        encoded = self.cache.load(candidate.key)
        if encoded is None:
            raise UserError(f"the cache {self.cache.folder} lost an entry during the run: run the same command again")
        return encoded

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without the tokens that a tokenizer puts around a text."""
        if not texts:
            return []
        split = {} if self.renderer.raw_special_tokens else {"split_special_tokens": True}
        return [list(ids) for ids in self._tokenizer(list(texts), add_special_tokens=False, verbose=False, **split).input_ids]

    def is_prefix(self, encoded: EncodedTrajectory, target: TokenTarget) -> bool:
        """Whether the text before the target, tokenised by itself, gives the trajectory's own tokens up to the target."""
        [alone] = self.encode([encoded.text[: target.start_character]])
        return bool(alone == encoded.ids[: target.start].tolist())

    def step_text(self, encoded: EncodedTrajectory, target: TokenTarget) -> str:
        """The target as it is rendered, without the special tokens that end its turn in a chat template."""
        text = encoded.text[target.start_character : target.end_character]
        if not self.renderer.raw_special_tokens:
            return text
        [ids] = self.encode([text])
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)).rstrip("\n")

    def _encode(self, batch: Sequence[tuple[Trajectory, str, Rendering]]) -> Iterator[Candidate]:
        whole = self.encode([rendering.text for _, _, rendering in batch])
        pieces = [_pieces(rendering) for _, _, rendering in batch]
        flat = iter(self.encode([piece for of_one in pieces for piece in of_one]))
        for (trajectory, key, rendering), ids, of_one in zip(batch, whole, pieces, strict=True):
            starts = self._joints(ids, of_one, [next(flat) for _ in of_one])
            targets = []
            for span, start in zip(rendering.targets, starts, strict=True):
                step = trajectory.steps[span.step]
                if start is not None:
                    targets.append(TokenTarget(span.step, step.index, start, span.start, span.end, step.content))
            refused = rendering.refused + len(starts) - len(targets)
            encoded = EncodedTrajectory(np.array(ids, dtype=np.int32), rendering.text, tuple(targets), refused)
            self.computed += 1
            try:
                self.cache.save(key, encoded)
            except OSError as error:
                raise_file_error(self.cache.folder, "write", error)
            yield _candidate(trajectory, key, encoded)

    def _joints(self, ids: Sequence[int], pieces: Sequence[str], encoded: Sequence[Sequence[int]]) -> list[int | None]:
        """Number of tokens before each joint of the pieces; None where a token reaches over it.

        The pieces tokenised one by one must give the tokens of the whole; a joint at which they do not is taken out.
        """
        starts: list[int | None] = []
        position = 0
        open_text, failures = "", 0
        for number, piece in enumerate(pieces[:-1]):
            if failures >= _JOINTS_TRIED:
                starts.append(None)
                continue
            open_text += piece
            tokens = encoded[number] if open_text == piece else self.encode([open_text])[0]
            end = position + len(tokens)
            if list(ids[position:end]) == list(tokens):
                starts.append(end)
                position, open_text, failures = end, "", 0
            else:
                starts.append(None)
                failures += 1
        return starts


def _pieces(rendering: Rendering) -> list[str]:
    cuts = [0, *(span.start for span in rendering.targets), len(rendering.text)]
    return [rendering.text[start:end] for start, end in pairwise(cuts)]


def _candidate(trajectory: Trajectory, key: str, encoded: EncodedTrajectory) -> Candidate:
    return Candidate(
        id=trajectory.id,
        repo=trajectory.repo,
        source=trajectory.source,
        content_hash=trajectory.content_hash,
        key=key,
        length=len(encoded.ids),
        targets=tuple((target.step, target.start) for target in encoded.targets),
        refused=encoded.refused,
    )


def prompt_ids(prefix: Sequence[int], parts: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """The tokens of a session: what stands once before it, then those of its trajectories."""
    return np.concatenate([np.array(prefix, dtype=np.int32), *parts])
