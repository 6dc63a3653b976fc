"""The pool of spare nodes: is the reservation there, has it usable nodes, and has `flashrec pool sync` work to do?"""

from __future__ import annotations

import time

from flashrec.admin.doctor.facts import Facts, Missing
from flashrec.admin.doctor.finding import Finding, fail, ok, unknown, warn
from flashrec.admin.doctor.plugstack import PluginLine
from flashrec.admin.pool import EVERYBODY, PoolConfig, PoolFacts, plan_sync
from flashrec.admin.pool_sync import config_of
from flashrec.slurm.scheduler import ReservationInfo

SYNC = "run: flashrec pool sync (as root; the systemd timer does it every few minutes)"


def wanted_pool(line: PluginLine | None, facts: Facts) -> PoolConfig | None:
    """The pool that somebody set up: named in plugstack.conf, or there are nodes or a reservation for one. Raises
    PoolError for arguments that `flashrec pool` would refuse."""
    config = config_of(line, PoolConfig()) if line else PoolConfig()
    if line and line.argument("pool"):
        return config
    nodes = {} if isinstance(facts.nodes, Missing) else facts.nodes
    has_nodes = any(config.feature in node.features for node in nodes.values())
    return config if has_nodes or _reservation(facts, config.name) else None


def check_pool(config: PoolConfig | None, facts: Facts) -> list[Finding]:
    name = "pool.reservation"
    if config is None:
        return [ok(name, "no pool is set up: spares are nodes of each job's own allocation")]
    if isinstance(facts.reservations, Missing):
        return [unknown(name, facts.reservations.why)]
    held = _reservation(facts, config.name)
    if held is None:
        text = f"there is no reservation {config.name}: jobs get no spare from the pool, and ordinary jobs run there"
        return [fail(name, text, SYNC)]
    return [reservation(held), nodes(held, facts), to_do(config, facts)]


def reservation(held: ReservationInfo) -> Finding:
    name = "pool.reservation"
    if not held.is_active:
        return fail(name, f"reservation {held.name} is not active", SYNC)
    users = (
        "everybody"
        if {user.lstrip("-") for user in held.users} == {user.lstrip("-") for user in EVERYBODY}
        else ", ".join(held.users or held.accounts)
    )
    return ok(name, f"{held.name}, for {users or 'nobody'}")


def nodes(held: ReservationInfo, facts: Facts) -> Finding:
    name = "pool.nodes"
    if isinstance(facts.nodes, Missing):
        return unknown(name, facts.nodes.why)
    members = [facts.nodes[member] for member in held.nodes if member in facts.nodes]
    usable = sum(node.is_usable for node in members)
    bad = ", ".join(f"{node.name} ({'+'.join(sorted(node.states))})" for node in members if not node.is_usable)
    text = f"{usable} usable of {len(held.nodes)} in {held.name}" + (f"; not usable: {bad}" if bad else "")
    if not usable:
        return fail(name, f"{text}: a job that loses a node gets none", SYNC)
    return warn(name, text, SYNC) if bad else ok(name, text)


def to_do(config: PoolConfig, facts: Facts) -> Finding:
    """What the next sync would do, worked out by the same code."""
    name = "pool.sync"
    if isinstance(facts.nodes, Missing) or isinstance(facts.reservations, Missing) or isinstance(facts.jobs, Missing):
        return unknown(name, "nodes, reservations or jobs are not known")
    actions = plan_sync(
        config, PoolFacts(nodes=facts.nodes, reservations=facts.reservations, jobs=facts.jobs), time.time()
    )
    if actions:
        return warn(name, "; ".join(action.reason for action in actions), SYNC)
    return ok(name, "nothing to do")


def _reservation(facts: Facts, name: str) -> ReservationInfo | None:
    if isinstance(facts.reservations, Missing):
        return None
    return next((held for held in facts.reservations if held.name == name), None)
