"""Bugs to plant in the kernels for GPUs."""

from __future__ import annotations

from planted import Mutation

BITS = "kernels/gpu/bits.py"
INTERPRETED = ("kernels/test_interpreted.py",)

KERNELS = (
    Mutation(
        "GPU: an inverted coin is drawn as it is",
        BITS,
        "* 0x9E3779B97F4A7C15) ^ inverted",
        "* 0x9E3779B97F4A7C15)",
        INTERPRETED,
        interprets=True,
    ),
    Mutation(
        "GPU: the element behind a parameter is read",
        BITS,
        "tl.load(pointer + inner, mask=inner < left, other=0)",
        "tl.load(pointer + inner, mask=inner <= left, other=0)",
        INTERPRETED,
        interprets=True,
    ),
    Mutation(
        "GPU: the element behind a parameter is written",
        BITS,
        "narrow(value, KIND), mask=inner < left)",
        "narrow(value, KIND), mask=inner <= left)",
        INTERPRETED,
        interprets=True,
    ),
    Mutation(
        "GPU: bfloat16 is cut off, not rounded",
        BITS,
        "rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16",
        "rounded = bits >> 16",
        INTERPRETED,
        interprets=True,
    ),
    Mutation(
        "GPU: halves of a tie between two bfloat16 are rounded up",
        BITS,
        "rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16",
        "rounded = (bits + 0x8000) >> 16",
        INTERPRETED,
        interprets=True,
    ),
    Mutation(
        "GPU: a coin that begins within a word is drawn from its start",
        BITS,
        "if first_bit != 0:",
        "if first_bit < 0:",
        INTERPRETED,
        interprets=True,
    ),
    Mutation(
        "GPU: the mean adds neighbors, not halves",
        "kernels/gpu/encode.py",
        "tl.sum(tl.reshape(sums, (2, LENGTH // 2)), axis=0)",
        "tl.sum(tl.reshape(sums, (LENGTH // 2, 2)), axis=1)",
        INTERPRETED,
        interprets=True,
    ),
    Mutation(
        "GPU: what is not finite is found, but sent",
        "kernels/gpu/encode.py",
        "if tl.load(finite + segment) == 0:",
        "if tl.load(finite + segment) > 1:",
        INTERPRETED,
        interprets=True,
    ),
    Mutation(
        "GPU: stochastic rounding takes no bits of the following word",
        "kernels/gpu/commit.py",
        "    if skipped != 0:",
        "    if skipped < 0:",
        INTERPRETED,
        interprets=True,
    ),
    Mutation(
        "GPU: a worker without gradient loses its momentum to the address 0",
        "kernels/gpu/table.py",
        "grad.data_ptr() if grad is not None else 0",
        "grad.data_ptr() if grad is not None else momentum",
        INTERPRETED,
        interprets=True,
    ),
    Mutation(
        "GPU: absent workers are counted",
        "kernels/gpu/count.py",
        "elif times != 0:",
        "elif times >= 0:",
        INTERPRETED,
        interprets=True,
    ),
    Mutation(
        "GPU: products and sums are fused",
        "kernels/gpu/launch.py",
        '"enable_fp_fusion": False',
        '"enable_fp_fusion": True',
        ("kernels/test_gpu_code.py::test_code_is_exact_and_wide_and_as_recorded",),
    ),
    Mutation(
        "GPU: tensors at odd addresses are read 16 bytes at a time",
        "kernels/gpu/table.py",
        "aligned = (address | momentum | slope) % ALIGN_BYTES == 0",
        "aligned = (address | momentum) % ALIGN_BYTES == 0",
        ("kernels/test_gpu_table.py",),
    ),
)
