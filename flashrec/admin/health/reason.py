"""The reason we write on a node that we drain, and how it is known again.

    flashrec-health: disk: /scratch is mounted read-only [4f1d0a]

It ends with a checksum of itself. An administrator who edits the reason, or adds a word to it, makes the node theirs:
the checksum no longer fits, and we leave the node alone. It protects against mistakes, not against root.
"""

from __future__ import annotations

import hashlib
import re

MAX_TEXT = 160
_SEALED = re.compile(r"(.+) \[([0-9a-f]{6})\]")
_UNSAFE = re.compile(r"[^A-Za-z0-9 .,:;/%()@_+-]+")


def write(prefix: str, text: str) -> str:
    """Plain characters only: the reason travels through command lines, tables and mails."""
    plain = " ".join(_UNSAFE.sub(" ", text).split())[:MAX_TEXT].rstrip()
    line = f"{prefix}: {plain}"
    return f"{line} [{_seal(line)}]"


def bears(prefix: str, reason: str) -> bool:
    """True if it looks like ours, edited or not: such a node counts against max_drained."""
    return reason.startswith(f"{prefix}:")


def is_ours(prefix: str, reason: str) -> bool:
    """True if we wrote it and nobody has changed it since."""
    sealed = _SEALED.fullmatch(reason)
    return bears(prefix, reason) and sealed is not None and sealed[2] == _seal(sealed[1])


def _seal(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()[:6]
