"""The shape of the house: who may import whom, what loads no torch, and what no file may say."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "fivefold"

FLOORS = (
    {"cli", "__init__", "__main__"},
    {"launch", "plan", "train"},
    {"resilience", "checkpoint", "observe", "data", "optim"},
    {"pipeline", "model"},
    {"parallel", "precision", "kernels"},
    {"hardware", "config"},
    {"plugins", "_torch"},
    {"errors", "durable", "near", "pages", "outputs"},
)
"""Top to bottom: a room imports from lower floors, and sideways without circles."""

PURE = (
    "fivefold",
    "fivefold.cli",
    "fivefold.config.files",
    "fivefold.config.huggingface",
    "fivefold.config.reference",
    "fivefold.config.rules",
    "fivefold.config.template",
    "fivefold.data.build",
    "fivefold.data.order",
    "fivefold.errors",
    "fivefold.hardware.catalogue",
    "fivefold.hardware.node",
    "fivefold.model.reach",
    "fivefold.model.spec",
    "fivefold.observe.report",
    "fivefold.parallel.grid",
    "fivefold.plan.cluster",
    "fivefold.plan.time.network",
    "fivefold.plan.budget",
    "fivefold.plan.cost",
    "fivefold.plan.goodput.events",
    "fivefold.plan.overview",
    "fivefold.plan.page.document",
    "fivefold.plan.pipeline",
    "fivefold.plan.planned",
    "fivefold.plan.ranks",
    "fivefold.plan.schedule",
    "fivefold.plan.storage",
    "fivefold.plugins",
    "fivefold.train.options",
    "fivefold.train.start",
)
"""Modules that must load without torch; so must all of `pipeline` but what executes."""
EXECUTING = {"fivefold.pipeline.clock", "fivefold.pipeline.execute"}


def source_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def module_of(file: Path) -> str:
    parts = ("fivefold", *file.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts)


def room_of(module: str) -> str:
    """The room that a module lies in: `fivefold.data.order` in `data`; a module at the top is its own."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(tree: ast.AST, module: str) -> Iterator[tuple[str, int]]:
    """(module, line) of each import in the file, wherever it stands; relative ones are resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base, node.lineno
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def imported_rooms(tree: ast.AST, module: str) -> dict[str, int]:
    """The rooms of ours that a file imports, with the line."""
    rooms = {}
    for name, line in imports(tree, module):
        known = name.split(".")
        if known[0] == "fivefold" and len(known) > 1 and any(known[1] in floor for floor in FLOORS):
            rooms[known[1]] = line
    return rooms


def floor_of(room: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def climbs(tree: ast.AST, module: str) -> list[str]:
    """The imports of a file that go up."""
    room = room_of(module)
    return [
        f"{module} line {line}: `{room}` imports `{other}`, which lies above it"
        for other, line in imported_rooms(tree, module).items()
        if floor_of(other) < floor_of(room)
    ]


def parsed() -> list[tuple[str, ast.Module]]:
    return [(module_of(file), ast.parse(file.read_text(encoding="utf-8"))) for file in source_files()]


def test_every_file_lies_in_a_room_of_the_house() -> None:
    rooms = set().union(*FLOORS)
    assert [module for module, _ in parsed() if room_of(module) not in rooms] == []


def test_no_room_imports_from_a_floor_above() -> None:
    assert [climb for module, tree in parsed() for climb in climbs(tree, module)] == []


@pytest.mark.parametrize(
    "line",
    [
        "from fivefold.train.loop import train",
        "import fivefold.train",
        "from fivefold import train",
        "from .. import train",
        "from ..train import loop",
        "def later():\n    from fivefold.train import loop",
    ],
)
def test_an_import_from_above_is_seen_however_it_is_written(line: str) -> None:
    assert len(climbs(ast.parse(line), "fivefold.model.spec")) == 1


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Paths that lead from a room back to itself."""
    found = []

    def walk(path: list[str]) -> None:
        for other in sorted(edges.get(path[-1], ())):
            if other == path[0]:
                found.append(path)
            elif other not in path:
                walk([*path, other])

    for room in edges:
        walk([room])
    return found


def test_rooms_of_one_floor_import_each_other_without_circles() -> None:
    sideways: dict[str, set[str]] = {}
    for module, tree in parsed():
        room = room_of(module)
        level = {other for other in imported_rooms(tree, module) if floor_of(other) == floor_of(room)} - {room}
        sideways.setdefault(room, set()).update(level - FLOORS[0])
    assert circles(sideways) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != []


def test_the_pure_half_loads_no_torch() -> None:
    pipeline = {module for module, _ in parsed() if room_of(module) == "pipeline"}
    assert pipeline >= EXECUTING
    pure = [*PURE, *sorted(pipeline - EXECUTING)]
    code = f"import importlib, sys; [importlib.import_module(m) for m in {pure}]; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_help_loads_neither_pydantic_nor_numpy() -> None:
    code = "import sys, fivefold.cli; print({'pydantic', 'numpy', 'ruamel'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def torch_aliases(tree: ast.AST) -> dict[str, str]:
    """What each name of the file that stands for torch, or for something inside it, stands for."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    aliases[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            aliases.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return aliases


def dotted(node: ast.AST) -> str | None:
    """`a.b.c` of an attribute of a name; None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)) is not None:
        return f"{before}.{node.attr}"
    return None


def private_torch_names(tree: ast.AST) -> set[str]:
    """The names with an underscore that a file takes from torch."""
    aliases = torch_aliases(tree)
    used = {name for name, _ in imports(tree, "fivefold.x") if name.split(".")[0] == "torch"}
    for node in ast.walk(tree):
        name = dotted(node) if isinstance(node, ast.Attribute) else None
        first, _, rest = (name or "").partition(".")
        if first in aliases:
            used.add(f"{aliases[first]}.{rest}")
    return {name for name in used if any(is_private(part) for part in name.split("."))}


def test_private_names_of_torch_are_used_in_one_file_only() -> None:
    found = {module: names for module, tree in parsed() if (names := private_torch_names(tree))}
    assert {module: names for module, names in found.items() if module != "fivefold._torch"} == {}


@pytest.mark.parametrize(
    "text",
    [
        "from torch._C import x",
        "import torch._dynamo",
        "from torch.distributed import _functional",
        "import torch\ntorch._foreach_mul_(a, b)",
        "import torch.distributed as dist\ndist._get_default_group()",
        "from torch import distributed as dist\ndist.a._b",
    ],
)
def test_a_private_name_of_torch_is_seen_however_it_is_reached(text: str) -> None:
    assert private_torch_names(ast.parse(text))


def test_public_names_of_torch_are_not_taken_for_private_ones() -> None:
    assert private_torch_names(ast.parse("import torch\ntorch.mul_(a, b)\ntorch.__version__\nself._torch.x")) == set()


def test_no_source_file_puts_work_off() -> None:
    words = ("TO" + "DO", "FIX" + "ME")
    files = [*source_files(), *Path(__file__).parent.rglob("*.py")]
    found = [f"{file}: {word}" for file in files for word in words if word in file.read_text(encoding="utf-8")]
    assert found == []


@pytest.mark.parametrize("file", source_files(), ids=module_of)
def test_every_file_opens_with_what_it_is_for(file: Path) -> None:
    assert ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))), f"{file} has no opening sentences"
