"""Workers of one optimizer in one process, over a simulated network, in virtual time.

    kernel.py     tasks that take turns, and the clock that jumps from one event to the next
    stand_ins.py  what replaces torch.distributed, time, threading, queue and atexit in the package
    network.py    machines, delays, connections that close or go silent
    groups.py     groups of machines, and their collectives made of messages
    distributed.py what stands in for torch.distributed
    store.py      the key-value store through which a group meets
    faults.py     what happens to whom at which message
    plan.py       a schedule, drawn from its seed: settings, delays, faults
    worker.py     one worker: a DistributedLion, trained until its end
    play.py       one schedule, played from its seed
    rules.py      what must be true after every schedule

``python -m simulation --seeds 10000`` plays schedules; ``--seed 17`` one of them, with its story.
"""
