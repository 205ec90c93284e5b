"""``distlion netlab``: several emulated hosts on one machine, with links of chosen rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from distlion.errors import InvalidArgumentError, ReplicaMismatchError
from distlion.votes import list_rule_names
from distlion.wire import PATTERNS
from distlion_lab.cli.command import Command, Group
from distlion_lab.cli.failure import shown_failures
from distlion_lab.cli.progress import LiveDisplay
from distlion_lab.cli.quantity import read_count, read_seconds, whole_option
from distlion_lab.cli.table import build_table, print_table
from distlion_lab.errors import DataError

if TYPE_CHECKING:
    from distlion_netlab import Lab
    from distlion_netlab.sweep import SweepProgress
    from distlion_netlab.workload import Workload

# Commands import the package inside: its pyroute2 takes half a second.

netlab_app = typer.Typer(
    cls=Group,
    help="Make hosts in network namespaces with links of chosen rates, and run commands on them. "
    "Needs Linux and root rights.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_RATE_HELP = (
    "Rate of each link: 100mbit, 1gbit, unlimited. Separate rates up and down: 100mbit/20mbit. One "
    "rate for each host: 1gbit,1gbit,100mbit."
)
_Hosts = Annotated[int, whole_option(help="Number of hosts, 1 to 250.")]
_Rate = Annotated[str, typer.Option(help=_RATE_HELP)]
_Latency = Annotated[
    str,
    typer.Option(
        help="Time from any host to another, one way, half of what ping shows: 50ms; without a "
        "unit in seconds; 0 for none. A process then forwards all packets."
    ),
]
_CONGESTION_HELP = "TCP congestion control of the hosts: cubic, reno, bbr or another of the kernel."
_CongestionControl = Annotated[
    str | None,
    typer.Option(help=_CONGESTION_HELP, show_default="cubic; reno where the kernel has no cubic"),
]
_Name = Annotated[str, typer.Option(help="Name of the lab.")]
_Vector = Annotated[
    str | None,
    typer.Option(
        help="Number of elements of a vector to exchange instead of training, such as 16M; "
        "adds the method all-reduce-fp32."
    ),
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")]


def run(arguments: list[str]) -> None:
    """Run the command; its own name is the first of the arguments. See ``distlion.__main__``."""
    netlab_app(arguments[1:], prog_name="distlion netlab")


@netlab_app.command(
    "up", cls=Command, epilog="Example: distlion netlab up --hosts 4 --rate 100mbit --name lab"
)
def up_command(
    *,
    hosts: _Hosts = 4,
    rate: _Rate = "unlimited",
    latency: _Latency = "0",
    congestion_control: _CongestionControl = None,
    name: _Name = "lab",
    as_json: _AsJson = False,
) -> None:
    """Make a lab that stays until `distlion netlab down` removes it."""
    messages = Console(stderr=True)
    with shown_failures(messages):
        from distlion_netlab import Lab, parse_host_rates

        with messages.status(f"making {hosts} hosts"):
            latency_s = read_seconds("--latency", latency)
            lab = Lab(
                hosts,
                rate,
                latency_s=latency_s,
                congestion_control=congestion_control,
                name=name,
                stays=True,
            )
        rates = [str(each) for each in parse_host_rates(rate, hosts)]
        description = _describe(lab, rates, latency_s)
        lab.close()
    if as_json:
        typer.echo(json.dumps(description, indent=1))
    else:
        _show_lab(description)


@netlab_app.command("down", cls=Command, epilog="Example: distlion netlab down --name lab")
def down_command(*, name: _Name = "lab") -> None:
    """Remove a lab that stays, or that a killed command left."""
    messages = Console(stderr=True)
    with shown_failures(messages):
        from distlion_netlab import remove_lab

        running = remove_lab(name)
    messages.print(f"lab {name} is removed")
    if running:
        numbers = ", ".join(map(str, running))
        messages.print(f"these processes still run in it, now without a network: {numbers}")


@netlab_app.command(
    "run",
    cls=Command,
    epilog="Example: distlion netlab run --hosts 4 --rate 100mbit -- python train.py",
)
def run_command(
    command: Annotated[list[str], typer.Argument(help="Command for every host, after --.")],
    *,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of a lab that stays.", show_default="a new one, removed at the end"
        ),
    ] = None,
    hosts: Annotated[
        int | None, whole_option(help="Number of hosts of the new lab.", show_default="4")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help=_RATE_HELP + " A lab that stays is changed to it.")
    ] = None,
    latency: _Latency = "0",
    congestion_control: Annotated[
        str | None,
        typer.Option(
            help=_CONGESTION_HELP + " A lab that stays is changed to it.",
            show_default="cubic; reno where the kernel has no cubic",
        ),
    ] = None,
    per_host: Annotated[int, whole_option(help="Processes on each host.")] = 1,
    master_port: Annotated[int, whole_option(help="MASTER_PORT of the processes.")] = 29500,
) -> None:
    """Run a command on every host with torchrun's environment variables.

    Lines of output begin with the rank. If one process fails, the others are ended. A last line
    then names the rank and how it ended, and this command exits with its status.
    """
    messages = Console(stderr=True)
    with shown_failures(messages):
        import distlion_netlab as netlab

        if name is not None and hosts is not None:
            raise typer.BadParameter("--hosts is for a new lab; the lab of --name has its own")
        latency_s = read_seconds("--latency", latency)
        if name is not None and latency_s:
            raise typer.BadParameter("--latency is for a new lab; the lab of --name has its own")
        if not 1 <= master_port < 1 << 16:
            raise InvalidArgumentError(f"master_port is {master_port}; expected 1 to 65535")
        with netlab.temporary_or_named(
            name,
            4 if hosts is None else hosts,
            rate,
            latency_s=latency_s,
            congestion_control=congestion_control,
        ) as lab:
            status = netlab.run_command(
                lab,
                command,
                per_host=per_host,
                master_port=master_port,
                blame=lambda rank, how: messages.print(
                    Text(f"distlion: rank {rank} {how}"), soft_wrap=True
                ),
            )
    if status:
        raise typer.Exit(status)


def _list_methods() -> list[str]:
    votes = [f"majority-{pattern}" for pattern in PATTERNS]
    return ["none", "ddp-fp32", "ddp-fp16", *votes, f"{votes[0]}-overlap"]


@netlab_app.command(
    "sweep",
    cls=Command,
    epilog="Example: distlion netlab sweep --hosts 4 --rate 100mbit --rate 1gbit "
    "--method none --method ddp-fp32 --method majority-all-reduce",
)
def sweep_command(
    *,
    hosts: _Hosts = 4,
    rate: Annotated[list[str], typer.Option(help=_RATE_HELP + " Repeatable.")] = [  # noqa: B006
        "100mbit",
        "1gbit",
    ],
    latency: _Latency = "0",
    congestion_control: _CongestionControl = None,
    method: Annotated[
        list[str],
        typer.Option(
            help="none (the floor), ddp-fp32, ddp-fp16, ddp-powersgd, local-8 (LocalSteps of AdamW "
            "that vote every 8 steps), or RULE-PATTERN, such "
            "as majority-all-reduce, with -overlap or -overlap-auto. Repeatable. Rules:  "
            f"{', '.join(list_rule_names())}. Patterns: {', '.join(PATTERNS)}, auto.",
            default_factory=_list_methods,
            show_default=", ".join(_list_methods()),
        ),
    ],
    vector: _Vector = None,
    device_s: Annotated[
        str | None,
        typer.Option(
            help="Time of forward and backward on an emulated accelerator, such as 300ms, in which "
            "the host sleeps; the model is --layers matrices of --width x --width."
        ),
    ] = None,
    layers: Annotated[int, whole_option(help="Layers of the model.")] = 4,
    width: Annotated[int, whole_option(help="Width of the model.")] = 128,
    vocabulary: Annotated[int, whole_option(help="Vocabulary of the GPT.")] = 1024,
    repetitions: Annotated[int, whole_option(help="Blocks of each method at each rate.")] = 5,
    block_s: Annotated[str, typer.Option(help="Time of a block: 1 (in seconds), 500ms.")] = "1",
    results: Annotated[
        Path | None,
        typer.Option(help="Folder for sweep.json and sweep.png.", show_default="none is written"),
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Time the training steps of several methods at several rates in one lab, and compare them.

    The methods take turns in each repetition, and ratios are taken within a repetition.
    """
    messages = Console(stderr=True)
    with shown_failures(messages):
        from distlion_netlab import SweepSettings, run_sweep

        sizes = {"layers": layers, "width": width, "vocabulary": vocabulary}
        settings = SweepSettings(
            hosts=hosts,
            rates=tuple(rate),
            methods=tuple(method),
            workload=_find_workload(vector, device_s, **sizes),
            repetitions=repetitions,
            block_s=read_seconds("--block-s", block_s),
            latency_s=read_seconds("--latency", latency),
            congestion_control=congestion_control,
        )
        if results is not None:
            _make_folder(results)
        with _SweepDisplay(messages) as display:
            record = run_sweep(settings, display)
        _show_sweep(record, results, messages, as_json=as_json)


def _find_workload(
    vector: str | None, device_s: str | None, *, layers: int, width: int, vocabulary: int
) -> Workload:
    from distlion_netlab import DeviceWorkload, GptWorkload, VectorWorkload

    if vector is not None and device_s is not None:
        raise InvalidArgumentError(
            "--vector has no forward pass that --device-s could emulate; give one of the two"
        )
    if vector is not None:
        return VectorWorkload(read_count("--vector", vector))
    if device_s is not None:
        seconds = read_seconds("--device-s", device_s)
        return DeviceWorkload(layers=layers, width=width, step_s=seconds)
    return GptWorkload(layers=layers, width=width, vocabulary=vocabulary)


class _SweepDisplay(LiveDisplay):
    """Show the progress of a sweep."""

    def __init__(self, console: Console) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        super().__init__(console, *columns, TimeRemainingColumn())

    def __call__(self, progress: SweepProgress) -> None:
        done, total, what = progress.done, progress.total, progress.what
        self.show(f"{done}/{total}  {what}", completed=done, total=total, description=what)


def _show_sweep(
    record: dict[str, Any], folder: Path | None, messages: Console, *, as_json: bool
) -> None:
    from distlion_netlab.sweep_table import tabulate_sweep

    if as_json:
        typer.echo(json.dumps(record, indent=1))
    else:
        head, rows = tabulate_sweep(record)
        control = record["conditions"]["tcp_congestion_control"]
        title = f"{record['settings']['hosts']} hosts, TCP {control}, medians"
        print_table(Console(), build_table(head, rows, left=("method",), title=title))
    for name, reason in record["missing"].items():
        messages.print(Text(f"{name} was left out: {reason}"), soft_wrap=True)
    if folder is not None:  # after all is shown: it may have taken hours
        _write_sweep(record, folder)
    unequal = [name for name, equal in record["replicas_equal"].items() if not equal]
    if unequal:
        raise ReplicaMismatchError(f"workers ended with different parameters: {', '.join(unequal)}")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(
            f"--results {folder} cannot be made: {error.strerror}"
        ) from error


def _write_sweep(record: dict[str, Any], folder: Path) -> None:
    from distlion_netlab.sweep_figure import draw_sweep_figure

    try:
        (folder / "sweep.json").write_text(json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror}") from error
    draw_sweep_figure(record, folder / "sweep.png")


def _describe(lab: Lab, rates: list[str], latency_s: float) -> dict[str, Any]:
    return {
        "name": lab.name,
        "latency_s": latency_s,
        "congestion_control": lab.congestion_control,
        "hosts": [
            {"host": host, "namespace": namespace, "address": lab.plan.address(host), "rate": rate}
            for host, (namespace, rate) in enumerate(
                zip(lab.plan.host_namespaces, rates, strict=True)
            )
        ],
    }


def _show_lab(description: dict[str, Any]) -> None:
    name, head = description["name"], ("host", "namespace", "address", "rate")
    rows = [[str(value) for value in host.values()] for host in description["hosts"]]
    console = Console()
    latency = (
        f", {1000 * description['latency_s']:g} ms one way" if description["latency_s"] else ""
    )
    title = f"lab {name}{latency}, TCP {description['congestion_control']}"
    print_table(console, build_table(head, rows, left=head, title=title))
    console.print(Text(f"distlion netlab run --name {name} -- COMMAND"), soft_wrap=True)
