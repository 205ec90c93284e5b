"""The store through which workers of a crew meet."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distlion.errors import CrewError

_TIMEOUT_S = 10


def start_store(port: int, *, host: str = "0.0.0.0") -> Any:
    """Start a store in this process; it ends with the returned object.

    Args:
        port: Port on which it listens; 0 for any free one.
        host: The address by which this process itself reaches it.

    Raises:
        CrewError: The port is taken.
    """
    # torch asks a name server about each worker that connects, and all others wait meanwhile.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_TIMEOUT_S),
        )
    except (RuntimeError, ValueError) as error:
        raise CrewError(
            f"no store can listen at port {port} ({str(error).splitlines()[0]}); choose another "
            "--port"
        ) from error
