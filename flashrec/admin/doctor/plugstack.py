"""plugstack.conf: which lines load our plugin, and with which arguments. Follows `include`, as Slurm does."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path

import msgspec

OURS = "flashrecovery.so"
_MAX_DEPTH = 8


class PluginLine(msgspec.Struct, frozen=True):
    """One line of the stack. path: as written; a bare name is looked up in PluginDir."""

    source: Path
    is_required: bool
    path: str
    arguments: tuple[str, ...]

    def argument(self, key: str) -> str | None:
        """The value of `key=value`; None if it is not there."""
        found = [text.partition("=")[2] for text in self.arguments if text.partition("=")[0] == key]
        return found[-1] if found else None


def read_stack(path: Path, depth: int = 0) -> list[PluginLine]:
    """Every plugin line, in the order Slurm loads them. Raises OSError for the file itself and for what it includes."""
    found: list[PluginLine] = []
    for words in _lines(path):
        if words[0] == "include" and depth < _MAX_DEPTH:
            for pattern in words[1:]:
                for name in sorted(glob.glob(str(path.parent / pattern))):
                    found += read_stack(Path(name), depth + 1)
        elif words[0] in ("optional", "required") and len(words) > 1:
            found.append(PluginLine(path, words[0] == "required", words[1], tuple(words[2:])))
    return found


def our_lines(stack: list[PluginLine]) -> list[PluginLine]:
    return [line for line in stack if Path(line.path).name == OURS]


def plugin_file(line: PluginLine, plugin_dirs: str) -> Path | None:
    """The file that Slurm loads; None if there is none. plugin_dirs: PluginDir of slurm.conf, colon separated."""
    path = Path(line.path)
    candidates = [path] if path.is_absolute() else [Path(folder) / path for folder in plugin_dirs.split(":") if folder]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _lines(path: Path) -> Iterator[list[str]]:
    for line in path.read_text(errors="replace").splitlines():
        words = line.partition("#")[0].split()
        if words:
            yield words
