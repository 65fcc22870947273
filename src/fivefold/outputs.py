"""Files and folders that a user names for what a command makes: whether they can be written, asked before the work.

Whoever writes at the end of long work asks here at its beginning, so that the work is not done for nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from fivefold.durable import replace_file
from fivefold.errors import UserError


def check_file(file: Path | None) -> None:
    """Raise UserError unless `file` can be written; None is none that was asked for."""
    if file is None:
        return
    target = file.resolve()
    if target.is_dir():
        raise UserError(f"cannot write {file}: it is a folder; name a file")
    if _is_pipe(file):
        if not os.access(file, os.W_OK):
            raise UserError(f"cannot write {file}: writing into it is not allowed; name another file")
        return
    if not target.parent.is_dir():
        where = target.parent if file.is_symlink() else file.parent
        raise UserError(f"cannot write {file}: there is no folder {where}; make it, or name another file")
    _check_folder_takes_files(target.parent, file)


def check_folder(folder: Path) -> None:
    """Raise UserError unless `folder` can be made, or put in the place of what is there."""
    above = folder.resolve().parent
    while not above.exists():
        above = above.parent
    if not above.is_dir():
        raise UserError(f"cannot write {folder}: {above} is a file; name another folder")
    _check_folder_takes_files(above, folder)


def write_file(file: Path, text: str) -> None:
    """Write `file` in place of what is there; what is no file, such as a pipe, is written into.

    Raises UserError if it cannot be written.
    """
    try:
        if _is_pipe(file):
            file.write_text(text, encoding="utf-8")
        else:
            replace_file(file.resolve(), text)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror or error}") from error


def _is_pipe(file: Path) -> bool:
    """Whether it is there and neither file nor folder: a pipe, a terminal, /dev/null."""
    return file.exists() and not file.is_file() and not file.is_dir()


def _check_folder_takes_files(folder: Path, named: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {named}: {folder} takes no new files; make it writable, or name another place")
