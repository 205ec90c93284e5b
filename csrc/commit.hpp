// Committing: gradient, momentum, parameter and reply are read, momentum and parameter written, in
// one pass.
#pragma once

#include "encode.hpp"

namespace distlion {
namespace {

// The integers S of kLanes elements, as floats.

inline f32 signed_ones(std::uint32_t positive) {
    return (f32)(0x3F800000u | (~masks_of(positive) & 0x80000000u));
}

template <ReplyFormat format>
inline f32 replied(const std::uint64_t* reply, int shift, const Segment& segment, int n_planes) {
    const auto lane_bits = [&](int plane) {
        return static_cast<std::uint32_t>((reply[plane * kBlockWords] >> shift) & ((1u << kLanes) - 1));
    };
    if constexpr (format == ReplyFormat::sign) {
        return signed_ones(lane_bits(0));
    } else if constexpr (format == ReplyFormat::ternary) {
        // +0 where the second bit is 0, whatever the first one says.
        return (f32)((u32)signed_ones(lane_bits(0)) & masks_of(lane_bits(1)));
    } else {
        u32 count{};
        for (int plane = 0; plane < n_planes; ++plane) {
            count |= masks_of(lane_bits(plane)) & (1u << plane);
        }
        const i32 sum = (i32)(count << 1) - static_cast<std::int32_t>(segment.n_present);
        return __builtin_convertvector(sum, f32);
    }
}

template <class Param, class Momentum, ReplyFormat format, bool MovesParam, bool MovesMomentum>
void move(const Segment& segment, std::size_t begin, std::size_t end, const Commitment& commitment) {
    constexpr Access access{
        .reads_votes = MovesMomentum, .moves_param = MovesParam, .moves_momentum = MovesMomentum};
    const Blend blend(segment);
    const f32 decay = fill(segment.decay);
    const f32 step_width = fill(segment.step_width);
    const int n_planes = static_cast<int>(commitment.n_planes);
    each_word<Param, Momentum, access>(segment, begin, end, [&](std::size_t word, auto row) {
        const std::uint64_t* reply = nullptr;
        if constexpr (MovesParam && format != ReplyFormat::own) {
            reply = packed_word(const_cast<std::uint64_t*>(commitment.reply), segment, word,
                                commitment.n_planes);
        }
        const auto visit = [&](auto put_param) {
            for (int k = 0; k < kWordVectors; ++k) {
                f32 g{};
                f32 m{};
                if constexpr (MovesMomentum) {
                    g = blend.scaled_grad<Param>(row.grad + k * kLanes);
                    m = Momentum::widen(row.exp_avg + k * kLanes);
                }
                if constexpr (MovesParam) {
                    f32 s;
                    if constexpr (format == ReplyFormat::own) {
                        const f32 whole = blend.direction(m, g);
                        const f32 c = segment.is_cautious ? keep_same_sign(whole, g) : whole;
                        const u32 moves = masks_of(bits_above_zero(c) | bits_below_zero(c));
                        s = (f32)((u32)signed_ones(bits_above_zero(c)) & moves);
                    } else {
                        s = replied<format>(reply, k * kLanes, segment, n_planes);
                    }
                    const f32 x = Param::widen(row.param + k * kLanes);
                    put_param(k, decay * x - step_width * s);
                }
                if constexpr (MovesMomentum) {
                    Momentum::narrow(row.exp_avg + k * kLanes, blend.new_momentum(m, g));
                }
            }
        };
        if constexpr (MovesParam && std::is_same_v<Param, BFloat16>) {
            if (commitment.rounds_stochastically) {
                const Noise noise(commitment.rounding, segment.first_word + word, segment.first_bit);
                visit([&](int k, f32 x) {
                    Param::narrow_at_random(row.param + k * kLanes, x, noise.bytes() + 2 * k * kLanes);
                });
                return;
            }
        }
        visit([&](int k, f32 x) { Param::narrow(row.param + k * kLanes, x); });
    });
}

template <class Param, class Momentum, ReplyFormat format>
void move_as_asked(const Segment& segment, std::size_t begin, std::size_t end,
                   const Commitment& commitment) {
    // A worker without gradient keeps its momentum.
    if (segment.grad) {
        move<Param, Momentum, format, true, true>(segment, begin, end, commitment);
    } else if constexpr (format != ReplyFormat::own) {
        move<Param, Momentum, format, true, false>(segment, begin, end, commitment);
    }
}

// What no vector holds at the end takes the same steps one by one.
void add_momentum_range(const OuterMove& move, std::size_t begin, std::size_t end) {
    const auto step = [&](auto& x, auto s, auto& b) {
        const auto u = s - x;
        b = b * move.momentum + u;
        const auto v = move.is_nesterov ? b * move.momentum + u : b;
        x = s - v * move.lr;
    };
    std::size_t j = begin;
    for (; j + kLanes <= end; j += kLanes) {
        f32 x = load<f32>(move.param + j);
        f32 b = load<f32>(move.buffer + j);
        step(x, load<f32>(move.start + j), b);
        store(move.param + j, x);
        store(move.buffer + j, b);
    }
    for (; j < end; ++j) {
        step(move.param[j], move.start[j], move.buffer[j]);
    }
}

void commit_words(const Segment& segment, std::size_t begin, std::size_t end,
                  const Commitment& commitment) {
    with_types(segment, [&]<class Param, class Momentum>() {
        if (!commitment.moves_param) {
            if (segment.grad) {
                move<Param, Momentum, ReplyFormat::own, false, true>(segment, begin, end, commitment);
            }
            return;
        }
        switch (commitment.format) {
            case ReplyFormat::sign:
                return move_as_asked<Param, Momentum, ReplyFormat::sign>(segment, begin, end, commitment);
            case ReplyFormat::ternary:
                return move_as_asked<Param, Momentum, ReplyFormat::ternary>(segment, begin, end,
                                                                            commitment);
            case ReplyFormat::count:
                return move_as_asked<Param, Momentum, ReplyFormat::count>(segment, begin, end,
                                                                          commitment);
            default:
                return move_as_asked<Param, Momentum, ReplyFormat::own>(segment, begin, end, commitment);
        }
    });
}

}  // namespace
}  // namespace distlion
