"""Which Xids (error numbers of NVIDIA's driver) mean that a GPU cannot be trusted any more.

After NVIDIA's public documents "Xid Errors" (the catalog, with a remedy for each number) and "GPU Memory Error
Management": fatal is what asks for a reset of the GPU, a reboot or a repair. Everything else is the program's own doing
or is dealt with by the driver, and ends at most the process that it hit, which is seen anyway.
"""

from __future__ import annotations

FATAL = {
    46: "the GPU stopped processing",
    48: "an uncorrectable memory error",
    61: "its microcontroller stopped",
    62: "its microcontroller halted",
    64: "a memory row could not be remapped",
    74: "an NVLink error",
    79: "it has fallen off the bus",
    95: "an uncontained memory error",
    110: "a security fault",
    119: "its GSP does not answer",
    120: "its GSP failed",
    136: "a link could not be trained",
    140: "an unrecovered memory error",
    143: "it could not be initialized",
}


def describe(xid: int) -> str:
    """What a fatal Xid says, in words; '' if it is not fatal."""
    return FATAL.get(xid, "")
