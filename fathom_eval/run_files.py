"""Files of a run directory: whole or not at all, one writer at a time, and failures of the file system as errors that name the file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, NoReturn

from fathom_eval.errors import UserError

LOCK = ".lock"
TEMPORARY = ".tmp"


def check_free_space(path: Path, need_bytes: int) -> None:
    """Raise UserError unless the disk that holds (or would hold) ``path`` has ``need_bytes`` bytes free."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < need_bytes:
        raise UserError(
            f"not enough disk space for {path}: about {readable_size(need_bytes)} are needed and {readable_size(free)} are free"
        )


def check_can_be_made(path: Path) -> None:
    """Raise UserError where ``path`` is no folder that can be written, nor could be made one. It leaves nothing behind."""
    with file_errors(path):
        existing = path.absolute()
        while not existing.exists():
            if existing.is_symlink():
                raise UserError(f"cannot write {path}: {existing} is a link that leads nowhere")
            existing = existing.parent
        if existing == path.absolute():
            if existing.is_dir() and not os.access(existing, os.W_OK | os.X_OK):
                raise UserError(f"cannot write {path}: {os.strerror(errno.EACCES)}")
        elif not existing.is_dir():
            raise UserError(f"cannot write {path}: {existing} is a file, not a folder")
        else:  # some file systems refuse what their permissions allow
            Path(tempfile.mkdtemp(prefix=".fathom-eval-", dir=existing)).rmdir()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new one, never a part, and flush it to the disk."""
    temporary = path.with_name(path.name + TEMPORARY)
    with temporary.open("wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def acquire_lock(path: Path) -> IO[str]:
    lock = (path / LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        holder = lock.read(500).partition("\n")[0]
        lock.close()
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise UserError(f"{path} is in use by {holder or 'another process'}: wait for it to end, or give another folder") from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()} since {datetime.now(UTC).isoformat(timespec='seconds')}\n")
    lock.flush()
    return lock


def write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def file_errors(path: Path, action: str = "write") -> Iterator[None]:
    """Turn an OSError into a UserError that says what to do."""
    try:
        yield
    except OSError as error:
        raise_file_error(path, action, error)


def raise_file_error(path: Path, action: str, error: OSError) -> NoReturn:
    """Raise the UserError for an OSError met while ``action`` ("read" or "write") was tried on ``path``."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise UserError(f"no disk space left for {path}: free some and run the same command again; finished work is kept") from error
    raise UserError(f"cannot {action} {path}: {error.strerror or error}") from error


def readable_size(count: int) -> str:
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
