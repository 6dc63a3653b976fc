"""python terminal.py MARK COMMAND…: run a command on a terminal of its own, press Ctrl-C once MARK has been printed,
print everything and, in the last line, the exit code. As a program, so that it can run inside a dev cluster."""

from __future__ import annotations

import os
import pty
import sys


def main() -> None:
    mark, *argv = sys.argv[1:]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(argv[0], argv)
    printed, is_pressed = b"", False
    while True:
        try:
            printed += os.read(terminal, 4096)
        except OSError:  # the last process has let go of the terminal
            break
        if not is_pressed and mark.encode() in printed:
            os.write(terminal, b"\x03")
            is_pressed = True
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    sys.stdout.write(printed.decode(errors="replace") + f"\nexit code {code}\n")


if __name__ == "__main__":
    main()
