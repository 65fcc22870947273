"""Why a save failed, in one line a person can act on: which rank, which file, how much room there is."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def reason_for(failure: BaseException, folder: Path) -> str:
    """One clause for each rank that failed, at most three of them, and what to do where that is known."""
    if not isinstance(failure, CheckpointException):
        return _describe(failure)
    causes = {rank: cause for rank, (cause, _) in sorted(failure.failures.items())}
    listed = [f"rank {rank}: {_describe(cause)}" for rank, cause in causes.items()]
    more = [f"{len(listed) - 3} more ranks"] if len(listed) > 3 else []
    advice = [_room(folder)] if any(_is_no_room(cause) for cause in causes.values()) else []
    return "; ".join(listed[:3] + more + advice)


def _describe(cause: BaseException) -> str:
    if isinstance(cause, OSError) and cause.strerror:
        return f"{cause.strerror}: {cause.filename}" if cause.filename else cause.strerror
    return f"{type(cause).__name__}: {cause}"


def _is_no_room(cause: BaseException) -> bool:
    return isinstance(cause, OSError) and cause.errno in _NO_ROOM


def _room(folder: Path) -> str:
    usage = shutil.disk_usage(folder)
    return (
        f"{usage.free / 2**30:.2f} of {usage.total / 2**30:.2f} GiB are free where {folder} lies: "
        "make room or lower checkpoint.keep"
    )
