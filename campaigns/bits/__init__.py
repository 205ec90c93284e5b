"""Bitwise digests of short training runs: proof that a change moved no bit of any training.

    cases.py           the tables: rules x patterns x options, and which combinations are invalid
    training.py        a case of DistributedLion: parameters and gradients from integers, 20 steps
    local_training.py  a case of LocalSteps, or of a server and its clients
    crew_training.py   a case of a crew: a worker leaves, and returns as a new one
    products.py        matrix products that every machine rounds alike
    ledger.py          play cases in as few launches as possible; compare them with digests.json
    against.py         play cases with this library and with that of another checkout
    digests.json       for each case: a digest of the parameters, and one of each worker's state

    export PYTHONPATH=tests:campaigns
    python -m bits check     # which cases differ; WORDS restrict the cases
    python -m bits record    # write digests.json again
    python -m bits compare --against FOLDER    # all cases, without records

These files use only names that ``import distlion`` exports. They survive a restructuring unchanged.

A digest may change only with:

- a deliberate change of the arithmetic, the random coins, a rule's default or the layout of
  buckets, which the changelog describes as a change of training results;
- a change of these files: sizes, gradients, hyperparameters, or a case's options.

A refactoring, a faster kernel, another machine, instruction set, number of threads or version of
PyTorch changes no digest. ``record`` then hides a bug.

Torch's optimizers and matrix products are rounded differently by other machines. Cases with them
are machine-bound and have no record: all their patterns must agree, and ``compare`` plays them with
two checkouts on one machine. Orthogonalized directions have records with products.py instead of
torch's products. A change of how the library multiplies matrices is thus seen by ``compare`` alone.
"""
