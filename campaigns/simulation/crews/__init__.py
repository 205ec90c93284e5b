"""Crews in the simulation: members come and go, over a store on a machine of its own.

plan.py         a schedule, drawn from its seed: settings, who comes when, what goes wrong
network.py      machines, one of which keeps the store, and the connections to it
distributed.py  what stands in for torch.distributed: process groups that come and go
faults.py       what happens to whom at which message, request or commit
worker.py       one worker: a Crew and its optimizer, trained to its goal
estimates.py    what votes with error feedback have said, at both ends
play.py         one schedule, played from its seed
rules.py        what must be true after every schedule

"""
