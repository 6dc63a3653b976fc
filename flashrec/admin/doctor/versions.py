"""Python, torch, NCCL and their kin, from the metadata of what is installed: nothing of it is imported.

It is the Python that runs flashrec, and so its agents, that is looked at; a training script may use another one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from importlib import metadata

from flashrec.admin.doctor.facts import show_version
from flashrec.admin.doctor.finding import Finding, fail, ok, warn

Installed = Callable[[str], str | None]

# First and last release that breaks, and how. nccl: README of nvidia-resiliency-ext ("NCCL 2.28.3 to 2.28.8 segfault
# when communicators are made again in the same process"); not reproduced by us, there was no GPU.
KNOWN_BROKEN: Mapping[str, tuple[tuple[tuple[int, ...], tuple[int, ...], str], ...]] = {
    "nccl": (((2, 28, 3), (2, 28, 8), "segfaults when a process makes its communicators again, as a recovery does"),),
}
NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")


def installed(package: str) -> str | None:
    """Version of an installed Python package; None if it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def supported_torch() -> str:
    """The range of torch that flashrec was made for, as in its own metadata: '>=2.13,<2.14'."""
    for requirement in metadata.requires("flashrec") or ():
        found = re.match(r"torch\b\s*\(?([^;)]*)", requirement)
        if found:
            return found[1].strip()
    raise LookupError("flashrec's metadata name no torch")


def numbers(version: str) -> tuple[int, ...]:
    """'2.13.0+cpu' as (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[+a-z]", version, maxsplit=1)[0]))


def is_within(version: str, wanted: str) -> bool:
    """wanted: '>=2.13,<2.14', the two forms that our metadata use. Raises ValueError for others."""
    for part in wanted.split(","):
        found = re.fullmatch(r"\s*(>=|<)\s*([\d.]+)\s*", part)
        if not found:
            raise ValueError(f"cannot read {part!r}")
        bound = numbers(found[2])
        if (numbers(version)[: len(bound)] < bound) is (found[1] == ">="):
            return False
    return True


def check_versions(slurm: tuple[int, int, int] | None, look: Installed = installed) -> list[Finding]:
    """slurm: the controller's version, if it is known."""
    return [python(), torch(look), nccl(look), mpi4py(look), pyslurm(slurm, look)]


def python() -> Finding:
    text = ".".join(map(str, sys.version_info[:3]))
    return ok("python.version", f"{text} ({sys.executable})")


def torch(look: Installed) -> Finding:
    name, wanted = "torch.version", supported_torch().replace(" ", "")
    wanted = ",".join(sorted(wanted.split(","), reverse=True))
    found = look("torch")
    if found is None:
        return warn(
            name,
            f"no torch beside this flashrec ({sys.executable}); ranks need one ({wanted}) in the Python they run",
            "pip install 'flashrec[torch]'",
        )
    if not is_within(found, wanted):
        return fail(
            name,
            f"torch {found} is not supported by this flashrec: ranks refuse to start",
            f"pip install 'torch{wanted}', or the flashrec release for your torch",
        )
    return ok(name, found)


def nccl(look: Installed) -> Finding:
    name = "nccl.version"
    found = next((version for package in NCCL_PACKAGES if (version := look(package))), None)
    if found is None:
        return ok(name, "no NCCL in this Python: gloo on CPU is what runs here")
    for first, last, how in KNOWN_BROKEN["nccl"]:
        if first <= numbers(found) <= last:
            return fail(name, f"NCCL {found} {how}", "install another release of NCCL (2.28.9 or later)")
    return ok(name, found)


def mpi4py(look: Installed) -> Finding:
    found = look("mpi4py")
    return ok("mpi4py.version", found or "not installed; nothing needs it")


def pyslurm(slurm: tuple[int, int, int] | None, look: Installed) -> Finding:
    name, found = "pyslurm.version", look("pyslurm")
    if found is None:
        return ok(name, "not installed; Slurm's own commands are used")
    if slurm is not None and numbers(found)[:2] != slurm[:2]:
        return warn(
            name,
            f"pyslurm {found} was made for another Slurm than {show_version(slurm)}",
            "install the pyslurm of the same release, or none: Slurm's own commands do as well",
        )
    return ok(name, found)
