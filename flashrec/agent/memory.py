"""Is there memory to spare on this node? Asked by a task that is to be parked: training comes first."""

from __future__ import annotations

from pathlib import Path

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def objection(wanted_mb: float, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> str:
    """Why nothing is to be parked here; '' if there are `wanted_mb` megabytes to spare, or if that cannot be seen."""
    spare = [found for found in (_of_node(proc), *_of_cgroups(proc, cgroups)) if found is not None]
    left_mb = min(spare, default=float("inf")) / 1e6
    return "" if left_mb >= wanted_mb else f"{left_mb:.0f} MB of memory are left, hot.memory_mb asks for {wanted_mb:g}"


def _of_node(proc: Path) -> float | None:
    try:
        fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        return float(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return None


def _of_cgroups(proc: Path, cgroups: Path) -> list[float]:
    """What the limits of our cgroup (version 2) and those above it leave; cached files do not count as used."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    found = []
    for folder in [place for place in (own, *map(str, Path(own).parents)) if place != "/"]:
        group = cgroups / folder.lstrip("/")
        try:
            limit = float((group / "memory.max").read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = float((group / "memory.current").read_text()) - float(stat.get("inactive_file", 0))
        except (OSError, ValueError):
            continue  # 'max', or a cgroup without this controller
        found.append(limit - used)
    return found
