// Encoding: one pass over gradient and momentum, which are only read.
#pragma once

#include "coin.hpp"
#include "rows.hpp"
#include "sums.hpp"

namespace distlion {
namespace {

constexpr Access kVotes{.reads_votes = true, .moves_param = false, .moves_momentum = false};
// Prefetched block by block instead.
constexpr Access kVotesByBlock{
    .reads_votes = true, .moves_param = false, .moves_momentum = false, .prefetches = false};

// Where word `at` of a packed tensor starts; its planes follow kBlockWords apart.
template <class Word>
inline Word* packed_at(Word* packed, std::size_t at, std::size_t n_planes) {
    return packed + at / kBlockWords * kBlockWords * n_planes + at % kBlockWords;
}

inline std::uint64_t* packed_word(std::uint64_t* packed, const Segment& segment, std::size_t word,
                                  std::size_t n_planes) {
    return packed_at(packed, segment.bucket_word + word, n_planes);
}

// One bit for each element: 1 where c > 0, the coin's where c = 0.
inline std::uint64_t sign_bits(std::uint64_t above, std::uint64_t zero, const Segment& segment,
                               std::size_t word, Coin coin) {
    return zero ? above | (zero & draw_from(coin, segment.first_word + word, segment.first_bit)) : above;
}

// Signs, ternary votes, signs of direction and of gradient, or nothing but the check.
template <class Param, class Momentum, class BlendType, Vote vote>
bool encode_bits(const Segment& segment, std::size_t begin, std::size_t end,
                 const Encoding& encoding) {
    const BlendType blend(segment);
    FiniteCheck<Float32> directions;
    FiniteCheck<Momentum> momenta;
    each_word<Param, Momentum, kVotes>(segment, begin, end, [&](std::size_t word, auto row) {
        std::uint64_t above = 0;
        std::uint64_t zero = 0;
        std::uint64_t grad_above = 0;
        std::uint64_t grad_zero = 0;
        for (int k = 0; k < kWordVectors; ++k) {
            const f32 g = blend.template scaled_grad<Param>(row.grad + k * kLanes);
            const f32 m = Momentum::widen(row.exp_avg + k * kLanes);
            const f32 c = blend.direction(m, g);
            directions.see(c);
            momenta.see(blend.new_momentum(m, g));
            if constexpr (vote == Vote::pairs) {
                grad_above |= std::uint64_t{bits_above_zero(g)} << (k * kLanes);
                grad_zero |= std::uint64_t{bits_of_zero(g)} << (k * kLanes);
            }
            if constexpr (vote != Vote::none) {
                const LaneBits bits = blend.vote(c, g);
                above |= bits.above << (k * kLanes);
                zero |= bits.zero << (k * kLanes);
            }
        }
        if constexpr (vote == Vote::signs) {
            *packed_word(encoding.out, segment, word, 1) =
                sign_bits(above, zero, segment, word, encoding.zero) & row.valid;
        } else if constexpr (vote == Vote::ternary) {
            std::uint64_t* out = packed_word(encoding.out, segment, word, 2);
            out[0] = above;
            out[kBlockWords] = ~zero & row.valid;
        } else if constexpr (vote == Vote::pairs) {
            const Coin second{mix(encoding.zero.key), encoding.zero.inverted};
            std::uint64_t* out = packed_word(encoding.out, segment, word, 2);
            out[0] = sign_bits(above, zero, segment, word, encoding.zero) & row.valid;
            out[kBlockWords] = sign_bits(grad_above, grad_zero, segment, word, second) & row.valid;
        }
    });
    return directions.all_finite() && momenta.all_finite();
}

// The mean of 4,096 absolute values, 0 beyond `n_elements`.
inline float mean_by_halving(const float* x, std::size_t n_elements) {
    const double sum = sum_by_halving(x, [](double magnitude) { return magnitude; });
    return static_cast<float>(sum / static_cast<double>(n_elements));
}

inline float largest(const float* x) {
    f32 most{};
    for (std::size_t j = 0; j < kScaleBlockElements; j += kLanes) {
        const f32 next = load<f32>(x + j);
        most = (f32)choose((u32)(next > most), (u32)next, (u32)most);
    }
    float largest = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
        largest = most[lane] > largest ? most[lane] : largest;
    }
    return largest;
}

// r = min(fl(1 / (s * step)), FLT_MAX), 0 where s = 0.
inline float invert_scale(float s, double step) {
    constexpr double most = 0x1.fffffep127;
    const double inverse = 1.0 / (static_cast<double>(s) * step);
    return s == 0 ? 0.0f : static_cast<float>(inverse < most ? inverse : most);
}

// Ask for the same word of the next scale block. Both passes over a block ask for one tensor each:
// memory would have nothing to do while a block is in the cache.
template <class Type>
inline void prefetch_next_block(const void* tensor, std::size_t word) {
    constexpr std::size_t word_bytes = kWordElements * sizeof(typename Type::Stored);
    prefetch<2>(tensor, (word + kScaleBlockWords) * word_bytes, word_bytes);
}

// Odd levels. The absolute directions of a scale block stay in the cache until its scale is known.
template <class Param, class Momentum, class BlendType>
bool encode_levels(const Segment& segment, std::size_t begin, std::size_t end,
                   const Encoding& encoding) {
    const BlendType blend(segment);
    FiniteCheck<Float32> directions;
    FiniteCheck<Momentum> momenta;
    const int n_magnitude_bits = static_cast<int>(encoding.n_planes) - 1;
    const f32 highest = fill(static_cast<float>((1 << n_magnitude_bits) - 1));
    alignas(64) float magnitudes[kScaleBlockElements];
    for (std::size_t block = begin; block < end; block += kScaleBlockWords) {
        const std::size_t block_end = block + kScaleBlockWords < end ? block + kScaleBlockWords : end;
        const std::size_t first = block * kWordElements;
        const std::size_t n_rest = segment.n_elements - first;
        const std::size_t n_here = n_rest < kScaleBlockElements ? n_rest : kScaleBlockElements;
        const std::size_t n_filled = (block_end - block) * kWordElements;
        std::memset(magnitudes + n_filled, 0, (kScaleBlockElements - n_filled) * sizeof(float));
        each_word<Param, Momentum, kVotesByBlock>(segment, block, block_end, [&](std::size_t word, auto row) {
            std::uint64_t above = 0;
            std::uint64_t zero = 0;
            prefetch_next_block<Param>(segment.grad, word);
            float* magnitude = magnitudes + (word - block) * kWordElements;
            for (int k = 0; k < kWordVectors; ++k) {
                const f32 g = blend.template scaled_grad<Param>(row.grad + k * kLanes);
                const f32 m = Momentum::widen(row.exp_avg + k * kLanes);
                const f32 c = blend.direction(m, g);
                directions.see(c);
                momenta.see(blend.new_momentum(m, g));
                const LaneBits bits = blend.vote(c, g);
                above |= bits.above << (k * kLanes);
                zero |= bits.zero << (k * kLanes);
                store(magnitude + k * kLanes, (u32)blend.voted(c, g) & 0x7FFFFFFF);
            }
            *packed_word(encoding.out, segment, word, encoding.n_planes) =
                sign_bits(above, zero, segment, word, encoding.zero) & row.valid;
        });
        if (n_magnitude_bits == 0) {
            continue;
        }
        const float s = encoding.is_l1 ? mean_by_halving(magnitudes, n_here) : largest(magnitudes);
        const f32 r = fill(invert_scale(s, encoding.step));
        for (std::size_t word = block; word < block_end; ++word) {
            prefetch_next_block<Momentum>(segment.exp_avg, word);
            const float* magnitude = magnitudes + (word - block) * kWordElements;
            alignas(64) std::uint8_t levels[kWordElements];
            for (int k = 0; k < kWordVectors; ++k) {
                const f32 scaled = load<f32>(magnitude + k * kLanes) * r;
                const u32 is_below = (u32)(scaled < highest);
                const f32 clamped = (f32)choose(is_below, (u32)scaled, (u32)highest);
                const i32 level = __builtin_convertvector(clamped, i32);
                store(levels + k * kLanes, __builtin_convertvector(level, u8));
            }
            std::uint64_t* out = packed_word(encoding.out, segment, word, encoding.n_planes);
            for (int bit = 0; bit < n_magnitude_bits; ++bit) {
                out[(bit + 1) * kBlockWords] = gather_bit(levels, bit);
            }
        }
    }
    return directions.all_finite() && momenta.all_finite();
}

// The directions themselves, rounded to `Direction`.
template <class Param, class Momentum, class BlendType, class Direction>
bool encode_directions(const Segment& segment, std::size_t begin, std::size_t end,
                       const Encoding& encoding) {
    const BlendType blend(segment);
    FiniteCheck<Direction> directions;
    FiniteCheck<Momentum> momenta;
    auto* out = reinterpret_cast<typename Direction::Stored*>(encoding.out);
    each_word<Param, Momentum, kVotes>(segment, begin, end, [&](std::size_t word, auto row) {
        for (int k = 0; k < kWordVectors; ++k) {
            const f32 g = blend.template scaled_grad<Param>(row.grad + k * kLanes);
            const f32 m = Momentum::widen(row.exp_avg + k * kLanes);
            const f32 c = blend.direction(m, g);
            directions.see(c);
            momenta.see(blend.new_momentum(m, g));
            Direction::narrow(out + (segment.bucket_word + word) * kWordElements + k * kLanes,
                              blend.voted(c, g));
        }
    });
    return directions.all_finite() && momenta.all_finite();
}

bool encode_words(const Segment& segment, std::size_t begin, std::size_t end,
                  const Encoding& encoding) {
    return with_blend(segment, [&]<class Param, class Momentum, class BlendType>() {
        switch (encoding.vote) {
            case Vote::signs:
                return encode_bits<Param, Momentum, BlendType, Vote::signs>(segment, begin, end, encoding);
            case Vote::ternary:
                return encode_bits<Param, Momentum, BlendType, Vote::ternary>(segment, begin, end, encoding);
            case Vote::pairs:
                return encode_bits<Param, Momentum, BlendType, Vote::pairs>(segment, begin, end, encoding);
            case Vote::levels:
                return encode_levels<Param, Momentum, BlendType>(segment, begin, end, encoding);
            case Vote::directions:
                return encoding.direction_type == DType::float32
                           ? encode_directions<Param, Momentum, BlendType, Float32>(segment, begin, end,
                                                                                    encoding)
                           : encode_directions<Param, Momentum, BlendType, BFloat16>(segment, begin, end,
                                                                                     encoding);
            default:
                return encode_bits<Param, Momentum, Blend, Vote::none>(segment, begin, end, encoding);
        }
    });
}

}  // namespace
}  // namespace distlion
