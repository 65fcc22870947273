"""Names of sources short enough for a table, and still different from each other.

Sources of one repository differ near their end, where a section is named; what all of them have in common behind the
repository's own name is left out. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import takewhile

WIDTH = 72
"""Characters of a name at most, unless two would then look alike."""
CUT = " ..."


def short_names(sources: Iterable[str]) -> dict[str, str]:
    """A short name for each source, no two alike: what is too long loses what its siblings share, and then its end."""
    names = list(dict.fromkeys(sources))
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(name.partition(" ")[0], []).append(name)
    short = {name: _short(name, first, family) for first, family in families.items() for name in family}
    seen = Counter(short.values())
    return {name: short[name] if seen[short[name]] == 1 else name for name in names}


def _short(name: str, first: str, family: list[str]) -> str:
    """`name`, which begins with the word `first` as all of its family does, in WIDTH characters."""
    if len(name) <= WIDTH:
        return name
    shared = _shared_words(family)
    found = name if shared < 2 else " ".join([f"{first}{CUT}", *name.split(" ")[shared:]])
    return found if len(found) <= WIDTH else found[: WIDTH - len(CUT)].rstrip() + CUT


def _shared_words(family: list[str]) -> int:
    """Words that all of several names begin with; one that a name ends with is not counted."""
    if len(family) == 1:
        return 0
    words = [name.split(" ") for name in family]
    columns = zip(*(each[:-1] for each in words), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
