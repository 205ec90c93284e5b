// The ops as Python calls them: they check what they are given, by the readers of the other python_*.hpp,
// and call the core without the GIL. src/distlion/kernels/cpu.py wraps them in the contract.

#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <string>
#include <vector>

#include "coin.hpp"
#include "core.hpp"
#include "python_feedback.hpp"
#include "python_frames.hpp"
#include "python_votes.hpp"

namespace distlion {

class Core {
public:
    Core(const std::string& instruction_set, nb::object exchange_api) : tensors_(exchange_api) {
        InstructionSet found[kMaxInstructionSets];
        const std::size_t n = list_instruction_sets(found);
        for (std::size_t k = 0; k < n; ++k) {
            if (instruction_set == found[k].name) {
                loops_ = found[k].loops;
            }
        }
        if (!loops_) {
            refuse("instruction_set is '" + instruction_set + "', which this machine does not run");
        }
    }

    SegmentTable read_segments(nb::handle segments) const {
        const SegmentReader reader(tensors_);
        SegmentTable table;
        for (nb::handle segment : segments) {
            reader.read_into(table, segment);
        }
        return table;
    }

    void encode_signs(const SegmentTable& segments, std::uint64_t key, bool inverted, nb::handle out,
                      nb::handle finite, int threads) const {
        encode_planes(segments, {.vote = Vote::signs, .zero = {key, inverted}}, out, {1, 1}, finite, threads);
    }

    void encode_ternary(const SegmentTable& segments, nb::handle out, nb::handle finite, int threads) const {
        encode_planes(segments, {.vote = Vote::ternary}, out, {2, 2}, finite, threads);
    }

    void encode_pairs(const SegmentTable& segments, std::uint64_t key, bool inverted, nb::handle out,
                      nb::handle finite, int threads) const {
        encode_planes(segments, {.vote = Vote::pairs, .zero = {key, inverted}}, out, {2, 2}, finite, threads);
    }

    void encode_levels(const SegmentTable& segments, std::uint64_t key, bool inverted, bool is_l1,
                       double step, nb::handle out, nb::handle finite, int threads) const {
        const Encoding encoding{.vote = Vote::levels, .zero = {key, inverted}, .is_l1 = is_l1, .step = step};
        encode_planes(segments, encoding, out, {1, 8}, finite, threads);
    }

    void encode_directions(const SegmentTable& segments, bool is_bfloat16, nb::handle out,
                           nb::handle finite, int threads) const {
        const std::size_t planes = is_bfloat16 ? 16 : 32;
        const Encoding encoding{.vote = Vote::directions, .direction_type = direction_type(is_bfloat16)};
        encode_planes(segments, encoding, out, {planes, planes}, finite, threads);
    }

    // `segments` are those of `table`; they know the names.
    void encode_rests(const SegmentTable& table, nb::handle segments, nb::handle estimates,
                      bool are_residuals, std::uint64_t key, bool inverted, nb::handle out, nb::handle scales,
                      nb::handle finite, int threads) const {
        const Packed packed = read_out(tensors_, out, {1, 2}, table);
        const Encoding encoding{.vote = Vote::rests, .out = packed.words, .n_planes = packed.n_planes,
                                .zero = {key, inverted}, .are_residuals = are_residuals};
        const std::vector<Segment> read = read_estimates(tensors_, table, segments, estimates);
        float* const found = read_floats(tensors_, scales, "scales", {read.size(), packed.n_planes});
        bool* const flags = read_flags(tensors_, finite, read.size());
        const nb::gil_scoped_release released;
        distlion::encode_rests(*loops_, read.data(), read.size(), encoding, packed.n_blocks, threads,
                               flags, found);
    }

    // `reach`: a number for each segment, or none.
    void encode_lots(const SegmentTable& table, const std::vector<float>& reach, nb::handle spread,
                     std::uint64_t key, bool inverted, nb::handle out, nb::handle scales, nb::handle finite,
                     int threads) const {
        const Packed packed = read_out(tensors_, out, {1, 1}, table);
        const Encoding encoding{.vote = Vote::lots, .out = packed.words, .n_planes = 1, .zero = {key, inverted}};
        const std::vector<Segment>& read = table.segments;
        if (!reach.empty() && reach.size() != read.size()) {
            refuse("reach: given " + std::to_string(reach.size()) + ", expected one for each of " +
                   std::to_string(read.size()) + " segments");
        }
        float* const found = read_floats(tensors_, scales, "scales", {read.size(), 1});
        bool* const flags = read_flags(tensors_, finite, read.size());
        const float means = spread.is_none() ? -1.0f : static_cast<float>(read_double(spread));
        const nb::gil_scoped_release released;
        distlion::encode_lots(*loops_, read.data(), read.size(), encoding, packed.n_blocks,
                              reach.empty() ? nullptr : reach.data(), means, threads, flags, found);
    }

    // `segments` as for `encode_rests`.
    void move_residuals(const SegmentTable& table, nb::handle segments, nb::handle residuals, nb::handle votes,
                        nb::handle scales, nb::handle finite, int threads) const {
        const std::vector<Segment> read = read_estimates(tensors_, table, segments, residuals);
        const std::vector<ScaledBits> said = read_bits(tensors_, table, votes, scales);
        const bool* const flags = read_flags(tensors_, finite, read.size());
        const nb::gil_scoped_release released;
        distlion::move_residuals(*loops_, read.data(), read.size(), said.data(), flags, threads);
    }

    void add_steps(nb::handle estimates, nb::handle slots, nb::handle present, nb::handle votes,
                   nb::handle scales, int threads) const {
        const auto steps = read_steps(tensors_, estimates, slots, present, votes, scales);
        const nb::gil_scoped_release released;
        distlion::add_steps(*loops_, steps.data(), steps.size(), threads);
    }

    void add_steps_of_all(nb::handle estimates, nb::handle votes, nb::handle scales, nb::handle present,
                          nb::handle slots, std::size_t first_block, int threads) const {
        const auto steps = read_steps_of_all(tensors_, estimates, votes, scales, present, slots, first_block);
        const nb::gil_scoped_release released;
        distlion::add_steps(*loops_, steps.data(), steps.size(), threads);
    }

    // `estimates` None: of 0.
    void count_steps(nb::handle votes, nb::handle scales, nb::handle present, nb::handle slots,
                     std::size_t first_block, nb::handle weights, nb::handle estimates, std::uint64_t key,
                     bool inverted, nb::handle out, nb::handle sums, int threads) const {
        const Packed reply = read_packed(tensors_, out, 3, "out");
        SumTable table;
        read_sums(table, tensors_, votes, scales, present, slots, first_block, weights, estimates, sums);
        if (reply.n_planes != 1 || reply.n_blocks != table.n_blocks) {
            refuse("out: given " + std::to_string(reply.n_blocks) + " blocks of " +
                   std::to_string(reply.n_planes) + " planes, expected " + std::to_string(table.n_blocks) +
                   " of 1");
        }
        const nb::gil_scoped_release released;
        distlion::count_sums(*loops_, table.sums.data(), table.sums.size(), {key, inverted}, reply.words,
                             reply.n_blocks, threads);
    }

    void check_finite(const SegmentTable& segments, nb::handle finite, int threads) const {
        encode(segments, {.vote = Vote::none}, 0, finite, threads);
    }

    // The sign of a sum, or the coin on a tie.
    template <Tally tally, std::size_t least_planes, std::size_t most_planes>
    void count_with_coin(nb::handle votes, nb::handle present, nb::handle slots, std::size_t first_block,
                         std::uint64_t key, bool inverted, nb::handle out, int threads) const {
        count(tally, votes, {least_planes, most_planes}, present, slots, first_block, {key, inverted}, out, 1,
              threads);
    }

    // Without a coin; `out_planes` as in `count`.
    template <Tally tally, std::size_t vote_planes, std::size_t out_planes>
    void count_without_coin(nb::handle votes, nb::handle present, nb::handle slots, std::size_t first_block,
                            nb::handle out, int threads) const {
        count(tally, votes, {vote_planes, vote_planes}, present, slots, first_block, {}, out, out_planes,
              threads);
    }

    void sum_directions(nb::handle votes, nb::handle present, nb::handle slots, std::size_t first_block,
                        bool is_bfloat16, nb::handle out, int threads) const {
        const std::size_t planes = is_bfloat16 ? 16 : 32;
        count(Tally::directions, votes, {planes, planes}, present, slots, first_block, {}, out, 2, threads,
              direction_type(is_bfloat16));
    }

    // `reply_format` is a value of contract.ReplyFormat.
    void commit(const SegmentTable& segments, nb::handle present, nb::handle reply, const std::string& reply_format,
                nb::handle rounding, int threads) const {
        const Packed packed = read_packed(tensors_, reply, 3, "reply");
        Commitment commitment{.moves_param = true,
                              .format = read_format(reply_format),
                              .reply = packed.words,
                              .n_planes = packed.n_planes};
        const bool counts = commitment.format == ReplyFormat::count;
        const std::size_t planes = commitment.format == ReplyFormat::sign      ? 1
                                   : commitment.format == ReplyFormat::ternary ? 2
                                                                               : packed.n_planes;
        if (packed.n_planes != planes || (counts && (planes == 0 || planes > kMaxPlanes))) {
            refuse("reply: " + std::to_string(packed.n_planes) + " planes do not fit the format " +
                   reply_format);
        }
        set_rounding(commitment, rounding);
        check_room(segments, packed.n_blocks);
        const auto read = mark_present(segments, present, counts);
        const nb::gil_scoped_release released;
        distlion::commit(*loops_, read.data(), read.size(), commitment, threads);
    }

    void update_momentum(const SegmentTable& segments, nb::handle present, int threads) const {
        const auto read = mark_present(segments, present, false);
        const Commitment commitment{.moves_param = false};
        const nb::gil_scoped_release released;
        distlion::commit(*loops_, read.data(), read.size(), commitment, threads);
    }

    void step_alone(const SegmentTable& segments, nb::handle rounding, int threads) const {
        std::vector<Segment> read = segments.segments;
        for (Segment& segment : read) {
            segment.n_present = segment.grad ? 1 : 0;
        }
        Commitment commitment{.moves_param = true, .format = ReplyFormat::own};
        set_rounding(commitment, rounding);
        const nb::gil_scoped_release released;
        distlion::commit(*loops_, read.data(), read.size(), commitment, threads);
    }

    void add_outer_momentum(const std::vector<nb::object>& params, const std::vector<nb::object>& starts,
                            const std::vector<nb::object>& buffers, double momentum, bool is_nesterov, double lr,
                            int threads) const {
        std::vector<OuterMove> moves;
        if (starts.size() != params.size() || buffers.size() != params.size()) {
            refuse("starts, buffers: expected one for each of " + std::to_string(params.size()) + " parameters");
        }
        for (std::size_t k = 0; k < params.size(); ++k) {
            const std::size_t n_elements = tensors_.read(params[k], "parameter", {}).n_elements;
            moves.push_back({read_estimate(tensors_, params[k], "parameter", {}, n_elements),
                             read_estimate(tensors_, starts[k], "start", {}, n_elements),
                             read_estimate(tensors_, buffers[k], "buffer", {}, n_elements), n_elements,
                             static_cast<float>(momentum), static_cast<float>(lr), is_nesterov});
        }
        const nb::gil_scoped_release released;
        for (const OuterMove& move : moves) {
            distlion::add_momentum(*loops_, move, threads);
        }
    }

    // `tensors` is a sequence that keeps them.
    void digests(nb::handle tensors, nb::handle out, int threads) const {
        std::vector<TensorView> views;
        for (nb::handle tensor : tensors) {
            const TensorView view = tensors_.read(tensor, "tensor", {});
            if (view.dtype.bits != 8 && view.dtype.bits != 16 && view.dtype.bits != 32) {
                refuse("tensor: expected elements of 1, 2 or 4 bytes");
            }
            views.push_back(view);
        }
        auto* const found = static_cast<std::uint64_t*>(read_numbers(tensors_, out, "out", views.size()));
        const nb::gil_scoped_release released;
        for (std::size_t k = 0; k < views.size(); ++k) {
            const TensorView& view = views[k];
            const std::uint64_t total =
                distlion::digest(*loops_, view.data, view.dtype.bits / 8, view.n_elements, threads);
            found[k] = mix(total + view.n_elements);
        }
    }

    void square_sums(nb::handle tensor, nb::handle out, int threads) const {
        const TensorView view = tensors_.read(tensor, "tensor", {});
        const DType type = read_float_type(view.dtype, "tensor", {}, true);
        const TensorView sums = tensors_.read(out, "out", {});
        const std::size_t n_blocks = (view.n_elements + kScaleBlockElements - 1) / kScaleBlockElements;
        if (!is_type(sums.dtype, kFloat, 64) || sums.n_elements != n_blocks) {
            refuse("out: expected float64, one element for " + std::to_string(kScaleBlockElements));
        }
        const nb::gil_scoped_release released;
        distlion::square_sums(*loops_, view.data, type, view.n_elements, static_cast<double*>(sums.data),
                              threads);
    }

    void write_frames(nb::handle out, nb::bytes front, nb::handle payloads, std::size_t checksum_at,
                      int threads) const {
        write_rows(tensors_, *loops_, out, front, payloads, checksum_at, threads);
    }

    bool read_frames(nb::handle rows, nb::bytes heads, nb::bytes mask, std::size_t checksum_at,
                     std::size_t presence_at, bool has_counts, nb::handle intact, nb::handle present,
                     int threads) const {
        return read_rows(tensors_, *loops_, rows, heads, mask, {checksum_at, presence_at, has_counts}, intact,
                         present, threads);
    }

    void stream_encode(nb::handle grad, nb::handle exp_avg, nb::handle out, int threads) const {
        const TensorView words = tensors_.read(out, "out", {});
        if (!is_type(words.dtype, kInt, 64)) {
            refuse("out: expected int64, one word for 64 elements");
        }
        const float* g = read_stream(tensors_, grad, words.n_elements);
        const float* m = read_stream(tensors_, exp_avg, words.n_elements);
        const nb::gil_scoped_release released;
        distlion::stream_encode(*loops_, g, m, words.n_elements,
                                static_cast<std::uint64_t*>(words.data), threads);
    }

    // `reply` None: what a step of plain Lion reads and writes.
    void stream_commit(nb::handle grad, nb::handle exp_avg, nb::handle param, nb::handle reply,
                       int threads) const {
        const std::size_t n_words = tensors_.read(grad, "grad", {}).n_elements / kWordElements;
        const std::uint64_t* bits = nullptr;
        if (!reply.is_none()) {
            const TensorView words = tensors_.read(reply, "reply", {});
            if (!is_type(words.dtype, kInt, 64) || words.n_elements != n_words) {
                refuse("reply: expected int64, one word for 64 elements");
            }
            bits = static_cast<const std::uint64_t*>(words.data);
        }
        const float* g = read_stream(tensors_, grad, n_words);
        float* m = read_stream(tensors_, exp_avg, n_words);
        float* x = read_stream(tensors_, param, n_words);
        const nb::gil_scoped_release released;
        distlion::stream_commit(*loops_, g, m, x, n_words, bits, threads);
    }

private:
    void encode_planes(const SegmentTable& segments, Encoding encoding, nb::handle out, PlaneRange planes,
                       nb::handle finite, int threads) const {
        const Packed packed = read_out(tensors_, out, planes, segments);
        encoding.out = packed.words;
        encoding.n_planes = packed.n_planes;
        encode(segments, encoding, packed.n_blocks, finite, threads);
    }

    void encode(const SegmentTable& table, const Encoding& encoding, std::size_t n_blocks,
                nb::handle finite, int threads) const {
        const std::vector<Segment>& segments = table.segments;
        bool* const flags = read_flags(tensors_, finite, segments.size());
        const nb::gil_scoped_release released;
        distlion::encode(*loops_, segments.data(), segments.size(), encoding, n_blocks, threads, flags);
    }

    // `wanted_out_planes` 0: as many as the number of workers needs, or of votes, where some count more
    // than once; then more planes may be there for workers that are absent.
    void count(Tally tally, nb::handle votes, PlaneRange vote_planes, nb::handle present,
               nb::handle slots, std::size_t first_block, Coin tie, nb::handle out,
               std::size_t wanted_out_planes, int threads, DType direction = DType::float32) const {
        const Packed ballots = read_packed(tensors_, votes, 4, "votes");
        const Packed reply = read_packed(tensors_, out, 3, "out");
        if (ballots.n_workers == 0 || ballots.n_workers > kMaxWorkers) {
            refuse("votes: given those of " + std::to_string(ballots.n_workers) +
                   " workers, expected 1 to " + std::to_string(kMaxWorkers));
        }
        if (ballots.n_planes < vote_planes.least || ballots.n_planes > vote_planes.most) {
            refuse("votes: they have " + std::to_string(ballots.n_planes) + " planes");
        }
        std::vector<std::uint32_t> voters;
        const std::vector<Run> runs =
            read_runs(tensors_, present, slots, ballots.n_workers, first_block, ballots.n_blocks, voters);
        std::size_t most_votes = ballots.n_workers;
        for (const Run& run : runs) {
            most_votes = std::max(most_votes, run.n_voters);
        }
        if (most_votes > kMaxWorkers) {
            refuse("present: a parameter gets " + std::to_string(most_votes) + " votes, expected at most " +
                   std::to_string(kMaxWorkers));
        }
        std::size_t needed = wanted_out_planes;
        if (needed == 0) {
            while (most_votes >> needed) {
                ++needed;
            }
            if (has_weights(tensors_, present)) {
                needed = std::max(needed, reply.n_planes);
            }
        }
        if (reply.n_blocks != ballots.n_blocks || reply.n_planes != needed) {
            refuse("out: given " + std::to_string(reply.n_blocks) + " blocks of " +
                   std::to_string(reply.n_planes) + " planes, expected " +
                   std::to_string(ballots.n_blocks) + " of " + std::to_string(needed));
        }
        const Counting counting{tally,
                                ballots.words,
                                ballots.n_blocks * ballots.n_planes * kBlockWords,
                                ballots.n_planes,
                                reply.words,
                                reply.n_planes,
                                tie,
                                direction};
        const nb::gil_scoped_release released;
        distlion::count(*loops_, runs.data(), runs.size(), counting, ballots.n_blocks, threads);
    }

    TensorReader tensors_;
    const Loops* loops_ = nullptr;
};

}  // namespace distlion
