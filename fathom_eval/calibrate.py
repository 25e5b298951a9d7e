"""Make a calibration: statistics of keys and queries from windows of text or transcripts, and per-layer plans."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from fathom_eval.calibration import KeyMoments, QueryStatistics
from fathom_eval.errors import UserError
from fathom_eval.prefill import CHUNK, dense_pass, use_attention
from fathom_eval.tasks.encoding import PromptEncoder

if TYPE_CHECKING:
    from fathom_eval.calibration_file import Provenance
    from fathom_eval.models import LoadedModel
    from fathom_eval.sessions.encoding import Candidate
    from fathom_eval.tasks.haystack import Haystack

Say = Callable[[str], None]


@dataclass(frozen=True)
class TokenSource:
    """Tokens to calibrate on.

    Attributes:
        name: Of the text.
        sha256: Of the whole text, or of what trajectories hold.
        ids: Its tokens, one after another.
        beginning: Ids that stand at the start of every window.
        repositories: Those that its trajectories worked on.
        title: What a reader knows it by, where that is not the name.
    """

    name: str
    sha256: str
    ids: Sequence[int]
    beginning: tuple[int, ...]
    repositories: tuple[str, ...] = ()
    title: str = ""

    def windows(self, lengths: Sequence[int]) -> list[list[int]]:
        """Disjoint windows of these lengths, in order. Raises :class:`UserError` where the text is too short for them."""
        lead = len(self.beginning)
        needed = sum(length - lead for length in lengths)
        if len(self.ids) < needed:
            raise UserError(
                f"{self.title or self.name} has {len(self.ids):,} tokens, {needed:,} are needed: ask for fewer, or give a longer text"
            )
        windows, start = [], 0
        for length in lengths:
            windows.append([*self.beginning, *self.ids[start : start + length - lead]])
            start += length - lead
        return windows


def text_source(tokenizer: Any, haystack: Haystack) -> TokenSource:
    """The tokens of a text."""
    encoder = PromptEncoder(tokenizer, chat_template=False)
    ids, beginning = encoder.encode_many([haystack.text])[0], tuple(encoder.encode(""))
    return TokenSource(haystack.name, haystack.sha256, ids, beginning, title=haystack.title)


def trajectory_source(
    tokenizer: Any,
    trajectories: str,
    tokens: int,
    *,
    name: str,
    repo: str | None = None,
    exclude: Sequence[str] = (),
    format_name: str | None = None,
    revision: str | None = None,
    default_repo: str = "",
    say: Say = lambda line: None,
) -> TokenSource:
    """The tokens of trajectories as sessions render them, as many trajectories as ``tokens`` take.

    Repositories take turns where the source is read whole; a set of the hub is read in its own order and only as far as is needed.

    Args:
        trajectories: File, folder or hub id.
        name: What the set is called.
        repo: Only those of this repository.
        exclude: None of these repositories.

    Raises:
        UserError: Nothing can be read, or nothing is left.
    """
    from fathom_eval.session_data import is_read_whole
    from fathom_eval.sessions.encoded_cache import EncodedCache
    from fathom_eval.sessions.encoding import TrajectoryEncoder
    from fathom_eval.sessions.reading import read_trajectories
    from fathom_eval.sessions.rendering import choose_renderer
    from fathom_eval.sessions.report import ReadReport

    renderer, rendering = choose_renderer(tokenizer, "auto")
    encoder, report = TrajectoryEncoder(tokenizer, renderer, EncodedCache()), ReadReport()
    wanted = (
        trajectory
        for trajectory in read_trajectories(trajectories, report, format_name=format_name, revision=revision, default_repo=default_repo)
        if repo in (None, trajectory.repo) and trajectory.repo not in exclude
    )
    ids: list[int] = []
    digest = hashlib.sha256(renderer.identity.encode())
    repositories = set()
    candidates = encoder.candidates(wanted, report)
    for candidate in _taking_turns(list(candidates)) if is_read_whole(trajectories) else candidates:
        ids += encoder.load(candidate).ids.tolist()
        digest.update(candidate.content_hash.encode())
        repositories.add(candidate.repo)
        if len(ids) >= tokens:
            break
    if not ids:
        problem = next(iter(report.lines()), "all are of repositories that were left out" if report.trajectories else "it is empty")
        raise UserError(f"no trajectory of {name} can be used: {problem}")
    say(f"{rendering}; {len(ids):,} tokens of {len(repositories)} repositories")
    return TokenSource(name, digest.hexdigest(), ids, encoder.prefix, tuple(sorted(repositories)))


def _taking_turns(candidates: Sequence[Candidate]) -> list[Candidate]:
    """One trajectory of each repository, then the second ones, and so on; the same on any machine and in any order of files."""
    from fathom_eval.sessions.packing import rank

    turns: dict[str, int] = {}
    keyed: list[tuple[int, int, Candidate]] = []
    for candidate in sorted(candidates, key=lambda one: rank(0, one.content_hash)):
        turn = turns[candidate.repo] = turns.get(candidate.repo, -1) + 1
        keyed.append((turn, len(keyed), candidate))
    return [candidate for _, _, candidate in sorted(keyed, key=lambda entry: entry[:2])]


@torch.inference_mode()
def measure_statistics(
    loaded: LoadedModel, windows: Sequence[Sequence[int]], *, chunk: int = CHUNK, done: Callable[[int], None] = lambda window: None
) -> dict[str, Tensor]:
    """Statistics of the keys and queries of every layer over all windows, each of which is read by itself.

    Sums are kept in fp64 and added up chunk by chunk; one window's keys and values are held at a time.

    Args:
        windows: Tokens.
        chunk: Tokens of one forward pass.
        done: Called after each window with its number.

    Returns:
        The tensors of a calibration file, fp32, stacked over layers.

    Raises:
        UserError: A key is not finite (layer and KV head are named), or memory does not suffice.
    """
    facts = loaded.facts
    keys = [KeyMoments() for _ in range(facts.layers)]
    queries = _Queries(facts.layers)
    use_attention(loaded)
    for number, window in enumerate(windows):
        try:
            _read_window(loaded, window, keys, queries, chunk)
        except torch.OutOfMemoryError:
            raise UserError(
                f"a window of {len(window)} tokens does not fit into the memory of {facts.place}: give a shorter --context"
            ) from None
        done(number)
    if queries.statistics[0].count == 0:
        raise UserError(f"{facts.name} does not use transformers' attention interface, so no method can run in it")
    of_keys = [moments.statistics() for moments in keys]
    stacked = {
        "key_mean": [part.mean for part in of_keys],
        "key_mean_magnitude": [part.mean_magnitude for part in of_keys],
        "key_variance": [part.variance for part in of_keys],
        "basis_vectors": [part.basis.vectors for part in of_keys],
        "basis_variance": [part.basis.variance for part in of_keys],
        "query_mean_magnitude": [part.mean_magnitude.float() for part in queries.statistics],
        "query_second_moment": [part.second_moment.float() for part in queries.statistics],
    }
    return {name: torch.stack([part.cpu() for part in parts]) for name, parts in stacked.items()}


class _Queries:
    """Moments of the queries of every layer."""

    def __init__(self, layers: int) -> None:
        self.statistics = [QueryStatistics(torch.float64) for _ in range(layers)]

    def observe(self, layer: int, query: Tensor, keys: Tensor, scaling: float) -> None:
        self.statistics[layer].add(query)


def _read_window(loaded: LoadedModel, window: Sequence[int], keys: Sequence[KeyMoments], queries: _Queries, chunk: int) -> None:
    model = loaded.model
    ids = torch.tensor([list(window)], device=model.device)
    cache: Any = DynamicCache()
    dense_pass(model, ids, cache, chunk=chunk, observer=queries)
    for number, (layer, moments) in enumerate(zip(cache.layers, keys, strict=True)):
        finite = torch.isfinite(layer.keys[0]).all(-1).all(-1)
        if not finite.all():
            heads = ", ".join(map(str, (~finite).nonzero().flatten().tolist()))
            raise UserError(f"the text gave keys that are not finite in layer {number}, KV head {heads}")
        moments.add(layer.keys[0])


def describe(loaded: LoadedModel, source: TokenSource, *, tokens: int, context: int) -> Provenance:
    """Where statistics of this model and text come from."""
    from fathom_eval import __version__
    from fathom_eval.calibration_file import Provenance

    facts = loaded.facts
    rope = getattr(loaded.model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return Provenance(
        # A path says where this machine keeps the model, and only its last part what it is.
        model=Path(facts.name).name if Path(facts.name).exists() else facts.name,
        model_fingerprint=facts.model_fingerprint,
        tokenizer_fingerprint=facts.tokenizer_fingerprint,
        dtype=facts.dtype,
        layers=facts.layers,
        kv_heads=facts.kv_heads,
        head_dim=facts.head_dim,
        rope={str(key): value for key, value in dict(rope).items() if isinstance(value, (str, int, float, bool, list))},
        text=source.name,
        text_sha256=source.sha256,
        repositories=source.repositories,
        tokens=tokens,
        context=context,
        version=__version__,
    )


def plan_basis(asked: Literal["auto", "raw", "klt"], loaded: LoadedModel) -> Literal["raw", "klt"]:
    """The basis that a plan is for: ``auto`` is what :class:`~fathom_eval.methods.fathom.Fathom` takes for the model."""
    if asked == "auto":
        return "raw" if loaded.facts.qk_norm else "klt"
    return asked
