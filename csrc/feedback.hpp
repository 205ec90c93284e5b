// Votes with error feedback: on the rests d = c - h that estimates h lack of directions, and the steps
// that these votes move estimates by. A scale needs all of its parameter: there are two passes.
#pragma once

#include "encode.hpp"

namespace distlion {
namespace {

constexpr Access kRests{
    .reads_votes = true, .moves_param = false, .moves_momentum = false, .reads_estimate = true};

// Call `visit(block, block_end)` for the words of every scale block, and clear what the last one leaves
// of some rows of `sizes`.
template <int n_rows, class Visit>
inline void each_scale_block(std::size_t begin, std::size_t end,
                             float (&sizes)[n_rows][kScaleBlockElements], Visit visit) {
    for (std::size_t block = begin; block < end; block += kScaleBlockWords) {
        const std::size_t block_end = block + kScaleBlockWords < end ? block + kScaleBlockWords : end;
        const std::size_t n_filled = (block_end - block) * kWordElements;
        for (auto& row : sizes) {
            std::memset(row + n_filled, 0, (kScaleBlockElements - n_filled) * sizeof(float));
        }
        visit(block, block_end);
    }
}

template <class Number>
inline double sum_of(const Number* x) {
    return sum_by_halving(x, [](double number) { return number; });
}

// The first pass.
template <class Param, class Momentum, class BlendType>
bool encode_rest_signs(const Segment& segment, std::size_t begin, std::size_t end,
                       const Encoding& encoding, double* sums) {
    const BlendType blend(segment);
    FiniteCheck<Float32> directions;
    FiniteCheck<Momentum> momenta;
    alignas(64) float sizes[1][kScaleBlockElements];
    each_scale_block(begin, end, sizes, [&](std::size_t block, std::size_t block_end) {
        each_word<Param, Momentum, kRests>(segment, block, block_end, [&](std::size_t word, auto row) {
            std::uint64_t above = 0;
            std::uint64_t zero = 0;
            float* size = sizes[0] + (word - block) * kWordElements;
            for (int k = 0; k < kWordVectors; ++k) {
                const f32 g = blend.template scaled_grad<Param>(row.grad + k * kLanes);
                const f32 m = Momentum::widen(row.exp_avg + k * kLanes);
                const f32 c = blend.direction(m, g);
                directions.see(c);
                momenta.see(blend.new_momentum(m, g));
                const f32 d = blend.voted(c, g) - load<f32>(row.estimate + k * kLanes);
                above |= std::uint64_t{bits_above_zero(d)} << (k * kLanes);
                zero |= std::uint64_t{bits_of_zero(d)} << (k * kLanes);
                store(size + k * kLanes, (u32)d & 0x7FFFFFFF);
            }
            *packed_word(encoding.out, segment, word, encoding.n_planes) =
                sign_bits(above, zero, segment, word, encoding.zero) & row.valid;
        });
        sums[block / kScaleBlockWords] = sum_of(sizes[0]);
    });
    return directions.all_finite() && momenta.all_finite();
}

// The second pass, of two bits. To compute d again takes less than to keep it.
template <class Param, class Momentum, class BlendType>
std::size_t encode_rest_sizes(const Segment& segment, std::size_t begin, std::size_t end,
                              const Encoding& encoding, float mean, double* sums, double* large_sums) {
    const BlendType blend(segment);
    const f32 least = fill(mean);
    std::size_t n_large = 0;
    alignas(64) float sizes[2][kScaleBlockElements];  // of small ones, and of large ones
    each_scale_block(begin, end, sizes, [&](std::size_t block, std::size_t block_end) {
        each_word<Param, Momentum, kRests>(segment, block, block_end, [&](std::size_t word, auto row) {
            std::uint64_t large = 0;
            const std::size_t first = (word - block) * kWordElements;
            for (int k = 0; k < kWordVectors; ++k) {
                const f32 g = blend.template scaled_grad<Param>(row.grad + k * kLanes);
                const f32 m = Momentum::widen(row.exp_avg + k * kLanes);
                const f32 c = blend.voted(blend.direction(m, g), g);
                const f32 d = c - load<f32>(row.estimate + k * kLanes);
                const u32 size = (u32)d & 0x7FFFFFFF;
                const std::uint32_t bits = bits_at_least((f32)size, least);
                const u32 is_large = masks_of(bits);
                large |= std::uint64_t{bits} << (k * kLanes);
                store(sizes[0] + first + k * kLanes, size & ~is_large);
                store(sizes[1] + first + k * kLanes, size & is_large);
            }
            large &= row.valid;
            n_large += static_cast<std::size_t>(__builtin_popcountll(large));
            packed_word(encoding.out, segment, word, encoding.n_planes)[kBlockWords] = large;
        });
        sums[block / kScaleBlockWords] = sum_of(sizes[0]);
        large_sums[block / kScaleBlockWords] = sum_of(sizes[1]);
    });
    return n_large;
}

bool encode_rest_words(const Segment& segment, std::size_t begin, std::size_t end,
                       const Encoding& encoding, double* sums) {
    return with_blend(segment, [&]<class Param, class Momentum, class BlendType>() {
        return encode_rest_signs<Param, Momentum, BlendType>(segment, begin, end, encoding, sums);
    });
}

std::size_t encode_size_words(const Segment& segment, std::size_t begin, std::size_t end,
                              const Encoding& encoding, float mean, double* sums, double* large_sums) {
    return with_blend(segment, [&]<class Param, class Momentum, class BlendType>() {
        return encode_rest_sizes<Param, Momentum, BlendType>(segment, begin, end, encoding, mean, sums,
                                                             large_sums);
    });
}

double add_sums(double* sums, std::size_t n_sums) {
    while (n_sums > 1) {
        std::size_t n_added = 0;
        for (std::size_t at = 0; at < n_sums; at += kScaleBlockElements) {
            alignas(64) double room[kScaleBlockElements]{};
            const std::size_t n_rest = n_sums - at;
            const std::size_t n_here = n_rest < kScaleBlockElements ? n_rest : kScaleBlockElements;
            std::memcpy(room, sums + at, n_here * sizeof(double));
            sums[n_added++] = sum_of(room);
        }
        n_sums = n_added;
    }
    return n_sums > 0 ? sums[0] : 0.0;
}

// fl(h + q) of words [begin, end).
template <int n_planes>
void add_votes(const Step& step, std::size_t begin, std::size_t end) {
    const u32 small = (u32)fill(step.scales[0]);
    const u32 large = (u32)fill(step.scales[n_planes - 1]);
    const auto add = [&](std::size_t word, const float* estimates, float* out) {
        const std::uint64_t* vote = packed_at(step.votes, step.first_word + word, n_planes);
        for (int k = 0; k < kWordVectors; ++k) {
            const auto masks = [&](int plane) {
                const std::uint64_t bits = vote[plane * kBlockWords] >> (k * kLanes);
                return masks_of(static_cast<std::uint32_t>(bits & ((1u << kLanes) - 1)));
            };
            const u32 size = n_planes == 1 ? small : choose(masks(n_planes - 1), large, small);
            const f32 q = (f32)(size ^ (~masks(0) & 0x80000000u));
            store(out + k * kLanes, load<f32>(estimates + k * kLanes) + q);
        }
    };
    const std::size_t n_full = step.n_elements / kWordElements;
    const std::size_t whole_end = end < n_full ? end : n_full;
    for (std::size_t word = begin; word < whole_end; ++word) {
        const float* estimates = step.estimates + word * kWordElements;
        if (word + kPrefetchWords < n_full) {
            constexpr std::size_t word_bytes = kWordElements * sizeof(float);
            prefetch<3>(estimates, kPrefetchWords * word_bytes, word_bytes);
        }
        add(word, estimates, step.out + word * kWordElements);
    }
    if (end > n_full) {
        const std::size_t n_bytes = (step.n_elements - n_full * kWordElements) * sizeof(float);
        float room[kWordElements]{};
        std::memcpy(room, step.estimates + n_full * kWordElements, n_bytes);
        add(n_full, room, room);
        std::memcpy(step.out + n_full * kWordElements, room, n_bytes);
    }
}

void add_step_words(const Step& step, std::size_t begin, std::size_t end) {
    if (step.votes && step.n_planes == 1) {
        add_votes<1>(step, begin, end);
    } else if (step.votes) {
        add_votes<2>(step, begin, end);
    } else {
        const std::size_t first = begin * kWordElements;
        const std::size_t last = end * kWordElements < step.n_elements ? end * kWordElements : step.n_elements;
        std::memcpy(step.out + first, step.estimates + first, (last - first) * sizeof(float));
    }
}

}  // namespace
}  // namespace distlion
