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
        "options/diagnostics.py",
        "if hyper.cautious:",
        "if False:",
        ("options/test_diagnostics.py",),
    ),
    Mutation(
        "GPU: cautious directions are not masked",
        "kernels/gpu/bits.py",
        "if tl.load(numbers + CAUTIOUS) != 0:",
        "if tl.load(numbers + CAUTIOUS) > 1:",
        ("kernels/test_interpreted.py",),
        interprets=True,
    ),
)
