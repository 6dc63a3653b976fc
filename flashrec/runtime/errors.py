"""What goes wrong in the runtime, by whose fault it is, and what the user can do."""

from __future__ import annotations

import re


class Superseded(RuntimeError):
    """A newer generation was announced while we waited for something of an older one. Never reaches the user."""


class StepInterrupted(BaseException):
    """Unwinds the user's block so that the step can be done again.

    A BaseException, so that `except Exception` in the user's block does not catch it; `with step` swallows it.
    """


class TrainingComplete(RuntimeError):
    """Some rank has passed the final vote: every step is done everywhere. Never reaches the user."""


class RecoveryFailed(RuntimeError):
    """Recovery cannot go on in this process; the text says why and what to do."""


class WaitedTooLong(RecoveryFailed):
    """The manager or a peer did not do its part within the limit."""


class NotUnblockable(RecoveryFailed):
    """The connections of a group were not recognised, so a failure could not be made known to this rank."""


class LayoutMismatch(RecoveryFailed):
    """Source and target do not hold the same tensors: the script does not build the same model on every rank."""


class CannotEncode(TypeError):
    """A registered state object holds a value that we do not send; the text names it."""


class UnsupportedTorch(ImportError):
    """This torch lacks something that recovery in place needs; the text names it and the supported versions."""


# What gloo, NCCL and c10d say when a peer or a connection is lost. Deliberately not any "socket" or "connection": a
# data loader that loses its file server is the script's business.
_TRANSPORT = re.compile(
    r"\bgloo\b|nccl|closed by peer|caused pair closure|timed out waiting (for|\d+ms)|DistBackendError|DistNetworkError|"
    r"ProcessGroup",
    re.IGNORECASE,
)


# "…closed by peer [10.0.0.3]:40121" (gloo), "…10.0.0.3<40121>" (NCCL); IPv4, as in the rest of what they print
_PEER = re.compile(r"(?<![\d.])((?:\d{1,3}\.){3}\d{1,3})(?:\]:\d+|<\d+>)")


def peers_named_by(error: BaseException | None) -> tuple[str, ...]:
    """Addresses of the peers that `error`, or what it was raised from, names; each once."""
    found: dict[str, None] = {}
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        found |= dict.fromkeys(_PEER.findall(str(error)))
        error = error.__cause__ or error.__context__
    return tuple(found)


def is_communication(error: BaseException | None) -> bool:
    """True when `error`, or what it was raised from, looks like a failed collective, not like a bug."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, RecoveryFailed):
            return False
        if type(error).__name__ in ("DistError", "DistBackendError", "DistNetworkError", "Superseded"):
            return True
        if isinstance(error, RuntimeError | OSError) and _TRANSPORT.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
