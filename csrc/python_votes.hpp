// How packed votes, replies and what is said of them are read from Python.

#pragma once

#include <numeric>
#include <string>
#include <vector>

#include "core.hpp"
#include "python_segments.hpp"

namespace distlion {

// A packed tensor: (..., blocks, planes, 8) int64.
struct Packed {
    std::uint64_t* words;
    std::size_t n_workers, n_blocks, n_planes;
};

inline DType direction_type(bool is_bfloat16) {
    return is_bfloat16 ? DType::bfloat16 : DType::float32;
}

inline ReplyFormat read_format(const std::string& name) {
    if (name == "sign") return ReplyFormat::sign;
    if (name == "ternary") return ReplyFormat::ternary;
    if (name == "count") return ReplyFormat::count;
    refuse("reply_format is '" + name + "', expected 'sign', 'ternary' or 'count'");
}

// `rounding` is (key, inverted) of a coin, or None.
inline void set_rounding(Commitment& commitment, nb::handle rounding) {
    if (!rounding.is_none()) {
        commitment.rounds_stochastically = true;
        commitment.rounding = {read_unsigned(item(rounding, 0)), nb::cast<bool>(item(rounding, 1))};
    }
}

struct PlaneRange {
    std::size_t least, most;
};

// Where `n` numbers of 64 bits go.
inline void* read_numbers(const TensorReader& tensors, nb::handle out, const char* what, std::size_t n) {
    const TensorView view = tensors.read(out, what, {});
    if (!is_type(view.dtype, kInt, 64) || view.n_elements != n) {
        refuse(std::string(what) + ": expected int64, " + std::to_string(n) + " elements");
    }
    return view.data;
}

inline float* read_stream(const TensorReader& tensors, nb::handle tensor, std::size_t n_words) {
    const TensorView view = tensors.read(tensor, "tensor", {});
    if (!is_type(view.dtype, kFloat, 32) || view.n_elements != n_words * kWordElements) {
        refuse("expected float32, 64 elements for a word");
    }
    return static_cast<float*>(view.data);
}

inline Packed read_packed(const TensorReader& tensors, nb::handle tensor, std::size_t n_dims,
                          const char* what) {
    const TensorView view = tensors.read(tensor, what, {}, Wants::shape);
    if (!is_type(view.dtype, kInt, 64) || view.shape.size() != n_dims ||
        view.shape.back() != static_cast<std::int64_t>(kBlockWords)) {
        refuse(std::string(what) + ": expected int64 of shape (" +
               (n_dims == 4 ? "workers, " : "") + "blocks, planes, 8)");
    }
    return {static_cast<std::uint64_t*>(view.data),
            n_dims == 4 ? static_cast<std::size_t>(view.shape[0]) : 1,
            static_cast<std::size_t>(view.shape[n_dims - 3]),
            static_cast<std::size_t>(view.shape[n_dims - 2])};
}

// Where the segments of a bucket are encoded to.
inline Packed read_out(const TensorReader& tensors, nb::handle out, PlaneRange planes,
                       const SegmentTable& segments) {
    const Packed packed = read_packed(tensors, out, 3, "out");
    if (packed.n_planes < planes.least || packed.n_planes > planes.most) {
        refuse("out: " + std::to_string(packed.n_planes) + " planes given, expected " +
               std::to_string(planes.least) +
               (planes.least == planes.most ? "" : " to " + std::to_string(planes.most)));
    }
    check_room(segments, packed.n_blocks);
    return packed;
}

inline bool* read_flags(const TensorReader& tensors, nb::handle finite, std::size_t n_segments) {
    const TensorView flags = tensors.read(finite, "finite", {});
    if (!is_type(flags.dtype, kBool, 8) || flags.n_elements != n_segments) {
        refuse("finite: expected bool, " + std::to_string(n_segments) + " elements");
    }
    return static_cast<bool*>(flags.data);
}

// Who votes for which parameter, bool; or how many times each vote counts, uint8.
struct Presence {
    const std::uint8_t* times;
    bool is_weighted;

    std::size_t read(std::size_t at) const { return is_weighted ? times[at] : times[at] != 0; }
};

inline Presence read_presence(const TensorReader& tensors, nb::handle present, std::size_t n_workers,
                              std::size_t n_slots) {
    const TensorView flags = tensors.read(present, "present", {}, Wants::shape);
    const bool is_weighted = is_type(flags.dtype, kUInt, 8);
    if (!(is_weighted || is_type(flags.dtype, kBool, 8)) || flags.shape.size() != 2 ||
        flags.shape[0] != static_cast<std::int64_t>(n_workers) ||
        flags.shape[1] != static_cast<std::int64_t>(n_slots)) {
        refuse("present: expected bool or uint8 of shape (" + std::to_string(n_workers) + ", " +
               std::to_string(n_slots) + ")");
    }
    return {static_cast<const std::uint8_t*>(flags.data), is_weighted};
}

inline bool has_weights(const TensorReader& tensors, nb::handle present) {
    return is_type(tensors.read(present, "present", {}).dtype, kUInt, 8);
}

// The part of a slot that lies in words [begin, end) of its bucket, counted from `begin`. False for none.
inline bool cut_slot(nb::handle slot, std::size_t begin, std::size_t end, Run& part) {
    const std::size_t n_elements = read_size(item(slot, slot_field::n_elements));
    const std::size_t start = read_size(item(slot, slot_field::bucket_word));
    const std::size_t stop = start + (n_elements + kWordElements - 1) / kWordElements;
    const std::size_t first = start > begin ? start : begin;
    const std::size_t last = stop < end ? stop : end;
    if (first >= last) {
        return false;
    }
    const std::size_t skipped = first - start;
    const std::size_t rest = n_elements - skipped * kWordElements;
    const std::size_t room = (last - first) * kWordElements;
    part.begin = first - begin;
    part.end = last - begin;
    part.n_elements = rest < room ? rest : room;
    part.first_word = read_unsigned(item(slot, slot_field::first_word)) + skipped;
    part.first_bit = read_bit(item(slot, slot_field::first_bit));
    return true;
}

inline std::size_t count_slots(nb::handle slots) {
    const Py_ssize_t n_slots = PyTuple_Size(slots.ptr());
    if (n_slots < 0) {
        throw nb::python_error();
    }
    return static_cast<std::size_t>(n_slots);
}

// The first of some words; sums of two such numbers do not overflow.
inline std::size_t first_word_of(std::size_t first_block) {
    if (first_block > kMostCounted) {
        refuse("first_block is " + std::to_string(first_block) + ", expected at most 2^56");
    }
    return first_block * kBlockWords;
}

// Cut the bucket's parameters to the shard; leave out those that nobody votes for.
inline std::vector<Run> read_runs(const TensorReader& tensors, nb::handle present, nb::handle slots,
                                  std::size_t n_workers, std::size_t first_block, std::size_t n_blocks,
                                  std::vector<std::uint32_t>& voters) {
    const std::size_t n_slots = count_slots(slots);
    const Presence presence = read_presence(tensors, present, n_workers, n_slots);
    std::size_t n_votes = n_workers * n_slots;
    if (presence.is_weighted) {
        n_votes = std::accumulate(presence.times, presence.times + n_workers * n_slots, std::size_t{0});
    }
    voters.reserve(n_votes);  // runs point into it
    const std::size_t begin = first_word_of(first_block);
    const std::size_t end = begin + n_blocks * kBlockWords;
    std::vector<Run> runs;
    for (std::size_t k = 0; k < n_slots; ++k) {
        Run run{};
        if (!cut_slot(item(slots, static_cast<Py_ssize_t>(k)), begin, end, run)) {
            continue;
        }
        const std::size_t before = voters.size();
        for (std::size_t worker = 0; worker < n_workers; ++worker) {
            const std::size_t times = presence.read(worker * n_slots + k);
            voters.insert(voters.end(), times, static_cast<std::uint32_t>(worker));
        }
        if (voters.size() == before) {
            continue;
        }
        run.voters = voters.data() + before;
        run.n_voters = voters.size() - before;
        run.param = k;
        runs.push_back(run);
    }
    return runs;
}

}  // namespace distlion
