// How estimates and scales of votes with error feedback are read from Python.

#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "core.hpp"
#include "python_votes.hpp"

namespace distlion {

// A float32 tensor of some shape.
inline float* read_floats(const TensorReader& tensors, nb::handle tensor, const char* what,
                          const std::vector<std::size_t>& shape) {
    const TensorView view = tensors.read(tensor, what, {}, Wants::shape);
    const bool fits = std::equal(view.shape.begin(), view.shape.end(), shape.begin(), shape.end(),
                                 [](std::int64_t given, std::size_t expected) {
                                     return static_cast<std::size_t>(given) == expected;
                                 });
    if (!is_type(view.dtype, kFloat, 32) || !fits) {
        std::string expected;
        for (const std::size_t size : shape) {
            expected += (expected.empty() ? "" : ", ") + std::to_string(size);
        }
        refuse(std::string(what) + ": expected float32 of shape (" + expected + ")");
    }
    return static_cast<float*>(view.data);
}

// The estimates of one parameter, of any shape.
inline float* read_estimate(const TensorReader& tensors, nb::handle tensor, const char* what,
                            nb::handle name, std::size_t n_elements) {
    const TensorView view = tensors.read(tensor, what, name);
    if (!is_type(view.dtype, kFloat, 32) || view.n_elements != n_elements) {
        refuse(describe(what, name) + ": expected float32, " + std::to_string(n_elements) + " elements");
    }
    return static_cast<float*>(view.data);
}

// Copies with their estimates; `segments` are those that the table was read from.
inline std::vector<Segment> read_estimates(const TensorReader& tensors, const SegmentTable& table,
                                           nb::handle segments, nb::handle estimates) {
    std::vector<Segment> read = table.segments;
    if (nb::len(estimates) != read.size()) {
        refuse("estimates: given " + std::to_string(nb::len(estimates)) + ", expected one for each of " +
               std::to_string(read.size()) + " segments");
    }
    for (std::size_t k = 0; k < read.size(); ++k) {
        const nb::object segment = segments[k];
        const nb::object estimate = estimates[k];
        const nb::handle name = item(item(segment, segment_field::slot), slot_field::name);
        read[k].estimate = read_estimate(tensors, estimate, "estimate", name, read[k].n_elements);
    }
    return read;
}

inline void check_step_planes(const Packed& votes) {
    if (votes.n_planes < 1 || votes.n_planes > 2) {
        refuse("votes: they have " + std::to_string(votes.n_planes) + " planes");
    }
}

inline Step make_step(const float* estimates, float* out, std::size_t n_elements,
                      const std::uint64_t* votes, std::size_t first_word, const float* scales,
                      std::size_t n_planes) {
    return {estimates, out, n_elements, votes, first_word, n_planes, {scales[0], scales[n_planes - 1]}};
}

// One worker's, for the whole bucket. Where `out` is the estimates' own tensor, it has no vote.
inline std::vector<Step> read_steps(const TensorReader& tensors, nb::handle estimates, nb::handle slots,
                                    nb::handle votes, nb::handle scales, nb::handle out) {
    const Packed packed = read_packed(tensors, votes, 3, "votes");
    check_step_planes(packed);
    const TensorView rows = tensors.read(scales, "scales", {}, Wants::shape);
    const std::size_t n_params = nb::len(estimates);
    if (!is_type(rows.dtype, kFloat, 32) || rows.shape.size() != 2 ||
        static_cast<std::size_t>(rows.shape[0]) < n_params ||
        static_cast<std::size_t>(rows.shape[1]) != packed.n_planes) {
        refuse("scales: expected float32 of shape (" + std::to_string(n_params) + ", " +
               std::to_string(packed.n_planes) + ")");
    }
    std::vector<Step> steps;
    for (std::size_t k = 0; k < n_params; ++k) {
        const nb::object estimate = estimates[k];
        const nb::object target = out[k];
        if (estimate.is(target)) {
            continue;
        }
        const nb::object slot = slots[k];
        const nb::handle name = item(slot, slot_field::name);
        const std::size_t n_elements = read_size(item(slot, slot_field::n_elements));
        const std::size_t first_word = read_size(item(slot, slot_field::bucket_word));
        const float* before = read_estimate(tensors, estimate, "estimate", name, n_elements);
        float* after = read_estimate(tensors, target, "out", name, n_elements);
        steps.push_back(make_step(before, after, n_elements, packed.words, first_word,
                                  static_cast<const float*>(rows.data) + k * packed.n_planes,
                                  packed.n_planes));
        if (first_word + steps.back().n_words() > packed.n_blocks * kBlockWords) {
            refuse("votes: " + std::to_string(packed.n_blocks) + " blocks, in which " + to_string(name) +
                   " has no place");
        }
    }
    return steps;
}

// Those of all workers for the blocks at hand, and copies of what lies between, unless it is there: `out`
// may be the estimates themselves.
inline std::vector<Step> read_steps_of_all(const TensorReader& tensors, nb::handle estimates,
                                           nb::handle votes, nb::handle scales, nb::handle present,
                                           nb::handle slots, std::size_t first_block, nb::handle out) {
    const Packed packed = read_packed(tensors, votes, 4, "votes");
    check_step_planes(packed);
    std::vector<std::uint32_t> voters;
    const std::vector<Run> runs =
        read_runs(tensors, present, slots, packed.n_workers, first_block, packed.n_blocks, voters);
    const std::size_t worker_words = packed.n_blocks * kBlockWords;
    const std::size_t n_row = worker_words * kWordElements;
    const std::size_t n_params = nb::len(slots);
    const float* values = read_floats(tensors, estimates, "estimates", {packed.n_workers, n_row});
    float* after = read_floats(tensors, out, "out", {packed.n_workers, n_row});
    const float* rows =
        read_floats(tensors, scales, "scales", {packed.n_workers, n_params, packed.n_planes});
    for (std::size_t k = 1; k < runs.size(); ++k) {
        if (runs[k].begin < runs[k - 1].end) {
            refuse("slots overlap, or are not in the order of their bucket");
        }
    }
    std::vector<Step> steps;
    for (std::size_t worker = 0; worker < packed.n_workers; ++worker) {
        std::size_t done = 0;
        const auto copy_until = [&](std::size_t end) {
            if (done < end && after != values) {
                steps.push_back({values + done, after + done, end - done});
            }
        };
        for (const Run& run : runs) {
            const std::size_t start = run.begin * kWordElements;
            if (std::binary_search(run.voters, run.voters + run.n_voters, worker)) {
                copy_until(start);
                steps.push_back(make_step(values + start, after + start, run.n_elements,
                                          packed.words + worker * worker_words * packed.n_planes,
                                          run.begin, rows + run.param * packed.n_planes,
                                          packed.n_planes));
                done = start + run.n_elements;
            }
        }
        copy_until(n_row);
        values += n_row;
        after += n_row;
        rows += n_params * packed.n_planes;
    }
    return steps;
}

}  // namespace distlion
