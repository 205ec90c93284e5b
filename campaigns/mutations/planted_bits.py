"""Bugs to plant that leave replicas equal and training sound: only recorded bits tell."""

from __future__ import annotations

from planted import Mutation

RECORDED = ("bits/test_bits.py::test_a_sample_has_the_recorded_bits",)

BITS = (
    Mutation(
        "bits: coins of ties have the key of another domain",
        "kernels/coin.py",
        "return self._paired(TIE_DOMAIN)",
        "return self._paired(TIE_DOMAIN + 77)",
        RECORDED,
    ),
    Mutation(
        "bits: coins of zeros have the key of the next worker",
        "kernels/coin.py",
        "return self._paired(ZERO_DOMAIN + self.voter)",
        "return self._paired(ZERO_DOMAIN + self.voter + 1)",
        RECORDED,
    ),
    Mutation(
        "momenta are averaged a step late",
        "step/momentum.py",
        "return (step + 1) % self.every == 0",
        "return step % self.every == 0",
        ("step/test_momentum_sync.py",),
    ),
    Mutation(
        "a row of momenta has no limit",
        "step/momentum.py",
        "if n_elements > _ROW_ELEMENTS:",
        "if n_elements > _ROW_ELEMENTS and not rows:",
        ("step/test_momentum_sync.py",),
    ),
    Mutation(
        "bits: momenta are rounded to the mean of what was sent",
        "step/momentum.py",
        "mean = row + (mean - self.decode(self.encode(row)))",
        "mean = mean + 0 * row",
        RECORDED,
    ),
    Mutation(
        "bits: momenta move with the wrong beta where votes are summed in parts",
        "optim/distributed_lion.py",
        "coefficients=numbers.coefficients,",
        "coefficients=[\n"
        "                each._replace(beta2=each.beta1)\n"
        "                if getattr(settings.exchange, 'counts_in_parts', False)\n"
        "                else each\n"
        "                for each in numbers.coefficients\n"
        "            ],",
        RECORDED,
    ),
    Mutation(
        "bits: the weights of votes are ignored",
        "votes/roster.py",
        "times = torch.tensor(self.weights, ",
        "times = torch.tensor([1] * len(present), ",
        RECORDED,
    ),
    Mutation(
        "bits: the momentum of outcomes is weighed once more",
        "local/outer_step.py",
        "momentum=step.momentum, nesterov",
        "momentum=step.momentum**2, nesterov",
        RECORDED,
    ),
    Mutation(
        "bits: matrices take one iteration less",
        "kernels/orthogonal.py",
        "ITERATIONS = 5",
        "ITERATIONS = 4",
        RECORDED,
    ),
)
