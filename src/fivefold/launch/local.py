"""Workers of one machine: started together, watched together, ended together. Imports no torch.

The parent only watches. When a worker dies the others are ended, for a group without one rank can only hang; when the
parent dies, the kernel ends the workers. SIGTERM and Ctrl-C are passed on, so that the workers save and end by
themselves; a second Ctrl-C, a moment later, ends them at once.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from fivefold.launch.environment import ONE_WISH_S
from fivefold.parallel.rendezvous import RENDEZVOUS

LOOPBACK = {"linux": "lo", "darwin": "lo0"}
GRACE_S = 2.0  # from the first death to SIGKILL
POLL_S = 0.05


def visible_gpus() -> int:
    """GPUs that workers of this machine may use."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([each for each in listed.split(",") if each.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def run_workers(arguments: Sequence[str], count: int) -> int:
    """Run `python -m fivefold ARGUMENTS` in `count` processes that form one group; the exit code of the whole.

    The code is that of the first worker that failed; 128 + the signal's number after a signal that ended the run.
    """
    with tempfile.TemporaryDirectory(prefix="fivefold-") as folder:
        meeting = Path(folder) / "rendezvous"
        command = [sys.executable, "-m", "fivefold", *arguments]
        workers: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(count):
                workers.append(_start(command, worker_environment(rank, count, meeting)))
            return _watch(workers)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def _start(command: list[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
    """A worker in a process group of its own, so that a terminal's Ctrl-C reaches the parent alone."""
    follow = _die_with_parent if sys.platform == "linux" else None
    return subprocess.Popen(command, env=environ, preexec_fn=follow, process_group=0)


def worker_environment(rank: int, count: int, meeting: Path) -> dict[str, str]:
    """What tells a process that it is rank `rank` of `count` on this machine, and where the ranks meet."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    loopback = LOOPBACK.get(sys.platform)
    return {
        "OMP_NUM_THREADS": str(max(1, cores // count)),
        **({"GLOO_SOCKET_IFNAME": loopback} if loopback else {}),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        RENDEZVOUS: str(meeting),
    }


def _die_with_parent() -> None:
    """In the child: ask Linux for a SIGKILL when the parent dies, however it dies."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _watch(workers: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all; pass signals on; end the rest when one fails."""
    received: list[int] = []
    first = math.inf

    def pass_on(number: int, _: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if received and now - first < ONE_WISH_S:
            return
        first = min(first, now)
        received.append(number)
        kind = signal.SIGTERM if len(received) == 1 else signal.SIGKILL
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(kind)

    kinds = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    before = {kind: signal.signal(kind, pass_on) for kind in kinds}
    try:
        failed = _first_failure(workers)
        if failed is not None:
            _end(workers)
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
    return _exit_code(workers, failed, received)


def _first_failure(workers: list[subprocess.Popen[bytes]]) -> int | None:
    """The rank of the first worker that ends with an error, or None when all have ended well."""
    while True:
        codes = [worker.poll() for worker in workers]
        for rank, code in enumerate(codes):
            if code:
                return rank
        if all(code == 0 for code in codes):
            return None
        time.sleep(POLL_S)


def _end(workers: list[subprocess.Popen[bytes]]) -> None:
    """Give the others a moment to end by themselves, then SIGKILL."""
    deadline = time.monotonic() + GRACE_S
    for worker in workers:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def _exit_code(workers: list[subprocess.Popen[bytes]], failed: int | None, received: list[int]) -> int:
    if failed is None:
        return 128 + received[0] if received else 0
    code = workers[failed].returncode
    if code < 0 and not received:
        name = signal.Signals(-code).name
        print(
            f"fivefold: worker {failed} of {len(workers)} was killed by {name}; the others were ended", file=sys.stderr
        )
        return 1
    return 128 + received[0] if received else code
