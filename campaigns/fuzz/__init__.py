"""Random programs over the public API, on real and on virtual workers, judged by one oracle.

file            what it holds
program.py      a program as data, and how one is drawn from a seed
players.py      who plays: a rank, the workers of one process, the equations in numpy
operations.py   steps, and changes that all workers make alike
table.py         the table of operations
states.py       saving, resuming, and loading what must be refused
damage.py        what can happen to files of a checkpoint
alone.py         what one rank does while the others go on: saves, evaluations, pauses
failures.py     what one rank does otherwise than the others: settings, faults, signals
workers.py      processes that live as long as they are well, and play one program after another
judge.py        the oracle of every outcome
campaign.py     many programs; a failing one with what can be dropped dropped
found.py        programs that have found something
"""
