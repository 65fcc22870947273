"""The scripts that a newcomer runs first: valid sh, and one clear message where the machine lacks something."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
SCRIPTS = ["scripts/quickstart", "scripts/test", "scripts/environment.sh", ".ci/run"]


def bare_clone(folder: Path) -> Path:
    """What the scripts need of a checkout in which nothing is installed."""
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


def a_python(folder: Path, version: str, status: dict[str, int]) -> Path:
    """A stand-in for a Python interpreter; a `-c` program that holds a word of `status` exits with its number."""
    cases = "\n".join(f"  *{word}*) exit {number};;" for word, number in status.items())
    file = folder / "a-python"
    file.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "Python {version}"\ncase "$2" in\n{cases}\nesac\n')
    file.chmod(0o755)
    return file


def run(script: str, folder: Path, python: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(python)}
    return subprocess.run(
        [folder / script], cwd="/", env=environment, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_valid_sh(script: str) -> None:
    subprocess.run(["sh", "-n", ROOT / script], check=True)


@pytest.mark.parametrize("script", ["scripts/quickstart", "scripts/test"])
def test_a_python_that_is_too_old_is_named_with_what_to_do(tmp_path: Path, script: str) -> None:
    old = a_python(tmp_path, "3.9.2", {"version_info": 1})
    done = run(script, bare_clone(tmp_path / "clone"), old)
    assert done.returncode == 2
    assert "needs Python 3.11 or newer; found: Python 3.9.2" in done.stderr
    assert "apt install python3 python3-venv" in done.stderr


@pytest.mark.parametrize("script", ["scripts/quickstart", "scripts/test"])
def test_a_missing_python_is_said(tmp_path: Path, script: str) -> None:
    done = run(script, bare_clone(tmp_path / "clone"), tmp_path / "nowhere")
    assert done.returncode == 2
    assert "needs Python 3.11 or newer; found: none" in done.stderr


@pytest.mark.parametrize("script", ["scripts/quickstart", "scripts/test"])
def test_a_python_without_venv_is_named_with_what_to_install(tmp_path: Path, script: str) -> None:
    debian = a_python(tmp_path, "3.11.2", {"ensurepip": 1})
    done = run(script, bare_clone(tmp_path / "clone"), debian)
    assert done.returncode == 2
    assert "Python 3.11.2" in done.stderr
    assert "has no venv module" in done.stderr
    assert "apt install python3-venv" in done.stderr
    assert not (tmp_path / "clone" / ".venv").exists()


def test_every_direct_dependency_is_pinned_to_a_version_that_the_project_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for group in project["optional-dependencies"].values() for line in group]
    needed = {r.name: r for r in map(Requirement, project["dependencies"] + extras) if r.name != project["name"]}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pins = {r.name: next(iter(r.specifier)).version for r in map(Requirement, lines)}
    assert needed.keys() <= pins.keys()
    assert [name for name, requirement in needed.items() if not requirement.specifier.contains(pins[name])] == []
