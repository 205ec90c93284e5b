"""Tables of a measurement, made from its JSON."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from distlion_netlab.sweep_table import tabulate_sweep

VERDICTS = {True: "yes", False: "NO", None: "not judged"}
DEVICE_RATIOS = ("none", "ddp-fp32", "ddp-fp16", "ddp-powersgd")
Tabulated = tuple[str, list[str], list[list[str]]]


def tabulate(result: dict[str, Any]) -> list[Tabulated]:
    """Return title, headings and rows of each table."""
    tables = [("Goals", *tabulate_targets(result))]
    what = "time of a step and speed-up"
    for name, record in result.get("device", {}).items():
        title = f"Emulated accelerator, {record['settings']['workload']['step_s']:g} s, {name}"
        tables.append((title, *tabulate_device(record)))
    if "training" in result:
        record = result["training"]
        title = f"Training, 4 hosts, {describe_batch(record)}: {what}"
        tables.append((title, *tabulate_sweep(record)))
    for record in result.get("pair", {}).values():
        title = f"Training, 2 hosts, {describe_batch(record)}: {what}"
        tables.append((title, *tabulate_sweep(record)))
    if "exchange" in result:
        tables.append(("The exchange alone, 4 hosts", *tabulate_sweep(result["exchange"])))
    if "training" in result:
        title = "Training, 4 hosts: processor time of a step"
        tables.append((title, *tabulate_processors(result["training"])))
        tables.append(("Bytes of a step, by host 0", *tabulate_bytes(result["training"])))
        tables.append(
            (
                "Measured and predicted step, 4 hosts",
                *tabulate_predictions({"4": result["training"]}),
            )
        )
    if "scaling" in result:
        title = "Measured and predicted step against the number of hosts"
        tables.append((title, *tabulate_predictions(result["scaling"])))
    return tables


def describe_batch(record: dict[str, Any]) -> str:
    workload = record["settings"]["workload"]
    sequences, context = workload["batch_size"], workload["context"]
    return f"{sequences} sequences of {context} tokens a worker and step"


def tabulate_device(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Lay out each method's step, its share of the speed without communication, and ratios."""
    rows = []
    for rate, methods in record["results"].items():
        alone = f"{record['traffic'][rate]['votes']['rate_bit_per_s'] / 1e6:.3g}"
        for name, method in methods.items():
            ratios = [_format_ratio(method, over) for over in DEVICE_RATIOS]
            median_s, sent = method["seconds"]["median"], max(method["interface_bytes"])
            numbers = (f"{1e3 * median_s:.0f}", *ratios, f"{sent / 1e6:.3g}")
            rows.append([rate, alone, name, *numbers, f"{8 * sent / median_s / 1e6:.3g}"])
    over = ("share of the speed of none", *(f"x {name}" for name in DEVICE_RATIOS[1:]))
    head = ["link", "votes alone, Mbit/s", "method", "ms a step", *over, "MB a step"]
    return [*head, "in the step, Mbit/s"], rows


def _format_ratio(method: dict[str, Any], over: str) -> str:
    ratio = method["speed_up"].get(over)
    return "" if ratio is None else f"{ratio['median']:.3g}"


def tabulate_targets(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            row["name"],
            row["target"],
            f"{row['measured']:.3g}",
            row["detail"],
            VERDICTS[row["met"]],
        ]
        for row in result["targets"]
    ]
    return ["goal", "at least, or at most", "measured", "quartiles, or where", "met"], rows


def tabulate_bytes(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for rate, methods in record["results"].items():
        for name in record["replicas_equal"]:
            if name not in methods:
                continue
            method = methods[name]
            sent, computed, counted, once = (
                method[key][0]
                for key in ("sent_bytes", "wire_bytes", "interface_bytes", "sent_once_bytes")
            )
            off = f"{once / computed - 1:+.1%}"
            numbers = (f"{number:,.0f}" for number in (sent, computed, counted, once))
            rows.append([rate, name, *numbers, off])
    head = ["rate", "method", "sent", "with headers", "interface", "less sent again", "deviation"]
    return head, rows


def tabulate_processors(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    cores = record["conditions"]["cores"]
    rows = []
    for rate, methods in record["results"].items():
        for name, method in methods.items():
            available_s = cores * method["seconds"]["median"]
            shares = (f"{method[key] / available_s:.0%}" for key in ("cpu_s", "busy_s"))
            workers, busy = (f"{1e3 * method[key]:.0f}" for key in ("cpu_s", "busy_s"))
            rows.append([rate, name, workers, busy, *shares])
    head = ["rate", "method", "workers, ms", "machine, ms", "workers' share", "machine's share"]
    return head, rows


def tabulate_predictions(
    records: dict[str, dict[str, Any]],
) -> tuple[list[str], list[list[str]]]:
    rows = []
    for hosts, record in records.items():
        for rate, methods in record["results"].items():
            for name, method in methods.items():
                if method["predicted_s"] is None or name == "none":
                    continue
                measured, predicted = method["seconds"]["median"], method["predicted_s"]
                row = [hosts, rate, name, f"{1e3 * measured:.1f}", f"{1e3 * predicted:.1f}"]
                rows.append([*row, f"{predicted / measured - 1:+.0%}"])
    return ["hosts", "rate", "method", "measured, ms", "predicted, ms", "deviation"], rows


def build_tables(result: dict[str, Any]) -> list[Table]:
    tables = []
    for title, head, rows in tabulate(result):
        table = Table(title=title, title_justify="left")
        for number, column in enumerate(head):
            table.add_column(column, justify="right" if number else "left", no_wrap=not number)
        for row in rows:
            table.add_row(*row, style="red" if row[-1] == "NO" else None)
        tables.append(table)
    return tables


def write_markdown(result: dict[str, Any]) -> str:
    lines = ["# End to end", "", "Made by `python benchmarks/end_to_end` from its JSON.", ""]
    lines += [f"- {name.replace('_', ' ')}: {v}" for name, v in result["conditions"].items()]
    lines += ["", *(f"- left out: {name} ({why})" for name, why in list_missing(result))]
    lines += [
        "",
        "Times are medians of blocks in which the methods take turns, ratios medians of those",
        "taken within a turn. All hosts share this machine's cores: what a link reached is what",
        "they let it reach. A ratio above 1 is that many times as fast.",
    ]
    if "device" in result:
        lines += [
            "",
            "On an emulated accelerator forward and backward pass take a stated time in which the",
            "host sleeps. Lion's arithmetic, PowerSGD's and that of votes runs on the cores, which",
            "all hosts share. At 1 Gbit/s and more it is most of what PowerSGD adds to a step.",
            "",
            "*Votes alone*: the rate that messages of votes reach on that link with nothing beside",
            "them. Large messages, such as DDP's, reach more. *In the step*: what the busiest host",
            "sent in a step over the whole time of that step.",
        ]
    for title, head, rows in tabulate(result):
        rule = ["---:" if number else "---" for number in range(len(head))]
        lines += ["", f"## {title}", "", *(f"| {' | '.join(row)} |" for row in [head, rule, *rows])]
    return "\n".join(lines) + "\n"


def list_records(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records of all sweeps."""
    records = [result[part] for part in ("training", "exchange") if part in result]
    nested = ("device", "pair", "scaling")
    return records + [record for part in nested for record in result.get(part, {}).values()]


def list_missing(result: dict[str, Any]) -> list[tuple[str, str]]:
    return [pair for record in list_records(result) for pair in record["missing"].items()]
