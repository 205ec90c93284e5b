// The only file that makes a Python module, of the ops in python_core.hpp.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "python_core.hpp"
#include "python_makes.hpp"

namespace {

using namespace distlion;

std::vector<std::string> name_instruction_sets() {
    InstructionSet found[kMaxInstructionSets];
    const std::size_t n = list_instruction_sets(found);
    std::vector<std::string> names;
    for (std::size_t k = 0; k < n; ++k) {
        names.emplace_back(found[k].name);
    }
    return names;
}

}  // namespace

NB_MODULE(_cpu, m) {
    using namespace nb::literals;
    // The kernels that were chosen live as long as the process.
    nb::set_leak_warnings(false);
    m.doc() = "The CPU core: C++ loops over packed votes. Use distlion.kernels.cpu.";
    m.def("instruction_sets", &name_instruction_sets,
          "Names of the instruction sets that this machine runs, the plainest first.");
    nb::class_<SegmentTable>(m, "SegmentTable", "The segments of a bucket, read once for several ops.");
    nb::class_<Makes>(m, "Makes", "The makes of tensors, to compare others with in one call.")
        .def(nb::init<nb::typed<nb::list, nb::object>, nb::object>(), "tensors"_a, "exchange_api"_a.none())
        .def("fit", &Makes::fit, "tensors"_a, "may_be_none"_a);
    nb::class_<Core>(m, "Core", "The ops of reference.Kernels, for one instruction set.")
        .def(nb::init<const std::string&, nb::object>(), "instruction_set"_a, "exchange_api"_a.none())
        .def("read_segments", &Core::read_segments, "segments"_a)
        .def("encode_signs", &Core::encode_signs, "segments"_a, "key"_a, "inverted"_a, "out"_a, "finite"_a,
             "threads"_a)
        .def("encode_ternary", &Core::encode_ternary, "segments"_a, "out"_a, "finite"_a, "threads"_a)
        .def("encode_pairs", &Core::encode_pairs, "segments"_a, "key"_a, "inverted"_a, "out"_a, "finite"_a,
             "threads"_a)
        .def("encode_levels", &Core::encode_levels, "segments"_a, "key"_a, "inverted"_a, "is_l1"_a,
             "step"_a, "out"_a, "finite"_a, "threads"_a)
        .def("encode_directions", &Core::encode_directions, "segments"_a, "is_bfloat16"_a, "out"_a,
             "finite"_a, "threads"_a)
        .def("encode_rests", &Core::encode_rests, "table"_a, "segments"_a, "estimates"_a.none(),
             "are_residuals"_a, "key"_a, "inverted"_a, "out"_a, "scales"_a, "finite"_a, "threads"_a)
        .def("encode_lots", &Core::encode_lots, "table"_a, "reach"_a, "spread"_a.none(), "key"_a,
             "inverted"_a, "out"_a, "scales"_a, "finite"_a, "threads"_a)
        .def("move_residuals", &Core::move_residuals, "table"_a, "segments"_a, "residuals"_a, "votes"_a,
             "scales"_a, "finite"_a, "threads"_a)
        .def("add_steps", &Core::add_steps, "estimates"_a, "slots"_a, "present"_a, "votes"_a, "scales"_a,
             "threads"_a)
        .def("add_steps_of_all", &Core::add_steps_of_all, "estimates"_a, "votes"_a, "scales"_a,
             "present"_a, "slots"_a, "first_block"_a, "threads"_a)
        .def("count_steps", &Core::count_steps, "votes"_a, "scales"_a, "present"_a, "slots"_a,
             "first_block"_a, "weights"_a, "estimates"_a.none(), "key"_a, "inverted"_a, "out"_a, "sums"_a,
             "threads"_a)
        .def("check_finite", &Core::check_finite, "segments"_a, "finite"_a, "threads"_a)
        .def("count_signs", &Core::count_with_coin<Tally::signs, 1, 1>, "votes"_a, "present"_a, "slots"_a,
             "first_block"_a, "key"_a, "inverted"_a, "out"_a, "threads"_a)
        .def("count_signs_or_zero", &Core::count_without_coin<Tally::signs_or_zero, 1, 2>, "votes"_a, "present"_a,
             "slots"_a, "first_block"_a, "out"_a, "threads"_a)
        .def("count_ternary", &Core::count_without_coin<Tally::ternary, 2, 2>, "votes"_a, "present"_a,
             "slots"_a, "first_block"_a, "out"_a, "threads"_a)
        .def("count_pairs", &Core::count_with_coin<Tally::pairs, 2, 2>, "votes"_a, "present"_a, "slots"_a,
             "first_block"_a, "key"_a, "inverted"_a, "out"_a, "threads"_a)
        .def("count_pairs_or_zero", &Core::count_without_coin<Tally::pairs_or_zero, 2, 2>, "votes"_a,
             "present"_a, "slots"_a, "first_block"_a, "out"_a, "threads"_a)
        .def("count_ones", &Core::count_without_coin<Tally::ones, 1, 0>, "votes"_a, "present"_a,
             "slots"_a, "first_block"_a, "out"_a, "threads"_a)
        .def("count_levels", &Core::count_with_coin<Tally::levels, 1, 8>, "votes"_a, "present"_a, "slots"_a,
             "first_block"_a, "key"_a, "inverted"_a, "out"_a, "threads"_a)
        .def("sum_directions", &Core::sum_directions, "votes"_a, "present"_a, "slots"_a, "first_block"_a,
             "is_bfloat16"_a, "out"_a, "threads"_a)
        .def("commit", &Core::commit, "segments"_a, "present"_a, "reply"_a, "reply_format"_a,
             "rounding"_a.none(), "threads"_a)
        .def("update_momentum", &Core::update_momentum, "segments"_a, "present"_a, "threads"_a)
        .def("step_alone", &Core::step_alone, "segments"_a, "rounding"_a.none(), "threads"_a)
        .def("add_outer_momentum", &Core::add_outer_momentum, "params"_a, "starts"_a, "buffers"_a,
             "momentum"_a, "nesterov"_a, "lr"_a, "threads"_a)
        .def("digests", &Core::digests, "tensors"_a, "out"_a, "threads"_a)
        .def("square_sums", &Core::square_sums, "tensor"_a, "out"_a, "threads"_a)
        .def("write_frames", &Core::write_frames, "out"_a, "front"_a, "payloads"_a, "checksum_at"_a,
             "threads"_a)
        .def("read_frames", &Core::read_frames, "rows"_a, "heads"_a, "mask"_a, "checksum_at"_a,
             "presence_at"_a, "has_counts"_a, "intact"_a, "present"_a, "threads"_a)
        .def("stream_encode", &Core::stream_encode, "grad"_a, "exp_avg"_a, "out"_a, "threads"_a)
        .def("stream_commit", &Core::stream_commit, "grad"_a, "exp_avg"_a, "param"_a, "reply"_a.none(),
             "threads"_a);
}
