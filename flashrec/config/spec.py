"""SPEC of `--flashrecovery[=SPEC]`, as `srun`, `sbatch` and `salloc` take it. Pure; the plugin checks the same grammar.

The grammar and what each key means: docs/reference/plugin-contract.md. Both sides read the same cases in their tests.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from flashrec.config.load import ConfigError

GRAMMAR = (
    '"off", or a comma-separated list (each key once, no spaces) of spares=COUNT, tier=hot|warm|pool, pool=NAME, '
    "max-swaps=COUNT, config=FILE; for example spares=2,pool=flashspare"
)
MAX_BYTES = 1024
PLUGIN_CONTRACT = "1"  # the version that we speak; the plugin says its own in FLASHREC_PLUGIN
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_COUNT = re.compile(r"[0-9]{1,6}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,63}")


class SpecError(ConfigError):
    """SPEC is not of the grammar; the message shows it."""


class Spec(msgspec.Struct, frozen=True):
    """What SPEC says; None: it says nothing about that key. is_off: this srun is an ordinary one."""

    is_off: bool = False
    spares: int | None = None
    tier: Literal["hot", "warm", "pool"] | None = None
    pool: str | None = None
    max_swaps: int | None = None
    config: str | None = None

    def __str__(self) -> str:
        """The canonical form: the keys in the grammar's order, counts without leading zeros."""
        if self.is_off:
            return "off"
        said = {
            "spares": self.spares, "tier": self.tier, "pool": self.pool, "max-swaps": self.max_swaps,
            "config": self.config,
        }  # fmt: skip
        return ",".join(f"{key}={value}" for key, value in said.items() if value is not None)

    def settings(self) -> dict[str, Any]:
        """The same as dotted keys of the configuration, to be laid over its file."""
        tier = self.tier or ("pool" if self.pool else None)
        said = {
            "spares": self.spares, "pool.tier": "warm" if tier == "hot" else tier, "pool.name": self.pool,
            "pool.max_swaps": self.max_swaps, "hot.park": {"hot": "imports", "warm": "none"}.get(self.tier or ""),
        }  # fmt: skip
        return {key: value for key, value in said.items() if value is not None}


def parse_spec(text: str) -> Spec:
    """Take SPEC apart; '' means the defaults. Raises SpecError, which shows the grammar."""
    if text == "off":
        return Spec(is_off=True)
    if len(os.fsencode(text)) > MAX_BYTES:
        raise SpecError(f"--flashrecovery: longer than {MAX_BYTES} bytes.\n  Expected: {GRAMMAR}")
    said: dict[str, Any] = {}
    for item in text.split(",") if text else ():
        key, equals, value = item.partition("=")
        if not equals or key not in _READ:
            raise _error(text, f"{item!r} is not of the form KEY=VALUE with a known key")
        field, read = key.replace("-", "_"), _READ[key]
        if field in said:
            raise _error(text, f"{key} is given twice")
        said[field] = read(value)
        if said[field] is None:
            raise _error(text, f"{key}={value!r} is not {_WANTED[key]}")
    return Spec(**said)


def _error(text: str, reason: str) -> SpecError:
    return SpecError(f"--flashrecovery={_CONTROL.sub('?', text)}: {reason}.\n  Expected: {GRAMMAR}")


def _count(value: str) -> int | None:
    return int(value) if _COUNT.fullmatch(value) else None


def _name(value: str) -> str | None:
    return value if _NAME.fullmatch(value) else None


def _tier(value: str) -> str | None:
    return value if value in ("hot", "warm", "pool") else None


def _file(value: str) -> str | None:
    return value if value and not _CONTROL.search(value) else None


_READ: dict[str, Callable[[str], int | str | None]] = {
    "spares": _count, "tier": _tier, "pool": _name, "max-swaps": _count, "config": _file,
}  # fmt: skip
_WANTED = {
    "spares": "a count of at most 6 digits",
    "tier": "hot, warm or pool",
    "pool": "a name of at most 63 letters, digits, - _ .",
    "max-swaps": "a count of at most 6 digits",
    "config": "the path of a file",
}
