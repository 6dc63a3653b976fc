"""The `flashrec` command. Each subcommand lives in a module of its own and is imported when it is used."""

from __future__ import annotations

import importlib

import click

import flashrec

_COMMANDS = {
    "run": ("flashrec.cli.run", "run_command"),
    "report": ("flashrec.cli.report", "report"),
    "status": ("flashrec.cli.status", "status"),
    "doctor": ("flashrec.cli.doctor", "doctor"),
    "pool": ("flashrec.cli.pool", "pool"),
    "faulty": ("flashrec.cli.verbs", "faulty"),
    "replace": ("flashrec.cli.verbs", "replace"),
    "drain": ("flashrec.cli.verbs", "drain"),
    "drop": ("flashrec.cli.verbs", "drop"),
    "extend": ("flashrec.cli.verbs", "extend"),
    "devcluster": ("flashrec.cli.devcluster", "devcluster"),
    "node-health": ("flashrec.cli.node_health", "node_health"),
}


class LazyGroup(click.Group):
    """Imports a subcommand on use, so that `flashrec --help` and each command start fast."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, _ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(flashrec.__version__, prog_name="flashrec")
def main() -> None:
    """FlashRecovery for Slurm: training goes on within seconds after losing a process or a node."""


if __name__ == "__main__":
    main()
