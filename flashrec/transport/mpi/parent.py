"""A child's side of the pipes to its supervisor. The child ends with its parent, also while it hangs in libmpi.

stdin and stdout belong to us alone: what libraries print goes to stderr, whose end the supervisor reports.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Sequence
from typing import Any, NoReturn

from flashrec.transport.mpi.words import ToChild, Word, pack, to_child
from flashrec.transport.readable import await_readable
from flashrec.wire.frames import FrameReader

_PR_SET_PDEATHSIG = 1
_READ_BYTES = 64 * 1024


class Parent:
    """Who started us. `hear` gives its words, `say` answers; when it is gone the process ends, without a word."""

    def __init__(self) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # had it ended before: end of file
        self._in, self._out = os.dup(0), os.dup(1)
        for fd in (self._in, self._out):
            os.set_inheritable(fd, False)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        self._frames = FrameReader()

    def say(self, word: Word) -> None:
        data = pack(word)
        try:
            while data:
                data = data[os.write(self._out, data) :]
        except OSError:
            self.end()

    def hear(self, timeout_s: float | None, others: Sequence[Any] = ()) -> list[ToChild]:
        """Words that have come, after at most `timeout_s` (None: however long it takes). Returns early, with nothing,
        when one of `others` is readable."""
        ready = await_readable([self._in, *others], timeout_s)
        if self._in not in ready:
            return []
        data = os.read(self._in, _READ_BYTES)
        if not data:
            self.end()
        return [to_child.decode(payload) for payload in self._frames.feed(data)]

    def begin(self) -> Any:
        """The settings, which come first."""
        while not (words := self.hear(None)):
            pass
        return words[0]

    def end(self) -> NoReturn:
        """At once: MPI_Finalize would talk to peers that may not be there."""
        os._exit(0)
