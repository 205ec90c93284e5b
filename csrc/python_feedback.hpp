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

// The estimates of one parameter, or something alike, of any shape.
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
    if (estimates.is_none()) {
        return read;
    }
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

inline ScaledBits make_bits(const Packed& votes, std::size_t worker, const float* scales) {
    return {votes.words + worker * votes.n_blocks * votes.n_planes * kBlockWords, votes.n_planes,
            {scales[0], scales[votes.n_planes - 1]}};
}

inline void check_place(const Packed& votes, nb::handle name, std::size_t end_word) {
    if (end_word > votes.n_blocks * kBlockWords) {
        refuse("votes: " + std::to_string(votes.n_blocks) + " blocks, in which " + to_string(name) +
               " has no place");
    }
}

// A row of scales for each of some parameters, and perhaps more.
inline const float* read_rows_of_scales(const TensorReader& tensors, nb::handle scales, std::size_t n_params,
                                        const Packed& votes) {
    const TensorView rows = tensors.read(scales, "scales", {}, Wants::shape);
    if (!is_type(rows.dtype, kFloat, 32) || rows.shape.size() != 2 ||
        static_cast<std::size_t>(rows.shape[0]) < n_params ||
        static_cast<std::size_t>(rows.shape[1]) != votes.n_planes) {
        refuse("scales: expected float32 of shape (" + std::to_string(n_params) + ", " +
               std::to_string(votes.n_planes) + ")");
    }
    return static_cast<const float*>(rows.data);
}

inline Packed read_said(const TensorReader& tensors, nb::handle votes, std::size_t n_dims) {
    const Packed packed = read_packed(tensors, votes, n_dims, "votes");
    check_step_planes(packed);
    return packed;
}

// Parts of a bucket must follow each other, as each is written on its own.
inline void check_order(const Run& part, std::size_t& done) {
    if (part.begin < done) {
        refuse("slots overlap, or are not in the order of their bucket");
    }
    done = part.end;
}

// One worker's vote on each segment.
inline std::vector<ScaledBits> read_bits(const TensorReader& tensors, const SegmentTable& table,
                                         nb::handle votes, nb::handle scales) {
    const Packed packed = read_said(tensors, votes, 3);
    check_room(table, packed.n_blocks);
    const float* rows = read_rows_of_scales(tensors, scales, table.segments.size(), packed);
    std::vector<ScaledBits> said;
    for (std::size_t k = 0; k < table.segments.size(); ++k) {
        said.push_back(make_bits(packed, 0, rows + k * packed.n_planes));
    }
    return said;
}

// One worker's, for the whole bucket.
inline std::vector<Step> read_steps(const TensorReader& tensors, nb::handle estimates, nb::handle slots,
                                    nb::handle present, nb::handle votes, nb::handle scales) {
    const Packed packed = read_said(tensors, votes, 3);
    const std::size_t n_params = nb::len(estimates);
    const float* rows = read_rows_of_scales(tensors, scales, n_params, packed);
    std::vector<Step> steps;
    for (std::size_t k = 0; k < n_params; ++k) {
        if (!nb::cast<bool>(nb::object(present[k]))) {
            continue;
        }
        const nb::object slot = slots[k];
        const nb::object estimate = estimates[k];
        const nb::handle name = item(slot, slot_field::name);
        const std::size_t n_elements = read_size(item(slot, slot_field::n_elements));
        const std::size_t first_word = read_size(item(slot, slot_field::bucket_word));
        steps.push_back({read_estimate(tensors, estimate, "estimate", name, n_elements), n_elements,
                         make_bits(packed, 0, rows + k * packed.n_planes), first_word});
        check_place(packed, name, first_word + steps.back().n_words());
    }
    return steps;
}

// Those of all workers for the blocks at hand.
inline std::vector<Step> read_steps_of_all(const TensorReader& tensors, nb::handle estimates,
                                           nb::handle votes, nb::handle scales, nb::handle present,
                                           nb::handle slots, std::size_t first_block) {
    const Packed packed = read_said(tensors, votes, 4);
    std::vector<std::uint32_t> voters;
    const std::vector<Run> runs =
        read_runs(tensors, present, slots, packed.n_workers, first_block, packed.n_blocks, voters);
    const std::size_t n_row = packed.n_blocks * kBlockWords * kWordElements;
    const std::size_t n_params = count_slots(slots);
    float* values = read_floats(tensors, estimates, "estimates", {packed.n_workers, n_row});
    const float* rows =
        read_floats(tensors, scales, "scales", {packed.n_workers, n_params, packed.n_planes});
    std::vector<Step> steps;
    std::size_t done = 0;
    for (const Run& run : runs) {
        check_order(run, done);
    }
    for (std::size_t worker = 0; worker < packed.n_workers; ++worker) {
        for (const Run& run : runs) {
            if (std::binary_search(run.voters, run.voters + run.n_voters, worker)) {
                const float* row = rows + (worker * n_params + run.param) * packed.n_planes;
                steps.push_back({values + worker * n_row + run.begin * kWordElements, run.n_elements,
                                 make_bits(packed, worker, row), run.begin});
            }
        }
    }
    return steps;
}

inline std::vector<float> read_weights(nb::handle weights, std::size_t n_workers) {
    std::vector<float> read;
    for (nb::handle weight : weights) {
        read.push_back(static_cast<float>(read_double(weight)));
    }
    if (read.size() != n_workers) {
        refuse("weights: given " + std::to_string(read.size()) + ", expected one for each of " +
               std::to_string(n_workers) + " workers");
    }
    return read;
}

// Where the sums of each shard go: (shards, params) float64.
inline double* read_totals(const TensorReader& tensors, nb::handle sums, std::size_t n_params,
                           std::size_t n_blocks, std::size_t& n_shards) {
    const TensorView view = tensors.read(sums, "sums", {}, Wants::shape);
    if (!is_type(view.dtype, kFloat, 64) || view.shape.size() != 2 ||
        static_cast<std::size_t>(view.shape[1]) != n_params) {
        refuse("sums: expected float64 of shape (shards, " + std::to_string(n_params) + ")");
    }
    n_shards = static_cast<std::size_t>(view.shape[0]);
    if (n_shards == 0 ? n_blocks > 0 : n_blocks % n_shards > 0) {
        refuse("sums: " + std::to_string(n_shards) + " shards, into which " + std::to_string(n_blocks) +
               " blocks cannot be cut");
    }
    return static_cast<double*>(view.data);
}

// The sums of all workers' votes, or estimates, for the part of every parameter in each shard at hand.
struct SumTable {
    std::vector<Sum> sums;
    std::vector<Summand> summands;  // sums point into them
    std::size_t n_blocks;
};

inline void read_sums(SumTable& table, const TensorReader& tensors, nb::handle votes, nb::handle scales,
                      nb::handle present, nb::handle slots, std::size_t first_block, nb::handle weights,
                      nb::handle estimates, nb::handle sums) {
    const Packed packed = read_said(tensors, votes, 4);
    const std::size_t n_params = count_slots(slots);
    const std::size_t n_workers = packed.n_workers;
    const std::size_t n_row = packed.n_blocks * kBlockWords * kWordElements;
    const Presence presence = read_presence(tensors, present, n_workers, n_params);
    const std::vector<float> weight = read_weights(weights, n_workers);
    const float* rows = read_floats(tensors, scales, "scales", {n_workers, n_params, packed.n_planes});
    const float* values =
        estimates.is_none() ? nullptr : read_floats(tensors, estimates, "estimates", {n_workers, n_row});
    std::size_t n_shards;
    double* totals = read_totals(tensors, sums, n_params, packed.n_blocks, n_shards);
    std::fill(totals, totals + n_shards * n_params, 0.0);
    const std::size_t first = first_word_of(first_block);
    const std::size_t shard_words = n_shards > 0 ? packed.n_blocks / n_shards * kBlockWords : 0;
    table.n_blocks = packed.n_blocks;
    table.summands.reserve(n_workers * n_params * n_shards);
    std::size_t done = 0;
    for (std::size_t shard = 0; shard < n_shards; ++shard) {
        const std::size_t before = shard * shard_words;
        for (std::size_t k = 0; k < n_params; ++k) {
            Run part{};
            if (!cut_slot(item(slots, static_cast<Py_ssize_t>(k)), first + before,
                          first + before + shard_words, part)) {
                continue;
            }
            part.begin += before;
            part.end += before;
            check_order(part, done);
            bool has_votes = false;
            const Summand* summands = table.summands.data() + table.summands.size();
            for (std::size_t worker = 0; worker < n_workers; ++worker) {
                const std::size_t place = worker * n_params + k;
                ScaledBits said = make_bits(packed, worker, rows + place * packed.n_planes);
                if (presence.read(place) == 0) {
                    said.votes = nullptr;
                }
                has_votes |= said.votes != nullptr;
                table.summands.push_back(
                    {values ? values + worker * n_row + part.begin * kWordElements : nullptr, said, weight[worker]});
            }
            table.sums.push_back({summands, n_workers, part.n_elements, part.begin, part.first_word,
                                  part.first_bit, has_votes, totals + shard * n_params + k});
        }
    }
}

}  // namespace distlion
