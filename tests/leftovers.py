"""Find what a test function leaves behind in a process that is reused."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import resource
import signal
import sys
import threading
import types
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = tuple(f"{ROOT / name}{os.sep}" for name in ("tests", "campaigns", "benchmarks/tests"))
KEPT = {"rank_process", "leftovers", "cluster", "__main__", "__mp_main__"}

WATCHED = {
    "builtins",
    "os",
    "signal",
    "socket",
    "time",
    "torch",
    "torch.distributed",
    "torch.distributed.distributed_c10d",
    "torch.nn.modules.module",
    "torch.optim.optimizer",
}
"""Modules in which a test may replace a function, beside those of the library."""

MOST_FILES = 256

LIMIT_S = 2.0
"""How long threads that are ending are waited for."""


class State:
    """The state of a process before it ran anything.

    What every other function changes is reset: generators of random numbers, warnings that were
    shown, armed faults, numbers in modules of the library. Whatever else has changed is told.
    """

    def __init__(self) -> None:
        import torch

        self._rng = torch.get_rng_state(), random.getstate()
        self._filters = list(warnings.filters)
        self._settings = _read_settings()
        self._threads = set(threading.enumerate())
        self._modules: dict[str, dict[str, Any]] = {}

    def watch_modules(self) -> None:
        """Note what stands in new modules, to find out what a function replaces there."""
        for name, module in list(sys.modules.items()):
            if name not in self._modules and (name in WATCHED or name[:8] == "distlion"):
                self._modules[name] = _read_module(module)

    def restore(self) -> str:
        """Reset what can be reset; return what cannot, in words."""
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        import distlion.faults

        torch.set_rng_state(self._rng[0])
        random.setstate(self._rng[1])
        torch.set_num_threads(1)
        warnings.filters[:] = self._filters
        warnings._filters_mutated()  # type: ignore[attr-defined]
        distlion.faults.disarm_all()
        found = [*self._find_threads(), *self._find_settings(), *self._find_changes()]
        if any(type(each) is DeviceMesh for each in gc.get_objects()):
            _forget_meshes()
            gc.collect()
        found += {type(each).__name__ for each in gc.get_objects() if type(each) is DeviceMesh}
        # Groups of torch keep some of their sockets.
        n_files = len(os.listdir("/dev/fd"))
        return ", ".join(found if n_files < MOST_FILES else [*found, f"{n_files} open files"])

    def _find_threads(self) -> list[str]:
        started = set(threading.enumerate()) - self._threads
        for thread in started:
            thread.join(LIMIT_S)
        return [f"thread {thread.name}" for thread in started if thread.is_alive()]

    def _find_settings(self) -> list[str]:
        found = _read_settings()
        return [name for name, value in self._settings.items() if found[name] != value]

    def _find_changes(self) -> list[str]:
        told = []
        for name, before in self._modules.items():
            for key, value in _read_module(sys.modules[name]).items():
                was = before.get(key, self)
                if was is value or _comes_by_itself(key, value):
                    continue
                if type(was) in (int, float):
                    setattr(sys.modules[name], key, was)
                else:
                    told.append(f"{name}.{key}")
        return told


def _comes_by_itself(key: str, value: object) -> bool:
    """Return whether no test need have set this attribute of a module, or of a class."""
    # The first optimizer of a class lets torch wrap its step.
    is_hooked = getattr(value, "hooked", False)
    return is_hooked or isinstance(value, types.ModuleType) or key.rpartition(".")[2][:2] == "__"


def _forget_meshes() -> None:
    """Empty DTensor's caches: they keep meshes with the names of groups, which others will have.

    A version of torch with other caches keeps its meshes, and with them the process is not reused.
    """
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    with contextlib.suppress(AttributeError):
        debug._clear_sharding_prop_cache()
        _redistribute._gen_transform_infos.cache_clear()
        _redistribute.clear_redistribute_planner_cache()
        _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()  # type: ignore[attr-defined]


def drop_test_modules() -> None:
    """Forget all modules of tests, which keep state of their own; the next test imports anew."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        if path.startswith(TESTS) and name not in KEPT:
            del sys.modules[name]


def _read_settings() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    return {
        "environment": dict(os.environ),
        "namespace": os.path.realpath("/proc/self/ns/net"),
        "limits": [
            resource.getrlimit(getattr(resource, name))
            for name in dir(resource)
            if name.startswith("RLIMIT_")
        ],
        "signal handlers": {
            number: signal.getsignal(number) for number in sorted(signal.valid_signals())
        },
        "process groups": dist.is_initialized(),
        "gradients": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "log handlers": {
            name: (list(logger.handlers), logger.level, logger.disabled)
            for name, logger in logging.root.manager.loggerDict.items()
            if isinstance(logger, logging.Logger)
            and name.startswith("distlion")
            and (logger.handlers or logger.level or logger.disabled)
        },
        "root log handlers": (list(logging.root.handlers), logging.root.level),
    }


def _read_module(module: types.ModuleType) -> dict[str, Any]:
    """Return each attribute of a module and of the classes that it defines."""
    is_ours = module.__name__.startswith("distlion")
    found = {key: value for key, value in vars(module).items() if is_ours or callable(value)}
    for key, value in list(found.items()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            found.update((f"{key}.{name}", member) for name, member in vars(value).items())
    return found
