"""Folders that appear whole or not at all, and digests."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from dgemma_trt.config import MODEL_TYPE
from dgemma_trt.errors import UserError

OURS = (("manifest.json", '"format_version"'), ("config.json", f'"{MODEL_TYPE}"'))
"""What a folder must hold, one of them, to be replaced: a file with a word that marks an engine directory or a checkpoint."""


@contextmanager
def new_folder(out: Path, *, replace: bool, source: Path) -> Iterator[Path]:
    """A temporary sibling of `out`, renamed to it when the block ends well and removed when it does not.

    source: the folder that is being read, which `out` must neither hold nor lie in. Where `out` is a link, what it points to is
    meant.

    Raises:
        UserError: `out` exists and `replace` is false, overlaps `source`, or cannot be written.
    """
    try:
        out, source = out.resolve(), source.resolve()
        if out == source or out in source.parents or source in out.parents:
            raise UserError(f"{out}: is the checkpoint itself, holds it or lies in it; choose another folder")
        if out.exists() and not replace:
            raise UserError(f"{out}: exists already; choose another folder, or pass --force to replace it")
        if out.exists() and not out.is_dir():
            raise UserError(f"{out}: is a file; choose another folder")
        if out.exists() and any(out.iterdir()) and not _is_ours(out):
            raise UserError(f"{out}: is neither a checkpoint nor an engine directory, so it is not replaced; choose another")
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except RuntimeError:  # pathlib's word for links in a circle
        raise UserError(f"{out}: is a link that leads to itself; choose another folder") from None
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror}") from None
    try:
        # mkdtemp makes private folders; a finished one is as readable as any other.
        umask = os.umask(0)
        os.umask(umask)
        partial.chmod(0o777 & ~umask)
        yield partial
        if out.exists():
            if not replace:
                raise UserError(f"{out}: was made by somebody else meanwhile; choose another folder")
            old = partial.with_name(f"{partial.name}.old")
            out.rename(old)
            try:
                partial.rename(out)
            except OSError:
                old.rename(out)
                raise
            shutil.rmtree(old)
        else:
            partial.replace(out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out}: cannot be written: {getattr(error, 'strerror', None) or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    return any((folder / name).is_file() and mark in (folder / name).read_text(errors="replace") for name, mark in OURS)


def sha256(path: Path) -> str:
    """The hexadecimal digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
