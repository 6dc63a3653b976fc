"""What may go into a command line of ours: one name where one name is meant, one line where text is meant.

scontrol takes 'ALL', lists and ranges where a node is named, so a name that is more than a name would act on more than
was meant. Raises ValueError, which is a mistake of the caller. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,254}")
_FEATURES = re.compile(r"[A-Za-z0-9_.:=*&|()\[\],-]{1,1000}")
_TIME = re.compile(r"[A-Za-z0-9:+.-]{1,64}")


def node_name(text: str) -> str:
    """The name of one node."""
    if not _NODE.fullmatch(text) or text.upper() == "ALL":
        raise ValueError(f"not the name of one node: {text!r}")
    return text


def name(text: str) -> str:
    """The name of a user, account, partition, reservation or flag."""
    if not _NAME.fullmatch(text):
        raise ValueError(f"not a name: {text!r}")
    return text


def names(texts: Iterable[str]) -> str:
    """Names as a list of Slurm's; at least one."""
    joined = ",".join(name(text) for text in texts)
    if not joined:
        raise ValueError("no names")
    return joined


def users(texts: Iterable[str]) -> str:
    """Users of a reservation; '-name' means everybody but name, if all are written so."""
    asked = tuple(texts)
    bare = names(text.removeprefix("-") for text in asked)
    return ",".join(f"-{user}" for user in bare.split(",")) if all(t.startswith("-") for t in asked) else names(asked)


def features(text: str) -> str:
    """A constraint, as 'flashspare&rack1'."""
    if not _FEATURES.fullmatch(text):
        raise ValueError(f"not a constraint: {text!r}")
    return text


def time(text: str) -> str:
    """A time or duration as scontrol takes it."""
    if not _TIME.fullmatch(text):
        raise ValueError(f"not a time: {text!r}")
    return text


def one_line(text: str) -> str:
    """Free text in which control characters are blanks."""
    return "".join(char if char.isprintable() else " " for char in text)
