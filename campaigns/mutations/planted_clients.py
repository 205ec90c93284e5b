"""Bugs of votes that come from clients."""

from __future__ import annotations

from planted import Mutation

BALLOT, COUNT, SERVER = "flower/ballot.py", "flower/count.py", "flower/server.py"
REFUSALS, VIRTUAL = "flower/refusals.py", "flower/virtual.py"
SERVED = ("flower/test_vote_server.py",)
CAST = ("flower/test_ballot.py",)
FUZZED = ("flower/test_fuzzed_ballots.py",)
FINITE = ("flower/test_finite_servers.py",)
UNTRAINED = ("flower/test_untrained_arrays.py",)
ROUNDS = ("flower/test_virtual_clients.py",)

CLIENTS = (
    Mutation(
        "clients: running statistics are voted on",
        "flower/places.py",
        "if statistics := list_statistics(params):",
        "if statistics := list_statistics(()):",
        SERVED,
    ),
    Mutation(
        "clients: a second vote counts in place of the first",
        SERVER,
        "        if node in current.ballots:\n            return Refusal.SECOND\n",
        "",
        SERVED,
    ),
    Mutation(
        "clients: who was not asked may vote",
        SERVER,
        "or node not in current.asked",
        "or node < 0",
        SERVED,
    ),
    Mutation(
        "clients: a ballot may name another node",
        SERVER,
        "or ballot.node != node",
        "or ballot.node < 0",
        SERVED,
    ),
    Mutation(
        "clients: a void round moves the momentum",
        SERVER,
        "        if enough:\n            diverged = self._commit(",
        "        votes = votes or [1] * len(ballots)\n"
        "        if ballots:\n            diverged = self._commit(",
        SERVED,
    ),
    Mutation(
        "clients: ballots count in the order of their arrival",
        SERVER,
        "nodes = sorted(current.ballots)",
        "nodes = list(current.ballots)",
        SERVED,
    ),
    Mutation(
        "clients: the reach of this round is used in place of the one that was sent",
        SERVER,
        "current.call.reach or reach",
        "reach",
        SERVED,
    ),
    Mutation(
        "clients: the median is the upper one",
        COUNT,
        "(len(numbers) - 1) // 2",
        "len(numbers) // 2",
        SERVED,
    ),
    Mutation(
        "clients: a site's own scale has no bound",
        COUNT,
        ".minimum(largest)",
        "",
        SERVED,
    ),
    Mutation(
        "clients: the sum of votes may be too large for float32",
        COUNT,
        "if sum(votes) > MOST_VOTES:",
        "if sum(votes) > MOST_VOTES**4:",
        SERVED,
    ),
    Mutation(
        "clients: a move out of a dtype's range is committed",
        SERVER,
        "if not (moved[-1][1].isfinite().all() and momentum.isfinite().all()):",
        "if not momentum.isfinite().all():",
        FINITE,
    ),
    Mutation(
        "clients: parameters before the one that diverges move",
        SERVER,
        "                return name\n        for param, after, _ in moved:\n"
        "            param.copy_(after)\n",
        "                return name\n            param.copy_(moved[-1][1])\n",
        FINITE,
    ),
    Mutation(
        "clients: a state of a larger model is loaded in part",
        SERVER,
        "if sizes != expected or others or",
        "if sizes != expected or",
        FINITE,
    ),
    Mutation(
        "clients: a state that is not finite is loaded",
        SERVER,
        "        if not finite:\n",
        "        if finite is None:\n",
        FINITE,
    ),
    Mutation(
        "clients: the largest scale decides how far an array moves",
        SERVER,
        "sent.median(0).values",
        "sent.max(0).values",
        UNTRAINED,
    ),
    Mutation(
        "clients: an array that does not move is named each round",
        SERVER,
        "        self._untrained.update(new)\n",
        "",
        UNTRAINED,
    ),
    Mutation(
        "clients: a reach that is not finite is voted with",
        BALLOT,
        "numbers = (self.round, self.spread, *self.reach)",
        "numbers = (self.round, self.spread)",
        CAST,
    ),
    Mutation(
        "clients: a checksum is not looked at",
        REFUSALS,
        "or ballot.checksum != expected",
        "",
        FUZZED,
    ),
    Mutation(
        "clients: True is taken for a round",
        REFUSALS,
        " and not isinstance(value, bool)",
        "",
        FUZZED,
    ),
    Mutation(
        "clients: infinite scales are believed",
        REFUSALS,
        "math.isfinite(scale) and 0 <= scale <= max_scale",
        "0 <= scale",
        SERVED,
    ),
    Mutation(
        "clients: residuals move before a delta is known to be finite",
        BALLOT,
        "    flags = finite.tolist()\n",
        "    vote.note()\n    [own.copy_(moved[RESIDUAL]) for own, moved in zip(residuals, kept)]\n"
        "    flags = finite.tolist()\n",
        CAST,
    ),
    Mutation(
        "clients: what a vote rounded away is forgotten",
        BALLOT,
        "    vote.note()\n    for",
        "    for",
        CAST,
    ),
    Mutation(
        "clients: a stochastic sign uses its own reach",
        BALLOT,
        "            reach=self.reach,\n",
        "",
        CAST,
    ),
    Mutation(
        "clients: a lost client stays in the model",
        VIRTUAL,
        "            param.copy_(self.server.params[name])",
        "            param",
        ROUNDS,
    ),
    Mutation(
        "clients: a refused vote moves the residual",
        VIRTUAL,
        "kept = [each.clone() for each in found]",
        "kept = found",
        ROUNDS,
    ),
)
