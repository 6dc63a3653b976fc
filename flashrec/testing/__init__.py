"""Faults for your own training script, from outside: no hook in the script, none in the product.

A *plan* says which rank is hit at which place of which step, and how::

    faults = FaultDirectory(jobdir / "faults")
    plan = FaultPlan(str(faults.path), (Fault("cut", rank=0, step=7, place="in-collective", kind="request", holder=2),))
    path = faults.write_plan(plan)

    flashrec run --spares 1 -- python -m flashrec.testing.inject PLAN.json -- train.py --steps 50

The injector runs the script unchanged, with hooks in torch around it. A signal is fired by the victim itself; a fault
that must come from outside (kind `request`: a power cut, a partition) blocks the victim at the place until the driver,
your test, has done it::

    armed = faults.await_armed("cut", timeout_s=60)
    ...                                                   # cut the power of armed.node
    faults.mark_fired("cut", mono=time.monotonic())
    faults.assert_all_fired(plan)                         # a fault that did not fire is a failed test

Rules: each fault fires at most once, whoever comes by again (a redone step, a replacement of the rank); each one that
fired leaves a record; everything that waits has a limit and says what it waited for.

Importing this package does not import torch. Only the process of the training script does.
"""

from flashrec.testing.directory import Armed, FaultDidNotFire, FaultDirectory, FaultTimeout, Fired
from flashrec.testing.plan import KINDS, PLACES, Fault, FaultPlan, PlanError, load_plan

__all__ = [
    "KINDS",
    "PLACES",
    "Armed",
    "Fault",
    "FaultDidNotFire",
    "FaultDirectory",
    "FaultPlan",
    "FaultTimeout",
    "Fired",
    "PlanError",
    "load_plan",
]
