"""How long the runtime waits for what. Everything it does is bounded; every limit names what it bounds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Relative times in seconds."""

    connect_timeout_s: float = 20.0  # gloo: TCP connections of one group, once the keys are there
    form_timeout_s: float = 120.0  # all groups of one generation, from the plan on
    first_form_timeout_s: float = 1800.0  # the first time: ranks may start minutes apart
    unblock_timeout_s: float = 3.0  # fence -> end of a collective that is cut; then this process gives up
    interrupt_after_s: float = 1.0  # fence -> a main thread that waits in Python, inside of the block, is interrupted
    interrupt_timeout_s: float = 15.0  # fence -> one that is still in the same system call gives up
    plan_timeout_s: float = 1800.0  # report -> plan: includes the cold start of a replacement
    resume_timeout_s: float = 1800.0  # restored -> resume: includes the state of the largest target
    transfer_timeout_s: float = 60.0  # restore connection: longest silence
    blame_after_s: float = 0.3  # communication error -> telling whom it names: by then a process's end is known
    fence_timeout_s: float = 60.0  # communication error -> fence: the detection time of the manager, and then some
