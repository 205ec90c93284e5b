"""Lets torchtitan 0.3 run where there is no accelerator; import it before torchtitan's others.

Nothing here concerns votes: torchtitan asks the device for its name and memory, a CPU has neither.
"""

from types import SimpleNamespace

import torch
from torchtitan.tools import utils

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
