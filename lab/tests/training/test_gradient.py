import torch

from distlion_lab.training.gradient import seeded_dropout


def draw(**changes):
    with seeded_dropout(**{"seed": 1, "step": 2, "rank": 3} | changes):
        return torch.rand(8)


def test_draws_depend_on_seed_step_and_rank_alone():
    torch.manual_seed(5)
    first = draw()
    torch.manual_seed(6)
    assert torch.equal(draw(), first)
    for change in ({"seed": 2}, {"step": 3}, {"rank": 4}):
        assert not torch.equal(draw(**change), first)


def test_global_generator_goes_on_as_if_nothing_had_been_drawn():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    draw()
    assert torch.equal(torch.rand(3), expected)
