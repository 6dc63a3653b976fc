"""`flashrec devcluster`: a real Slurm cluster on this machine, to try recovery before asking the admins.

Only words and tables here; what is done is in `flashrec.devcluster`.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click
import msgspec
from rich.console import Console
from rich.table import Table

from flashrec.devcluster.cluster import DevCluster, take_down
from flashrec.devcluster.errors import DevClusterError
from flashrec.devcluster.linkfaults import Direction, Network
from flashrec.devcluster.record import list_clusters
from flashrec.devcluster.spec import CONTROL, DEFAULT_STATE_DIR, ClusterSpec
from flashrec.devcluster.status import ClusterStatus

_name_option = click.option("--name", default="dev", show_default=True, help="Which cluster; several can be up.")
_state_dir_option = click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=DEFAULT_STATE_DIR,
    show_default=True,
    help="Where clusters keep their files.",
)
_network_option = click.option(
    "--network",
    type=click.Choice(get_args(Network)),
    default="both",
    show_default=True,
    help="Which of its links: control (Slurm), fabric (training), or all it has.",
)


def _command(function: Callable[..., None]) -> Callable[..., None]:
    """The two options every command has, and errors as one message instead of a traceback."""

    @functools.wraps(function)
    def wrapper(**arguments: Any) -> None:
        try:
            function(**arguments)
        except DevClusterError as error:
            raise click.ClickException(str(error)) from error

    return _name_option(_state_dir_option(wrapper))


@click.group(name="devcluster")
def devcluster() -> None:
    """A real Slurm cluster on this machine, to try recovery on.

    munged, slurmctld and one slurmd a node, each node in namespaces of its own (network, processes, host name), so
    that a node can lose power or its link while the others go on. Needs root and the Slurm packages; leaves the
    machine's network and any Slurm it already runs alone.

    \b
      flashrec devcluster up --nodes 5
      flashrec devcluster exec -- sbatch job.sh
      flashrec devcluster kill-node n2      # power cut: the others see silence
      flashrec devcluster heal-node n2      # boots it again
      flashrec devcluster down
    """


@devcluster.command()
@click.option("--nodes", "num_nodes", default=5, show_default=True, help="How many nodes: n0, n1, …")
@click.option("--cpus-per-node", default=8, show_default=True, help="CPUs Slurm believes each node has.")
@click.option(
    "--slurmd-timeout",
    "slurmd_timeout_s",
    default=120,
    show_default=True,
    help="Seconds of silence after which Slurm marks a node DOWN. Make it large for a Slurm that does not notice.",
)
@click.option("--fabric", is_flag=True, help="A second network for training: fab0 on every node, unknown to Slurm.")
@click.option("--feature", "features", multiple=True, metavar="NODE=FEATURE", help="Feature= of a node; repeatable.")
@click.option("--conf-line", "extra_conf", multiple=True, metavar="LINE", help="Line to add to slurm.conf; repeatable.")
@click.option("--plugstack", multiple=True, metavar="LINE", help="Line of plugstack.conf; repeatable.")
@_command
def up(name: str, state_dir: Path, features: tuple[str, ...], **settings: Any) -> None:
    """Start a cluster and wait until all its nodes are idle.

    What a crashed cluster of the same name left behind is cleaned up first.
    """
    spec = ClusterSpec(name=name, features=dict(_split_feature(feature) for feature in features), **settings)
    cluster = DevCluster.up(spec, state_dir=state_dir, progress=lambda line: click.echo(f"{name}: {line}", err=True))
    click.echo(f"{name}: {cluster.nodes[0]}..{cluster.nodes[-1]} are idle. Next:", err=True)
    suffix = "" if name == "dev" else f" --name {name}"
    click.echo(f"  flashrec devcluster exec{suffix} -- srun -N{len(cluster.nodes)} hostname", err=True)


@devcluster.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@_command
def status(name: str, state_dir: Path, as_json: bool) -> None:
    """Show the nodes: their state as Slurm sees it, power, link and slurmd."""
    found = DevCluster.attach(name, state_dir=state_dir).status()
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(found), indent=2))
    else:
        Console().print(_status_table(found))


@devcluster.command(name="exec", context_settings={"ignore_unknown_options": True})
@click.option("--user", help="Run as this user of the machine instead of root.")
@click.option("--node", default=CONTROL, show_default=True, help="Where: ctl is the login and controller node.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@_command
def exec_(name: str, state_dir: Path, user: str | None, node: str, command: tuple[str, ...]) -> None:
    """Run a command on a node, in this folder, and pass its exit code on.

    SLURM_CONF is set, so srun, sbatch, sinfo and the rest speak to this cluster:

    \b
      flashrec devcluster exec -- sinfo
      flashrec devcluster exec --user alice -- sbatch job.sh
      flashrec devcluster exec --node n2 -- ip addr
    """
    argv = DevCluster.attach(name, state_dir=state_dir).command(command, node=node, user=user)
    os.execvp(argv[0], argv)


@devcluster.command(name="kill-node")
@click.argument("node")
@_command
def kill_node(name: str, state_dir: Path, node: str) -> None:
    """Cut a node's power: its links go down, then all its processes die.

    The other nodes see silence: no connection is closed, nothing is refused. heal-node boots it again.
    """
    DevCluster.attach(name, state_dir=state_dir).cut_power(node)
    click.echo(f"{name}: {node} has no power", err=True)


@devcluster.command(name="partition-node")
@click.argument("node")
@_network_option
@click.option(
    "--direction",
    type=click.Choice(get_args(Direction)),
    default="both",
    show_default=True,
    help="in: the node hears nothing; out: nobody hears it.",
)
@_command
def partition_node(name: str, state_dir: Path, node: str, network: Network, direction: Direction) -> None:
    """Pull a node's network plug; its processes live on. heal-node plugs it in again."""
    DevCluster.attach(name, state_dir=state_dir).partition(node, network, direction)
    click.echo(f"{name}: {node} is cut off", err=True)


@devcluster.command(name="lose-packets")
@click.argument("node")
@click.argument("percent", type=click.IntRange(1, 100))
@_network_option
@_command
def lose_packets(name: str, state_dir: Path, node: str, percent: int, network: Network) -> None:
    """Drop PERCENT of the packets from and to a node, at random. heal-node ends it.

    \b
      flashrec devcluster lose-packets n2 30
    """
    DevCluster.attach(name, state_dir=state_dir).lose(node, percent, network)
    click.echo(f"{name}: {node} loses {percent} % of its packets", err=True)


@devcluster.command(name="thin-link")
@click.argument("node")
@click.argument("rate")
@_network_option
@_command
def thin_link(name: str, state_dir: Path, node: str, rate: str, network: Network) -> None:
    """Limit what a node sends and what it receives to RATE, for example 10mbit. heal-node ends it."""
    DevCluster.attach(name, state_dir=state_dir).thin(node, rate, network)
    click.echo(f"{name}: {node} has {rate}", err=True)


@devcluster.command(name="delay-link")
@click.argument("node")
@click.argument("mean_ms", type=float)
@click.option("--jitter", "jitter_ms", type=float, default=0.0, help="Milliseconds around the mean, evenly spread.")
@click.option("--loss", "loss_percent", type=float, default=0.0, help="Percent of the packets to lose as well.")
@_network_option
@_command
def delay_link(
    name: str, state_dir: Path, node: str, mean_ms: float, jitter_ms: float, loss_percent: float, network: Network
) -> None:
    """Delay every packet from and to a node by MEAN_MS. heal-node ends it.

    \b
      flashrec devcluster delay-link n2 50 --jitter 50 --loss 1
    """
    DevCluster.attach(name, state_dir=state_dir).delay(node, mean_ms, jitter_ms, loss_percent, network)
    click.echo(f"{name}: {node} answers {2 * mean_ms:g} ms later", err=True)


@devcluster.command(name="heal-node")
@click.argument("node")
@_command
def heal_node(name: str, state_dir: Path, node: str) -> None:
    """Undo all that was done to a node's links, or boot a killed one, and wait until Slurm can use it."""
    DevCluster.attach(name, state_dir=state_dir).heal(node)
    click.echo(f"{name}: {node} is back", err=True)


@devcluster.command(name="stop-daemon")
@click.argument("daemon", metavar="NODE|slurmctld")
@_command
def stop_daemon(name: str, state_dir: Path, daemon: str) -> None:
    """Stop a node's slurmd, or slurmctld. Jobs go on; state is kept."""
    DevCluster.attach(name, state_dir=state_dir).stop_daemon(daemon)


@devcluster.command(name="start-daemon")
@click.argument("daemon", metavar="NODE|slurmctld")
@_command
def start_daemon(name: str, state_dir: Path, daemon: str) -> None:
    """Start it again with the state it kept and wait until it answers."""
    DevCluster.attach(name, state_dir=state_dir).start_daemon(daemon)


@devcluster.command()
@click.option("--all", "is_all", is_flag=True, help="Every cluster in the state folder.")
@_command
def down(name: str, state_dir: Path, is_all: bool) -> None:
    """End a cluster with everything that runs in it and delete its files. Fine to repeat."""
    for each in list_clusters(state_dir) if is_all else [name]:
        is_removed = take_down(each, state_dir=state_dir)
        click.echo(f"{each}: {'is down' if is_removed else 'there is none'}", err=True)


def _split_feature(text: str) -> tuple[str, str]:
    node, separator, feature = text.partition("=")
    if not separator or not feature:
        raise click.BadParameter(f"{text!r}: write NODE=FEATURE, for example n4=flashspare", param_hint="--feature")
    return node, feature


def _up(is_up: bool) -> str:
    return "up" if is_up else "[red]down[/red]"


def _status_table(found: ClusterStatus) -> Table:
    table = Table(title=f"cluster {found.name}", caption=f"slurmctld pid {found.slurmctld_pid or '- (stopped)'}")
    has_fabric = any(node.fabric_up is not None for node in found.nodes)
    headings = ["node", "Slurm says", "power", "link", *(["fabric"] if has_fabric else []), "slurmd pid", "faults"]
    for heading in headings:
        table.add_column(heading)
    for node in found.nodes:
        table.add_row(
            node.name,
            node.slurm_state or "no answer",
            "on" if node.has_power else "[red]off[/red]",
            _up(node.link_up),
            *([_up(bool(node.fabric_up))] if has_fabric else []),
            str(node.slurmd_pid or "-"),
            ", ".join(node.faults),
        )
    return table


if __name__ == "__main__":
    devcluster(prog_name="flashrec devcluster")
