"""Bitwise digests of short training runs: proof that a change moved no bit of any training.

    cases.py      the table: rules x patterns x options, and which combinations are invalid
    training.py   one case: parameters and gradients from integers, 20 steps, digests
    ledger.py     play cases in as few launches as possible; compare them with digests.json
    digests.json  for each case: a digest of the parameters, and one of each worker's state

    PYTHONPATH=tests python -m bits check     # which cases differ; WORDS restrict the cases
    PYTHONPATH=tests python -m bits record    # write digests.json again

These files use only names that ``import distlion`` exports. They survive a restructuring unchanged.

A digest may change only with:

- a deliberate change of the arithmetic, the random coins, a rule's default or the layout of
  buckets, which the changelog describes as a change of training results;
- a change of these files: sizes, gradients, hyperparameters, or a case's options.

A refactoring, a faster kernel, another machine, instruction set, number of threads or version of
PyTorch changes no digest. ``record`` then hides a bug.
"""
