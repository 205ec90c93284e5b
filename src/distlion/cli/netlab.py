"""``distlion netlab``: several hosts on one machine, with links of chosen rates."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from distlion.cli.failure import shown_failures

if TYPE_CHECKING:
    from distlion.netlab import Lab

# The room is imported by the commands: pyroute2 is an optional package, and takes half a second.

netlab_app = typer.Typer(
    help="Make hosts in network namespaces, with links of chosen rates, and run commands on them. "
    "Needs Linux and root rights.",
    no_args_is_help=True,
)

_RATE_HELP = (
    "Rate of each link: 100mbit, 1gbit, unlimited; up and down apart: 100mbit/20mbit; one for each "
    "host: 1gbit,1gbit,100mbit."
)
_Hosts = Annotated[int, typer.Option(help="Number of hosts, 1 to 250.")]
_Rate = Annotated[str, typer.Option(help=_RATE_HELP)]
_Name = Annotated[str, typer.Option(help="Name of the lab.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")]


@netlab_app.command("up", epilog="Example: distlion netlab up --hosts 4 --rate 100mbit --name lab")
def up_command(
    *,
    hosts: _Hosts = 4,
    rate: _Rate = "unlimited",
    name: _Name = "lab",
    as_json: _AsJson = False,
) -> None:
    """Make a lab that stays until `distlion netlab down`."""
    messages = Console(stderr=True)
    with shown_failures(messages):
        from distlion.netlab import Lab, parse_host_rates

        with messages.status(f"making {hosts} hosts"):
            lab = Lab(hosts, rate, name=name, stays=True)
        rates = [str(each) for each in parse_host_rates(rate, hosts)]
        description = _describe(lab, rates)
        lab.close()
    if as_json:
        typer.echo(json.dumps(description, indent=1))
    else:
        Console().print(_tabulate(description))


@netlab_app.command("down", epilog="Example: distlion netlab down --name lab")
def down_command(*, name: _Name = "lab") -> None:
    """Remove a lab: one that stays, or one that a killed command left."""
    messages = Console(stderr=True)
    with shown_failures(messages):
        from distlion.netlab import remove_lab

        running = remove_lab(name)
    messages.print(f"lab {name} is removed")
    if running:
        numbers = ", ".join(map(str, running))
        messages.print(f"these processes still run in it, now without a network: {numbers}")


@netlab_app.command(
    "run", epilog="Example: distlion netlab run --hosts 4 --rate 100mbit -- python train.py"
)
def run_command(
    command: Annotated[list[str], typer.Argument(help="What to run on every host, after --.")],
    *,
    name: Annotated[
        str | None,
        typer.Option(help="A lab that stays.", show_default="a new one, removed at the end"),
    ] = None,
    hosts: Annotated[
        int | None, typer.Option(help="Number of hosts of the new lab.", show_default="4")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help=_RATE_HELP + " Of a lab that stays, it is changed.")
    ] = None,
    per_host: Annotated[int, typer.Option(help="Processes on each host.")] = 1,
    master_port: Annotated[int, typer.Option(help="MASTER_PORT of the processes.")] = 29500,
) -> None:
    """Run a command on every host with the environment that torchrun gives.

    Lines of output begin with the rank. If one process fails, the others are ended, and its status
    is that of this command.
    """
    messages = Console(stderr=True)
    with shown_failures(messages):
        from distlion import netlab as room

        if name is not None and hosts is not None:
            raise typer.BadParameter("--hosts is for a new lab; the one of --name has its own")
        with room.temporary_or_named(name, hosts or 4, rate) as lab:
            status = room.run_command(lab, command, per_host=per_host, master_port=master_port)
    if status:
        raise typer.Exit(status)


def _describe(lab: Lab, rates: list[str]) -> dict[str, Any]:
    return {
        "name": lab.name,
        "hosts": [
            {"host": host, "namespace": namespace, "address": lab.plan.address(host), "rate": rate}
            for host, (namespace, rate) in enumerate(
                zip(lab.plan.host_namespaces, rates, strict=True)
            )
        ],
    }


def _tabulate(description: dict[str, Any]) -> Table:
    name = description["name"]
    table = Table(title=f"lab {name}", caption=f"distlion netlab run --name {name} -- COMMAND")
    for column in ("host", "namespace", "address", "rate"):
        table.add_column(column)
    for host in description["hosts"]:
        table.add_row(*(str(value) for value in host.values()))
    return table
