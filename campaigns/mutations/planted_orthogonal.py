"""Bugs of orthogonalized directions, and of the groups that are made for them."""

from __future__ import annotations

from planted import Mutation

FILE = "kernels/orthogonal.py"
GROUPS = "optim/param_groups.py"
OF_KERNELS = "kernels/test_orthogonal.py::test_"
OF_GROUPS = "optim/test_param_groups.py::test_"
OF_VOTES = "distributed/test_orthogonal_votes.py::test_"
BITS = f"{OF_VOTES}virtual_workers_have_the_bits_of_a_plain_loop[majority]"
REAL_BITS = f"{OF_VOTES}votes_have_the_bits_of_a_plain_loop[3]"
QUINTIC = f"{OF_KERNELS}singular_values_follow_the_quintic_from_the_frobenius_norm"
COMPANY = f"{OF_KERNELS}a_direction_on_a_cpu_does_not_depend_on_the_others_in_its_bucket"
HIDDEN = f"{OF_GROUPS}hidden_matrices_alone_are_orthogonalized"

ORTHOGONAL = (
    Mutation(
        "orthogonal: signs are orthogonalized, in place of directions",
        FILE,
        "return [orthogonalize(matrix) for matrix in matrices]",
        "return [orthogonalize(matrix.sign()) for matrix in matrices]",
        (BITS,),
    ),
    Mutation(
        "orthogonal: a tall matrix is not transposed back but read as it lies",
        FILE,
        "result: Tensor = x.mT if is_tall else x",
        "result: Tensor = x.reshape(matrices.shape)",
        (QUINTIC,),
    ),
    Mutation(
        "orthogonal: momenta are orthogonalized, and gradients ignored",
        FILE,
        "alone = segment._replace(",
        "alone = segment._replace(grad=segment.exp_avg, ",
        (BITS,),
    ),
    Mutation(
        "orthogonal: products on a CPU are batched, and round as the bucket is large",
        FILE,
        "whole = orthogonalize_batch(directions, shapes[batch[0]])",
        "(c,) = (each.view(shapes[batch[0]]) for each in directions)\n"
        "        whole = [orthogonalize(c.repeat(len(chosen), 1, 1))[1 % len(chosen)]]",
        (COMPANY,),
    ),
    Mutation(
        "orthogonal: matrices of a batch, as of several workers, share a norm",
        FILE,
        "torch.linalg.matrix_norm(x, keepdim=True)",
        "torch.linalg.vector_norm(x)",
        (f"{OF_KERNELS}a_batch_orthogonalizes_each_matrix_by_itself",),
    ),
    Mutation(
        "orthogonal: the direction of the step before is encoded",
        "votes/bucket_vote.py",
        "                segments = orthogonalize_directions(kernels, segments)\n",
        "                fresh = orthogonalize_directions(kernels, segments)\n"
        '                segments, self._kept = getattr(self, "_kept", fresh), fresh\n',
        (REAL_BITS,),
    ),
    Mutation(
        "orthogonal: a convolution has a row for each pair of channels",
        FILE,
        "rows, columns = shape[0], math.prod(shape[1:])",
        "rows, columns = math.prod(shape[: max(1, len(shape) - 2)]), math.prod(shape[-2:])\n"
        "    columns = columns if len(shape) > 2 else shape[1]",
        (f"{OF_KERNELS}a_convolution_is_a_row_for_each_output",),
    ),
    Mutation(
        "orthogonal: the spectral norm divides, and not Frobenius'",
        FILE,
        "torch.linalg.matrix_norm(x, keepdim=True)",
        "torch.linalg.matrix_norm(x, 2, keepdim=True)",
        (QUINTIC,),
    ),
    Mutation(
        "orthogonal: one worker moves other parameters before it multiplies matrices",
        "step/alone.py",
        "        moves.append((kernels, plain, encode_alone(kernels, matrices)))\n",
        "        kernels.step_alone(plain, rounding=rounding)\n"
        "        moves.append((kernels, [], encode_alone(kernels, matrices)))\n",
        (f"{OF_KERNELS}a_step_without_memory_for_a_matrix_writes_nothing",),
    ),
    Mutation("orthogonal: four iterations", FILE, "ITERATIONS = 5", "ITERATIONS = 4", (QUINTIC,)),
    Mutation(
        "orthogonal: diagnoses look at directions before",
        "step/diagnostics.py",
        "[voted] = orthogonalize_directions(kernels, [given])",
        "voted = given",
        (
            "step/test_diagnostics.py::"
            "test_agreement_on_a_matrix_is_that_of_orthogonalized_directions",
        ),
    ),
    Mutation(
        "orthogonal: a matrix that is not finite votes",
        FILE,
        "return c.masked_fill_(~finite, math.nan)",
        "return c.nan_to_num_()",
        (
            "distributed/test_orthogonal_options.py::"
            "test_virtual_workers_have_the_bits_of_a_plain_loop[abstains]",
        ),
    ),
    Mutation(
        "groups: an embedding is a hidden matrix",
        GROUPS,
        "is_matrix = id(param) in hidden and id(param) not in outside",
        "is_matrix = param.ndim > 1 and (id(param) in hidden) == (id(param) not in outside)",
        (f"{HIDDEN}[make_gpt2]",),
    ),
    Mutation(
        "groups: a layer that is tied to an embedding is a hidden matrix",
        GROUPS,
        "modules: list[nn.Module] = [*embeddings, *_find_heads(model, head)]",
        "modules: list[nn.Module] = [*_find_heads(model, head)]",
        (f"{OF_GROUPS}a_weight_tied_to_an_embedding_is_never_orthogonalized",),
    ),
    Mutation(
        "groups: the last linear layer is always the head",
        GROUPS,
        "return [] if is_hidden else [linear[-1]]",
        "return [linear[-1]]",
        (f"{HIDDEN}[make_functional_titan]",),
    ),
    Mutation(
        "groups: a head with the shape of a hidden layer is hidden too",
        GROUPS,
        " and shapes[-1] not in embedded",
        "",
        (f"{HIDDEN}[make_byte_gpt]",),
    ),
    Mutation(
        "groups: without an embedding no layer that has a twin is the head",
        GROUPS,
        "is_hidden = embedded and shapes.count",
        "is_hidden = shapes.count",
        (f"{HIDDEN}[make_even_mlp]",),
    ),
)
