"""From what a user calls a model to a local folder with config, safetensors weights and tokenizer."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fathom_eval.bundled import BUNDLED, bundled_folder
from fathom_eval.errors import UserError, did_you_mean
from fathom_eval.gguf_models import Say, converted_gguf, is_gguf, one_line
from fathom_eval.hub import PATIENCE_SECONDS, hub_answers

ACCEPTED = (
    ("NAME", f"a bundled model: {', '.join(BUNDLED)}"),
    ("FOLDER", "a local folder with config.json, *.safetensors and a tokenizer"),
    ("FILE.gguf", "a GGUF file; converted to safetensors once, in the cache"),
    ("OWNER/NAME", "a model of the hub; its safetensors weights are downloaded"),
)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
# Weights in the one place where transformers reads them; no pickles, no copies in other formats.
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_HUB_CODE = ("*.py",)
_HUB_NOT = ("*/*", "consolidated*")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Checkpoint:
    """A model's files.

    Attributes:
        name: what the user called it, without the folders of a local path.
        folder: holds config.json, safetensors weights and the tokenizer.
    """

    name: str
    folder: Path


@contextlib.contextmanager
def open_checkpoint(
    spec: str, *, say: Say, offline: bool = False, revision: str | None = None, trust_remote_code: bool = False
) -> Iterator[Checkpoint]:
    """The checkpoint that ``spec`` names, fetched or converted if need be; valid within the block.

    Args:
        spec: bundled name, local folder, GGUF file or hub id.
        say: takes one line of progress.
        offline: never touch the network.
        revision: branch, tag or commit of a hub model.
        trust_remote_code: also fetch the model code of a hub model.

    Raises:
        UserError: nothing of this name is there, it cannot be fetched, or its files are incomplete or pickled.
    """
    try:
        path = Path(spec).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"'{spec}' cannot be a model: {one_line(error)}") from None
    if not spec:
        raise UserError(f"the name of the model is empty; bundled is {', '.join(BUNDLED)}")
    if revision is not None and (spec in BUNDLED or is_folder or is_file):
        raise UserError(f"a revision is for hub models; '{spec}' is {'bundled' if spec in BUNDLED else 'local'}")
    if spec in BUNDLED:
        with bundled_folder(BUNDLED[spec], offline=offline, say=say) as folder:
            yield Checkpoint(spec, folder)
    elif is_folder:
        check_folder(path)
        yield Checkpoint(path.resolve().name, path)
    elif is_file:
        if path.suffix.lower() != ".gguf" and not is_gguf(path):
            raise UserError(f"'{spec}' is a file but no GGUF file: give a model folder, a .gguf file or a hub id")
        with converted_gguf(path, say=say) as folder:
            yield Checkpoint(path.name, folder)
    else:
        _refuse_misspelt(spec, path)
        folder = _hub_snapshot(spec, offline, revision, trust_remote_code)
        check_folder(folder, spec)
        yield Checkpoint(spec, folder)


def check_folder(folder: Path, name: str | None = None) -> None:
    """Raise UserError unless the folder holds config.json and a complete set of safetensors weights."""
    where = f"the model at {name or folder}"
    if not (folder / _CONFIG).is_file():
        if (folder / "adapter_config.json").is_file():
            raise UserError(f"{where} is an adapter without its model: merge it into the model first")
        ggufs = sorted(folder.glob("*.gguf"))
        hint = f"; give the GGUF file itself, e.g. {ggufs[0]}" if ggufs else ""
        raise UserError(f"{where} has no {_CONFIG}{hint}")
    wanted = ["model.safetensors"]
    if (folder / _INDEX).is_file():
        try:
            wanted = sorted(set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"{where} has an unreadable {_INDEX}: {one_line(error)}") from None
    missing = [file for file in wanted if not (folder / file).is_file()]
    if not missing:
        return
    if any(next(folder.glob(pattern), None) for pattern in _PICKLES) and len(wanted) == 1:
        raise UserError(f"{where} has no safetensors weights; pickled weights are never loaded: convert them to safetensors first")
    raise UserError(f"{where} is incomplete: {missing[0]} is missing")


def check_spec(spec: str) -> None:
    """Raise UserError where ``spec`` is neither bundled, nor here, nor could be a hub id. Nothing is read and no network is asked."""
    try:
        path = Path(spec).expanduser()
        absent = not path.exists()
    except (OSError, RuntimeError, ValueError):
        return  # which opening it says better
    if spec and absent and spec not in BUNDLED:
        _refuse_misspelt(spec, path)


def _refuse_misspelt(spec: str, path: Path) -> None:
    """Raise UserError where ``spec`` can be no hub id, or is a bundled name with a typing error."""
    if "shap" in spec.lower() and "/" not in spec:
        _refuse_shape(spec)
    near = difflib.get_close_matches(spec.lower(), BUNDLED, n=1, cutoff=0.6)
    if near and "/" not in spec:
        raise UserError(f"unknown model '{spec}'; {did_you_mean(spec.lower(), BUNDLED)}")
    if not _HUB_ID.fullmatch(spec) or path.suffix.lower() == ".gguf":
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, siblings, n=1, cutoff=0.6)
        hint = f"; did you mean '{path.parent / near[0]}'?" if near else ""
        raise UserError(f"there is no model folder or file '{spec}'{hint}")


def _refuse_shape(spec: str) -> None:
    """Raise UserError where ``spec`` is a shape of random weights, or almost one."""
    from fathom_eval.offload.weights import SHAPES  # torch comes with it: only for a word that looks like one

    near = difflib.get_close_matches(spec.lower(), SHAPES, n=1, cutoff=0.8)
    if near:
        what = f"'{spec}' is no model" if spec in SHAPES else f"unknown model '{spec}'; did you mean '{near[0]}'? It is no model either"
        raise UserError(f"{what} but a shape for random weights, which only 'fathom-eval bench step' takes")


def _hub_snapshot(spec: str, offline: bool, revision: str | None, trust_remote_code: bool) -> Path:
    """Local folder of a hub model, downloaded where needed. Without a network the cached copy serves."""
    from huggingface_hub import errors, is_offline_mode, snapshot_download

    patterns = [*_HUB_FILES, *(_HUB_CODE if trust_remote_code else ())]
    tried = f"'{spec}' is no bundled model ({', '.join(BUNDLED)}), no local folder or file"
    network = "the model hub is not asked (offline)"
    if not (offline or is_offline_mode() or hub_answers()):
        offline, network = True, f"the model hub did not answer within {PATIENCE_SECONDS:g} s"
    try:
        return Path(
            snapshot_download(spec, revision=revision, allow_patterns=patterns, ignore_patterns=list(_HUB_NOT), local_files_only=offline)
        )
    except errors.GatedRepoError:
        raise UserError(f"the hub model '{spec}' is gated: accept its terms on the hub and log in with 'hf auth login'") from None
    except errors.RevisionNotFoundError:
        raise UserError(f"the hub model '{spec}' has no revision '{revision}'") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise UserError(f"{tried}, and the hub has no model of that name (or it is private)") from None
    except errors.LocalEntryNotFoundError:
        wanted = "no such model" if revision is None else f"no revision '{revision}' of it"
        if not (offline or is_offline_mode()):
            network = "the model hub cannot be reached"
        raise UserError(f"{tried}; {network}, and what was fetched from it before holds {wanted}") from None
    # What is left: network trouble in the middle of a download, a full or read-only disk.
    except Exception as error:
        raise UserError(f"fetching the hub model '{spec}' failed: {one_line(error)}") from None
