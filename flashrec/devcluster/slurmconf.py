"""The Slurm configuration of a dev cluster, as pure text.

Written to read the same on every Slurm release we support: nothing here depends on a version. The one setting that
does (`CgroupPlugin`) is probed by starting a slurmd, see `CGROUP_CANDIDATES`.

What makes a job outlive power cuts of its nodes and their return, and why (measured: docs/guides/devcluster.md):

* `SlurmdTimeout` above the time a node is away: otherwise Slurm takes the node from the job for good.
* `ReturnToService=2`: a node that Slurm did mark DOWN comes back by itself.
* `BatchStartTimeout` large: a healed batch host registers without the batch step; slurmctld would end the whole job.
* `SelectTypeParameters=CR_Core`: memory is not counted, so `--overlap` steps never wait for it.
* `OverSubscribe=EXCLUSIVE`: jobs get whole nodes, as on a training cluster. After a restart of slurmctld, Slurm
  refuses every new step of a job that has part of a node ("Memory required by task is not available").
* `TreeWidth` above the number of nodes: no message to a living node is relayed by a dead one.
"""

from __future__ import annotations

from flashrec.devcluster.spec import CONTROL, FABRIC_NETWORK, ClusterSpec, Layout

# Tried in this order on the first node; a release that does not know the first refuses it within milliseconds.
CGROUP_CANDIDATES = (
    "CgroupPlugin=disabled\n",
    "CgroupPlugin=cgroup/v1\n",
    "CgroupPlugin=cgroup/v2\nIgnoreSystemd=yes\n",
)


def render_slurm_conf(spec: ClusterSpec, layout: Layout, *, memory_mib: int) -> str:
    common = {
        "ClusterName": spec.name,
        "SlurmctldHost": f"{CONTROL}({spec.address(CONTROL)})",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={layout.munge_socket}",
        "CredType": "cred/munge",
        "StateSaveLocation": layout.ctl_state,
        "SlurmctldPidFile": layout.ctl_pid,
        "SlurmctldLogFile": layout.ctl_log,
        "SlurmdSpoolDir": layout.spool("%n"),
        "SlurmdPidFile": layout.slurmd_pid("%n"),
        "SlurmdLogFile": layout.slurmd_log("%n"),
        "PlugStackConfig": layout.conf_dir / "plugstack.conf",
        "SlurmdParameters": "config_overrides",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "sched_interval=1,bf_interval=1,batch_sched_delay=0",
        "SlurmdTimeout": spec.slurmd_timeout_s,
        "BatchStartTimeout": 65000,
        "ReturnToService": 2,
        "TreeWidth": 1000,
        "JobRequeue": 0,
        "KillWait": 2,
        "MinJobAge": 3600,
    }
    node_common = (
        f"CPUs={spec.cpus_per_node} Boards=1 SocketsPerBoard=1 CoresPerSocket={spec.cpus_per_node} ThreadsPerCore=1"
        f" RealMemory={memory_mib} State=UNKNOWN"
    )
    nodes = [
        f"NodeName={node} NodeAddr={spec.address(node)} {node_common}"
        + (f" Feature={spec.features[node]}" if node in spec.features else "")
        for node in spec.nodes
    ]
    return "".join(
        f"{line}\n"
        for line in (
            "# Written by `flashrec devcluster up`; lost at `down`.",
            *(f"{key}={value}" for key, value in common.items()),
            *nodes,
            "PartitionName=main Nodes=ALL Default=YES OverSubscribe=EXCLUSIVE MaxTime=INFINITE State=UP",
            *spec.extra_conf,
        )
    )


def render_plugstack_conf(spec: ClusterSpec, layout: Layout) -> str:
    """The cluster's own plugstack.conf, so that the machine's is never read; plug-ins may be dropped into a folder."""
    return "".join(f"{line}\n" for line in (*spec.plugstack, f"include {layout.conf_dir}/plugstack.conf.d/*.conf"))


def render_hosts(spec: ClusterSpec) -> str:
    """/etc/hosts as seen on every station: there is no name service inside. `n0` is the control network's address,
    `n0-fab` that of the fabric."""
    fabric = [f"{spec.address(station, FABRIC_NETWORK)} {station}-fab" for station in spec.stations]
    return "".join(
        f"{line}\n"
        for line in (
            "127.0.0.1 localhost",
            "::1 localhost",
            *(f"{spec.address(station)} {station}" for station in spec.stations),
            *(fabric if spec.fabric else []),
        )
    )
