"""Bugs to plant in votes on cautious directions."""

from __future__ import annotations

from planted import Mutation

REFERENCE = "kernels/reference.py"

CAUTIOUS = (
    Mutation(
        "cautious: elements whose signs differ are kept, and the others masked",
        REFERENCE,
        "((c > 0) & (g > 0)) | ((c < 0) & (g < 0)), c, 0.0)",
        "((c > 0) & (g > 0)) | ((c < 0) & (g < 0)), 0.0, c)",
        ("kernels/test_conformance_encode.py",),
    ),
    Mutation(
        "cautious: a mask hides a NaN",
        REFERENCE,
        "finite = c.to(dtype).isfinite().all()",
        "finite = _mask(c, segment, grad).to(dtype).isfinite().all()",
        ("kernels/test_conformance_encode.py",),
    ),
    Mutation(
        "cautious: workers may differ in it",
        "step/hyperparameters.py",
        """            f"cautious of group {number}: {group.get('cautious')!r}",\n""",
        "",
        ("distributed/test_disagreement.py",),
    ),
    Mutation(
        "cautious: it is not handed to the arithmetic",
        "step/hyperparameters.py",
        'group.get("cautious", False),',
        "False,",
        ("optim/test_lion.py",),
    ),
    Mutation(
        "cautious: diagnoses look at directions without the mask",
        "step/diagnostics.py",
        "if hyper.cautious:",
        "if False:",
        ("step/test_diagnostics.py",),
    ),
    Mutation(
        "GPU: cautious directions are not masked",
        "kernels/gpu/bits.py",
        "if tl.load(numbers + CAUTIOUS) != 0:",
        "if tl.load(numbers + CAUTIOUS) > 1:",
        ("kernels/test_interpreted.py",),
        interprets=True,
    ),
    Mutation(
        "masked: a gradient of 0 takes the coin of its direction",
        REFERENCE,
        "_sign_words(g, segment.slot, zero.second)",
        "_sign_words(g, segment.slot, zero)",
        ("kernels/test_conformance_encode.py",),
    ),
    Mutation(
        "masked: gradients are not asked",
        "kernels/counting.py",
        "torch.where(directions * gradients > 0, directions, 0)",
        "directions",
        ("kernels/test_conformance_count.py",),
    ),
    Mutation(
        "masked: workers vote on directions and whether they are 0",
        "votes/masked.py",
        "kernels.encode_pairs(segments, coins.zero, out=out)",
        "kernels.encode_ternary(segments, out=out)",
        ("votes/test_rule_contract.py",),
    ),
    Mutation(
        "masked: the gradient's plane is taken for one of zeros",
        "votes/masked.py",
        "kernels.count_pairs(votes, tie, out=out)",
        "kernels.count_signs(votes, tie, out=out)",
        ("votes/test_rule_contract.py",),
    ),
    Mutation(
        "masked: pairs are added up as levels of two bits",
        "kernels/contract.py",
        "return self in (VoteFormat.LEVEL, VoteFormat.TERNARY)",
        "return self in (VoteFormat.LEVEL, VoteFormat.TERNARY, VoteFormat.PAIR)",
        ("votes/test_rule_contract.py",),
    ),
    Mutation(
        "GPU: a gradient of 0 takes the coin of its direction",
        "kernels/gpu/bits.py",
        "        key = mix(key)\n",
        "        key = key\n",
        ("kernels/test_interpreted.py",),
        interprets=True,
    ),
    Mutation(
        "GPU: directions are counted twice, and gradients not",
        "kernels/gpu/count.py",
        "second = add_votes(second, votes + 16,",
        "second = add_votes(second, votes,",
        ("kernels/test_interpreted.py",),
        interprets=True,
    ),
)
