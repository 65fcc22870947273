"""Whether this process is a worker that a launcher started, and which one. Imports no torch.

torchrun and our own launcher set RANK and WORLD_SIZE; srun sets SLURM_PROCID in each task of a step. A batch script
has SLURM_PROCID too but runs outside any numbered step, so it is no worker.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from typing import Literal

from fivefold.errors import UserError

Launcher = Literal["auto", "local", "env", "slurm"]
TASKS_OF_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
"""Where Slurm says how many tasks each node has, as in `8(x16)`, or `8(x16),4`."""
ONE_WISH_S = 2.0
"""Signals this close together are one wish to stop: whoever ends a whole job or container (Slurm, systemd) signals each
process in it, and a launcher passes its own signal on to workers that had it already."""


def is_worker(launcher: Launcher, environ: MutableMapping[str, str] = os.environ) -> bool:
    """Whether to join a group instead of starting one. A worker of Slurm gets RANK and the like set in `environ`.

    Raises UserError if `launcher` asks for variables that are not there.
    """
    if launcher == "local":
        return False
    if launcher == "env" or (launcher == "auto" and "RANK" in environ and "WORLD_SIZE" in environ):
        _require(environ, ("RANK", "WORLD_SIZE"), "--launcher env", "torchrun")
        return True
    if launcher == "slurm" or (launcher == "auto" and in_slurm_step(environ)):
        tasks = "SLURM_NTASKS" if "SLURM_NTASKS" in environ else "SLURM_STEP_NUM_TASKS"
        _require(environ, ("SLURM_PROCID", tasks, "SLURM_LOCALID"), "--launcher slurm", "srun")
        _translate_slurm(environ)
        return True
    return False


def in_slurm_step(environ: MutableMapping[str, str]) -> bool:
    """Whether srun started this process: a batch script's step has no number or is named batch (0xfffffffb)."""
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID", "")
    return "SLURM_PROCID" in environ and step.isdigit() and int(step) < 0xFFFFFF00


def _translate_slurm(environ: MutableMapping[str, str]) -> None:
    """What torch.distributed reads, from what Slurm sets; the first node of the step hosts the meeting point."""
    environ["RANK"] = environ["SLURM_PROCID"]
    environ["WORLD_SIZE"] = environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"]
    environ["LOCAL_RANK"] = environ["SLURM_LOCALID"]
    tasks = next((environ[name] for name in TASKS_OF_NODE if environ.get(name)), "")
    if on_each := re.fullmatch(r"(\d+)(\(x\d+\))?", tasks):  # else nodes have different numbers
        environ.setdefault("LOCAL_WORLD_SIZE", on_each[1])
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    environ.setdefault("MASTER_ADDR", first_host(nodes) or "127.0.0.1")
    job = int(environ.get("SLURM_JOB_ID", "0"))
    environ.setdefault("MASTER_PORT", str(20000 + job % 20000))


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list such as `node[003-008,11],login1`: node003."""
    head, bracket, rest = nodes.partition("[")
    if "," in head or not bracket:
        return head.split(",")[0]
    inside, _, tail = rest.partition("]")
    number = inside.split(",")[0].split("-")[0]
    return f"{head}{number}{first_host(tail) if tail and not tail.startswith(',') else ''}"


def _require(environ: MutableMapping[str, str], names: tuple[str, ...], flag: str, tool: str) -> None:
    missing = [name for name in names if name not in environ]
    if missing:
        raise UserError(f"{flag}: {', '.join(missing)} not set; start with {tool}, or let --launcher be auto")
