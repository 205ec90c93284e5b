"""How late a heartbeat of a Python thread gets while the process is busy.

    python benchmarks/beat_lateness.py [--seconds 12] [--busy 4] [--loads backward compile ...]

A thread writes to a ``TCPStore`` of another process every 0.2 s, as a member of a crew does. The
main thread does something long meanwhile. Prints the longest time between two heartbeats, with and
without so many busy processes beside it. The load average tells what else ran.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

BEAT_S = 0.2
N_OBJECTS = 4_000_000


def build_network(width: int = 2048) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(*layers)


def rest() -> Callable[[], None]:
    return lambda: time.sleep(0.1)


def go_backward() -> Callable[[], None]:
    model, batch = build_network(), torch.randn(1024, 2048)
    return lambda: model(batch).square().mean().backward()


def compile_anew() -> Callable[[], None]:
    model, batch = build_network(64), torch.randn(16, 64)

    def load() -> None:
        torch.compiler.reset()
        torch.compile(model)(batch).sum().backward()

    return load


def save() -> Callable[[], None]:
    model = build_network()
    state = {"model": model.state_dict(), "more": [t.clone() for t in model.parameters()]}
    return lambda: torch.save(state, io.BytesIO())


def collect_garbage() -> Callable[[], None]:
    kept = [[number] for number in range(N_OBJECTS)]
    return lambda: (kept and gc.collect(), None)[1]


def pickle_objects() -> Callable[[], None]:
    kept = [(number, str(number)) for number in range(N_OBJECTS // 4)]
    return lambda: (pickle.dumps(kept), None)[1]


def sort_objects() -> Callable[[], None]:
    kept = [str(number * 7919 % N_OBJECTS) for number in range(N_OBJECTS // 2)]
    return lambda: (sorted(kept), None)[1]


LOADS: dict[str, Callable[[], Callable[[], None]]] = {
    "nothing": rest,
    "backward": go_backward,
    "compile": compile_anew,
    "checkpoint": save,
    "garbage": collect_garbage,
    "pickle": pickle_objects,
    "sort": sort_objects,
}


def beat(store: dist.Store, ended: threading.Event, times_s: list[float]) -> None:
    number = 0
    while not ended.wait(BEAT_S):
        number += 1
        store.set("beat", str(number))
        times_s.append(time.monotonic())


def measure(load: str, seconds: float, port: int) -> dict[str, float]:
    """Do the load for so long; return how it went."""
    function = LOADS[load]()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    ended, times_s = threading.Event(), [time.monotonic()]
    thread = threading.Thread(target=beat, args=(store, ended, times_s))
    thread.start()
    calls, until_s = [(0.0, 0.0)], time.monotonic() + seconds
    while (began_s := time.monotonic()) < until_s:
        cpu_s = time.thread_time()
        function()
        calls.append((time.monotonic() - began_s, time.thread_time() - cpu_s))
    ended.set()
    thread.join()
    gaps = sorted(after - before for before, after in pairwise(times_s))
    return {
        "longest call": max(calls)[0],
        "CPU": max(calls)[1],
        "median": gaps[len(gaps) // 2],
        "longest gap": gaps[-1],
    }


def measure_apart(load: str, seconds: float, port: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", load, str(seconds), str(port)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--busy", type=int, default=4, help="busy processes")
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        load, seconds, port = args.one
        print(json.dumps(measure(load, float(seconds), int(port))))
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(
        "| load | busy beside it | longest call | CPU | median gap | longest gap | load average |"
    )
    print("|---|---|---|---|---|---|---|")
    for n_busy in (0, args.busy):
        spin = [sys.executable, "-c", "while True: pass"]
        busy = [subprocess.Popen(spin) for _ in range(n_busy)]
        try:
            for load in args.loads:
                found = measure_apart(load, args.seconds, store.port)
                print(
                    f"| {load} | {n_busy} | {found['longest call']:.2f} s | {found['CPU']:.2f} s "
                    f"| {found['median']:.2f} s | {found['longest gap']:.2f} s "
                    f"| {os.getloadavg()[0]:.1f} |",
                    flush=True,
                )
        finally:
            for each in busy:
                each.kill()
                each.wait()


if __name__ == "__main__":
    main()
