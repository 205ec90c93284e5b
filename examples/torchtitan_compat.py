"""Let torchtitan 0.3.0 run with torch 2.13, and on CPUs; import this before torchtitan.

Nothing here concerns votes. torchtitan 0.3.0 calls ``torch.distributed.set_timeout``, which needs a
later torch. It also asks for the name and the memory of the device, which a CPU does not have.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torchtitan.tools import utils

if not hasattr(dist, "set_timeout"):
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout

if not torch.accelerator.is_available():
    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        device_count=lambda: 1,
        set_device=torch.cpu.set_device,
        current_device=lambda: 0,
        synchronize=torch.cpu.synchronize,
        get_device_name=lambda device: "CPU",
        get_device_properties=lambda device: SimpleNamespace(total_memory=1),
        memory_stats=lambda device: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )
