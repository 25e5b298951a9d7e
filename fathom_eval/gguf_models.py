"""GGUF files, checked and converted once to a safetensors folder in the cache.

A converted folder appears in the cache under its final name only when it is complete, and it is used only while every file has the size
that was recorded when it was written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fathom_eval import compat
from fathom_eval.errors import UserError
from fathom_eval.run_files import check_free_space

CONVERSION_VERSION = 1
RECORD = "fathom_eval.json"
_PARTIAL = ".partial-"
_STALE_SECONDS = 24 * 3600
_MAGIC = b"GGUF"
# general.file_type of a GGUF whose matrices are not quantised. Quantised files were made for half precision.
_FILE_TYPES = {0: "float32", 1: "float16"}
_SPECIAL_TOKENS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
# Keys that end a generation: of a document, of a turn, of a message.
_END_TOKENS = ("eos", "eot", "eom")

Say = Callable[[str], None]


def one_line(error: BaseException, limit: int = 200) -> str:
    """An exception as text of one line; its type, where it says nothing."""
    text = " ".join(str(error).split())
    return (text if len(text) <= limit else text[: limit - 1] + "…") or type(error).__name__


def cache_root() -> Path:
    """Folder of everything kept between runs: ``$FATHOM_EVAL_CACHE``, ``$XDG_CACHE_HOME/fathom-eval`` or ``~/.cache/fathom-eval``."""
    if own := os.environ.get("FATHOM_EVAL_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "fathom-eval"
    return Path("~/.cache/fathom-eval").expanduser()


def conversion_path(sha256: str) -> Path:
    """Where the conversion of the GGUF file with this content hash is kept, whether it is there or not."""
    return cache_root() / "models" / f"{sha256[:32]}-{CONVERSION_VERSION}"


def cached_conversion(sha256: str) -> Path | None:
    """The complete converted folder of the GGUF file with this content hash, or None."""
    folder = conversion_path(sha256)
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        complete = record["sha256"] == sha256 and all((folder / name).stat().st_size == size for name, size in record["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return folder if complete else None


def is_gguf(path: Path) -> bool:
    """Whether the file starts with the GGUF magic."""
    with path.open("rb") as handle:
        return handle.read(len(_MAGIC)) == _MAGIC


def sha256_of(path: Path) -> str:
    """Content hash of a file (hex)."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@contextlib.contextmanager
def converted_gguf(path: Path, *, say: Say, sha256: str | None = None) -> Iterator[Path]:
    """The GGUF file as a model folder with safetensors weights (float32) and a tokenizer, valid within the block.

    The folder is kept in the cache; where the cache cannot be written it is temporary, and ``say`` says so.

    Args:
        path: the GGUF file.
        say: takes one line of progress.
        sha256: content hash of the file, if it is known already.

    Raises:
        UserError: the file is corrupt, truncated, of an unsupported kind, or there is no disk space.
    """
    if not is_gguf(path):
        raise UserError(f"{path} is no GGUF file: it does not start with the letters GGUF")
    digest = sha256 or sha256_of(path)
    if folder := cached_conversion(digest):
        yield folder
        return
    metadata, elements = read_gguf(path)
    with staging_folder(say) as (staging, keep):
        check_free_space(staging, 4 * elements + (64 << 20))
        say(f"converting {path.name} to safetensors, once")
        _convert(path, staging, metadata)
        _record(staging, path.name, digest)
        yield _publish(staging, digest) if keep else staging


def read_gguf(path: Path) -> tuple[dict[str, Any], int]:
    """Metadata of a GGUF file and the number of its weights, after checking that every tensor lies inside the file.

    Raises UserError for a file that is corrupt, truncated or one part of several.
    """
    try:
        import gguf
    except ImportError:
        raise UserError("reading a GGUF file needs the package 'gguf': pip install gguf") from None
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        ends = [(int(tensor.data_offset) + int(tensor.n_bytes), tensor.name) for tensor in reader.tensors]
        elements = sum(int(tensor.n_elements) for tensor in reader.tensors)
    # The reader follows counts and offsets of the file without checking them, so damage shows as almost any error.
    except Exception as error:
        raise UserError(f"{path} is a corrupt or truncated GGUF file: {one_line(error)}") from None
    size = path.stat().st_size
    if not ends:
        raise UserError(f"{path} is a GGUF file without tensors")
    last, name = max(ends)
    if last > size:
        raise UserError(f"{path} is truncated: tensor {name} ends at byte {last}, the file has {size}")
    if int(metadata.get("split.count", 1)) > 1:
        raise UserError(f"{path} is one part of a GGUF model in {metadata['split.count']} parts: merge them with gguf-split first")
    return metadata, elements


@contextlib.contextmanager
def staging_folder(say: Say) -> Iterator[tuple[Path, bool]]:
    """An empty folder that is gone after the block, and whether it lies in the cache, so that a rename can publish it."""
    parent = cache_root() / "models"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(parent)
        staging, keep = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=parent)), True
    except OSError as error:
        say(f"the cache {parent} cannot be written ({error.strerror}): working in a temporary folder, nothing is kept")
        staging, keep = Path(tempfile.mkdtemp(prefix="fathom-eval-")), False
    try:
        yield staging, keep
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _remove_stale(parent: Path) -> None:
    """Remove what killed processes left behind, old enough that nobody is still writing it."""
    for folder in parent.glob(f"{_PARTIAL}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _convert(path: Path, staging: Path, metadata: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    auto_model: Any = AutoModelForCausalLM
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, "local_files_only": True}
    try:
        with compat.quiet_transformers(), compat.bars_for_people_only():
            tokenizer = AutoTokenizer.from_pretrained(**place)
            model, info = auto_model.from_pretrained(**place, dtype=torch.float32, output_loading_info=True, **compat.gguf_arguments())
            if info["missing_keys"]:
                raise UserError(f"{path} lacks weights: {', '.join(sorted(info['missing_keys'])[:3])}")
            for name, weight in model.named_parameters():
                if not torch.isfinite(weight).all():
                    raise UserError(f"{path} is corrupt: weight {name} is not finite")
            _follow_metadata(tokenizer, metadata)
            ends = sorted({metadata[key] for end in _END_TOKENS if (key := f"tokenizer.ggml.{end}_token_id") in metadata})
            model.generation_config.eos_token_id = ends or None
            model.save_pretrained(staging)
            tokenizer.save_pretrained(staging)
    except UserError:
        raise
    # transformers raises ImportError, ValueError, KeyError and others for files and architectures that it cannot read.
    except Exception as error:
        raise UserError(f"{path} cannot be converted: {one_line(error)}") from None
    config = json.loads((staging / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = _FILE_TYPES.get(metadata.get("general.file_type", -1), "bfloat16")
    (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _follow_metadata(tokenizer: Any, metadata: dict[str, Any]) -> None:
    """Give the tokenizer the special tokens of the file; some versions of transformers take others for some vocabularies."""
    tokens = metadata["tokenizer.ggml.tokens"]
    for key, attribute in _SPECIAL_TOKENS.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and 0 <= index < len(tokens):
            setattr(tokenizer, attribute, tokens[index])
    wants_bos = metadata.get("tokenizer.ggml.add_bos_token")
    if wants_bos is not None and wants_bos != (tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]):
        tokenizer.add_bos_token = wants_bos
    tokenizer.clean_up_tokenization_spaces = False


def _record(staging: Path, source: str, sha256: str) -> None:
    from transformers import __version__

    files = {entry.name: entry.stat().st_size for entry in sorted(staging.iterdir()) if entry.is_file()}
    record = {"sha256": sha256, "source": source, "conversion": CONVERSION_VERSION, "transformers": __version__, "files": files}
    (staging / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _publish(staging: Path, sha256: str) -> Path:
    """Rename a finished folder to its place. Another process may have been faster: its folder is as good."""
    final = conversion_path(sha256)
    if final.exists() and cached_conversion(sha256) is None:
        shutil.rmtree(final)
    try:
        staging.rename(final)
    except OSError:
        if cached_conversion(sha256) is None:
            raise
    return final
