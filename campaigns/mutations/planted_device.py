"""Bugs to plant between the parameters' device and the wire."""

from __future__ import annotations

from planted import Mutation

STAGING = "step/staging.py"
STREAMS = "step/streams.py"
STEP = ("distributed/test_gpu_step.py",)
RANKS = ("distributed/test_gpu_ranks.py",)

DEVICE = (
    Mutation(
        "device: votes are read before they have come down",
        STAGING,
        "    arrived.synchronize()\n",
        "",
        STEP,
        interprets=True,
    ),
    Mutation(
        "device: the host waits for each tensor",
        STAGING,
        "copy.copy_(tensor, non_blocking=True)",
        "copy.copy_(tensor)",
        STEP,
        interprets=True,
    ),
    Mutation(
        "device: a reply goes up from memory that is not pinned",
        STAGING,
        "    return pinned.copy_(tensor).to(device, non_blocking=True)",
        "    return tensor.clone().to(device, non_blocking=True)",
        STEP,
        interprets=True,
    ),
    Mutation(
        "device: a failure has torch's name",
        STAGING,
        "    except Exception as error:",
        "    except ZeroDivisionError as error:",
        STEP,
        interprets=True,
    ),
    Mutation(
        "device: votes do not wait for backward",
        STREAMS,
        "            own.wait_event(event)",
        "            pass",
        STEP,
        interprets=True,
    ),
    Mutation(
        "device: votes are encoded in the way of backward",
        STREAMS,
        "with torch.cuda.device(device), torch.cuda.stream(own):",
        "with torch.cuda.device(device):",
        STEP,
        interprets=True,
    ),
    Mutation(
        "device: an arrival on another stream is not waited for",
        STREAMS,
        "            self._seen[bucket].add(torch.cuda.current_stream(device))",
        "            self._seen[bucket] = {torch.cuda.current_stream(device)}",
        STEP,
        interprets=True,
    ),
    Mutation(
        "device: parts of other ranks of a node are compiled in a step",
        "peers/warm_up.py",
        "    if is_split:",
        "    if False:",
        STEP,
        interprets=True,
    ),
    Mutation(
        "device: learning rates are read one by one",
        "step/staging.py",
        "iter(torch.cat([part for part in parts if part.device == device]).tolist())",
        "iter([each for part in parts if part.device == device for each in part.tolist()])",
        STEP,
        interprets=True,
    ),
    Mutation(
        "device: a worker on a GPU looks like one of other settings",
        "peers/fingerprint.py",
        'place = f"device {devices.index(param.device)}"',
        'place = f"{param.device}"',
        RANKS,
        interprets=True,
    ),
    Mutation(
        "device: the mean of a node's gradients stays on the host",
        "step/nodes.py",
        "mean.to(param.device) if voters",
        "mean if voters",
        RANKS,
        interprets=True,
    ),
    Mutation(
        "device: a repaired replica keeps what it had",
        "peers/replicas.py",
        "            own.copy_(row)\n        params[column]",
        "            pass\n        params[column]",
        RANKS,
        interprets=True,
    ),
)
