"""Is this a Slurm that we know, does it answer, do its parts agree? Pure functions of the gathered facts."""

from __future__ import annotations

from flashrec.admin.doctor.facts import NEWEST, OLDEST, Facts, Missing, show_version
from flashrec.admin.doctor.finding import Finding, fail, ok, unknown, warn
from flashrec.admin.doctor.settings import check_settings

CLOCK_SKEW_WARN_S = 2.0  # one second is lost in what the controller prints
CLOCK_SKEW_FAIL_S = 240.0  # a munge credential lives 300 s: a little more, and nothing works


def check_slurm(facts: Facts) -> list[Finding]:
    """Everything about Slurm itself. Without a controller there is only that to say."""
    if isinstance(facts.config, Missing):
        return [
            fail(
                "slurm.controller",
                f"Slurm cannot be asked: {facts.config.why}",
                "run this on a node where sinfo works, as a user who may use the cluster",
            )
        ]
    found = [ok("slurm.controller", f"cluster {facts.config.get('ClusterName', '?')} answers"), version(facts)]
    found.append(node_versions(facts))
    found.append(clock(facts))
    slurm = facts.slurm
    if not isinstance(slurm, Missing):
        found += check_settings(facts.config, slurm)
    found.append(whole_nodes(facts))
    return found


def version(facts: Facts) -> Finding:
    name = "slurm.version"
    slurm, client = facts.slurm, facts.client
    if isinstance(slurm, Missing):
        return unknown(name, slurm.why)
    text = show_version(slurm)
    if not isinstance(client, Missing) and client[:2] > slurm[:2]:
        return fail(
            name,
            f"the commands here are {show_version(client)}, the controller is older ({text}): it will not serve them",
            "install the client commands of the controller's release, or an older one",
        )
    if slurm[:2] < OLDEST:
        return fail(name, f"{text}: older than 22.05, which lacks what flashrec needs", "upgrade Slurm")
    if slurm[:2] > NEWEST:
        return warn(name, f"{text}: newer than what was tried (26.05)", "try a recovery before you rely on it")
    return ok(name, text)


def node_versions(facts: Facts) -> Finding:
    name = "slurm.node-versions"
    if isinstance(facts.nodes, Missing):
        return unknown(name, facts.nodes.why)
    versions = sorted({node.version for node in facts.nodes.values() if node.version})
    releases = {tuple(text.split(".")[:2]) for text in versions}
    if len(releases) > 1:
        return warn(
            name,
            f"slurmd runs in several releases: {', '.join(versions)}",
            "install on each node the plugin that was built for its release",
        )
    if not versions:
        return unknown(name, "no node has said its version: none is up")
    return ok(name, ", ".join(versions))


def clock(facts: Facts) -> Finding:
    name = "clock.controller"
    if isinstance(facts.clock, Missing):
        return unknown(name, facts.clock.why)
    controller, here = facts.clock
    ahead = controller - here if controller > here else min(0.0, controller + 1 - here)
    if abs(ahead) >= CLOCK_SKEW_FAIL_S:
        return fail(
            name,
            f"the controller's clock is {ahead:+.0f} s from ours: munge is about to refuse our messages, or does",
            "run chrony or ntpd on all nodes",
        )
    if abs(ahead) >= CLOCK_SKEW_WARN_S:
        return warn(
            name,
            f"the controller's clock is {ahead:+.0f} s from ours: logs of several nodes cannot be compared",
            "run chrony or ntpd on all nodes",
        )
    return ok(name, "less than 2 s from the controller's")


def whole_nodes(facts: Facts) -> Finding:
    name = "slurm.OverSubscribe"
    if isinstance(facts.sharing, Missing):
        return unknown(name, facts.sharing.why)
    shared = sorted(part for part, sharing in facts.sharing.items() if sharing != "EXCLUSIVE")
    if shared:
        return warn(
            name,
            f"jobs may get parts of nodes in partition {', '.join(shared)}: after a restart of slurmctld Slurm creates "
            "no new step in such a job, so nothing can be replaced",
            "set OverSubscribe=EXCLUSIVE for training partitions, or have users submit with --exclusive",
        )
    return ok(name, "jobs get whole nodes")
