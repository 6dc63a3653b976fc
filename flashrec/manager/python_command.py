"""Is the user's command an interpreter of Python and a script? Only such a one can be parked. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_PLAIN_FLAGS = re.compile(r"-[bBdEIOPRsSuvq]+")  # not -c, -i, -h, -V, -x: no script, or not only that
_VALUE_FLAGS = ("-X", "-W")


def num_python_words(command: Sequence[str]) -> int | None:
    """How many words belong to the interpreter: its name and flags. None: this is no `python [flags] script.py …` and
    no `python [flags] -m module …`."""
    if not command or not _PYTHON.fullmatch(PurePath(command[0]).name):
        return None
    at = 1
    while at < len(command) and command[at].startswith("-"):
        word = command[at]
        if word == "-m":
            return at if at + 1 < len(command) else None
        if word in _VALUE_FLAGS:
            at += 2
        elif word.startswith(_VALUE_FLAGS) or _PLAIN_FLAGS.fullmatch(word):
            at += 1
        else:
            return None
    return at if at < len(command) else None
