"""The accelerator of this machine, asked of the driver's own command, for planning where torch is not loaded."""

from __future__ import annotations

import shutil
import subprocess

from fivefold.hardware.accelerator import Accelerator
from fivefold.hardware.catalogue import by_driver_name

SECONDS = 5
"""That the driver may take to answer."""


def local_accelerator() -> Accelerator | None:
    """The first accelerator that `nvidia-smi` lists; None if it lists none, or one that the catalogue lacks."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    lines = answer.splitlines()
    return by_driver_name(lines[0]) if lines else None
