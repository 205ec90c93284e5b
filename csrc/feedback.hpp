// Votes with scales: on the rests d = c - h that estimates h lack of directions, or on directions by lots;
// the steps that these votes move estimates by; and their sums. A scale needs all of its parameter: there
// are two passes.
#pragma once

#include "encode.hpp"

namespace distlion {
namespace {

constexpr Access kRests{
    .reads_votes = true, .moves_param = false, .moves_momentum = false, .reads_estimate = true};
constexpr Access kResiduals{.reads_votes = true,
                            .moves_param = false,
                            .moves_momentum = false,
                            .reads_estimate = true,
                            .moves_estimate = true};

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

// The rests of directions, and whether what they come from is finite.
template <class Param, class Momentum, class BlendType, bool has_estimates>
class Rests {
public:
    static constexpr Access access = has_estimates ? kRests : kVotes;

    explicit Rests(const Segment& segment, bool are_residuals = false)
        : blend_(segment), flip_(fill(are_residuals ? 0x80000000u : 0u)) {}

    template <class Row>
    f32 read(const Row& row, int k) {
        const f32 g = blend_.template scaled_grad<Param>(row.grad + k * kLanes);
        const f32 m = Momentum::widen(row.exp_avg + k * kLanes);
        const f32 c = blend_.direction(m, g);
        directions_.see(c);
        momenta_.see(blend_.new_momentum(m, g));
        return rest_of(blend_.voted(c, g), row, k);
    }
    // Without the check.
    template <class Row>
    f32 read_again(const Row& row, int k) const {
        const f32 g = blend_.template scaled_grad<Param>(row.grad + k * kLanes);
        const f32 m = Momentum::widen(row.exp_avg + k * kLanes);
        return rest_of(blend_.voted(blend_.direction(m, g), g), row, k);
    }
    bool all_finite() const { return directions_.all_finite() && momenta_.all_finite(); }

private:
    // c - h; c + e is c - (-e).
    template <class Row>
    f32 rest_of(f32 c, const Row& row, int k) const {
        if constexpr (has_estimates) {
            return c - (f32)(load<u32>(row.estimate + k * kLanes) ^ flip_);
        }
        return c;
    }

    BlendType blend_;
    u32 flip_;
    FiniteCheck<Float32> directions_;
    FiniteCheck<Momentum> momenta_;
};

// Call `visit.operator()<Rests>()` with the rests of a segment.
template <class Visit>
inline auto with_rests(const Segment& segment, Visit visit) {
    return with_blend(segment, [&]<class Param, class Momentum, class BlendType>() {
        return segment.estimate ? visit.template operator()<Param, Momentum, Rests<Param, Momentum, BlendType, true>>()
                                : visit.template operator()<Param, Momentum, Rests<Param, Momentum, BlendType, false>>();
    });
}

// The first pass.
template <class Param, class Momentum, class RestsType>
bool encode_rest_signs(const Segment& segment, std::size_t begin, std::size_t end,
                       const Encoding& encoding, double* sums) {
    RestsType rests(segment, encoding.are_residuals);
    alignas(64) float sizes[1][kScaleBlockElements];
    each_scale_block(begin, end, sizes, [&](std::size_t block, std::size_t block_end) {
        each_word<Param, Momentum, RestsType::access>(segment, block, block_end, [&](std::size_t word, auto row) {
            std::uint64_t above = 0;
            std::uint64_t zero = 0;
            float* size = sizes[0] + (word - block) * kWordElements;
            for (int k = 0; k < kWordVectors; ++k) {
                const f32 d = rests.read(row, k);
                above |= std::uint64_t{bits_above_zero(d)} << (k * kLanes);
                zero |= std::uint64_t{bits_of_zero(d)} << (k * kLanes);
                store(size + k * kLanes, (u32)d & 0x7FFFFFFF);
            }
            *packed_word(encoding.out, segment, word, encoding.n_planes) =
                sign_bits(above, zero, segment, word, encoding.zero) & row.valid;
        });
        sums[block / kScaleBlockWords] = sum_of(sizes[0]);
    });
    return rests.all_finite();
}

// The second pass, of two bits. To compute d again takes less than to keep it.
template <class Param, class Momentum, class RestsType>
std::size_t encode_rest_sizes(const Segment& segment, std::size_t begin, std::size_t end,
                              const Encoding& encoding, float mean, double* sums, double* large_sums) {
    const RestsType rests(segment, encoding.are_residuals);
    const f32 least = fill(mean);
    std::size_t n_large = 0;
    alignas(64) float sizes[2][kScaleBlockElements];  // of small ones, and of large ones
    each_scale_block(begin, end, sizes, [&](std::size_t block, std::size_t block_end) {
        each_word<Param, Momentum, RestsType::access>(segment, block, block_end, [&](std::size_t word, auto row) {
            std::uint64_t large = 0;
            const std::size_t first = (word - block) * kWordElements;
            for (int k = 0; k < kWordVectors; ++k) {
                const u32 size = (u32)rests.read_again(row, k) & 0x7FFFFFFF;
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
    return with_rests(segment, [&]<class Param, class Momentum, class RestsType>() {
        return encode_rest_signs<Param, Momentum, RestsType>(segment, begin, end, encoding, sums);
    });
}

std::size_t encode_size_words(const Segment& segment, std::size_t begin, std::size_t end,
                              const Encoding& encoding, float mean, double* sums, double* large_sums) {
    return with_rests(segment, [&]<class Param, class Momentum, class RestsType>() {
        return encode_rest_sizes<Param, Momentum, RestsType>(segment, begin, end, encoding, mean, sums,
                                                             large_sums);
    });
}

bool measure_words(const Segment& segment, std::size_t begin, std::size_t end, double* sums, float* most) {
    return with_blend(segment, [&]<class Param, class Momentum, class BlendType>() {
        Rests<Param, Momentum, BlendType, false> directions(segment);
        alignas(64) float sizes[1][kScaleBlockElements];
        each_scale_block(begin, end, sizes, [&](std::size_t block, std::size_t block_end) {
            each_word<Param, Momentum, kVotes>(segment, block, block_end, [&](std::size_t word, auto row) {
                float* size = sizes[0] + (word - block) * kWordElements;
                for (int k = 0; k < kWordVectors; ++k) {
                    store(size + k * kLanes, (u32)directions.read(row, k) & 0x7FFFFFFF);
                }
            });
            sums[block / kScaleBlockWords] = sum_of(sizes[0]);
            most[block / kScaleBlockWords] = largest(sizes[0]);
        });
        return directions.all_finite();
    });
}

// 32768 + floor(fl(c * r)), as floats from 0 to 65536.
inline u32 level_of(f32 c, f32 ratio) {
    const f32 half = fill(32768.0f);
    f32 scaled = c * ratio;
    scaled = (f32)choose((u32)(scaled < half), (u32)scaled, (u32)half);
    scaled = (f32)choose((u32)(scaled > -half), (u32)scaled, (u32)-half);
    const i32 cut = __builtin_convertvector(scaled, i32);
    // All ones, -1, where the cut has rounded up.
    const i32 down = (i32)(__builtin_convertvector(cut, f32) > scaled);
    return (u32)(cut + down) + 32768;
}

void encode_lot_words(const Segment& segment, std::size_t begin, std::size_t end, const Encoding& encoding,
                      float ratio) {
    with_blend(segment, [&]<class Param, class Momentum, class BlendType>() {
        const Rests<Param, Momentum, BlendType, false> directions(segment);
        each_word<Param, Momentum, kVotes>(segment, begin, end, [&](std::size_t word, auto row) {
            const Noise lots(encoding.zero, segment.first_word + word, segment.first_bit);
            std::uint64_t bits = 0;
            for (int k = 0; k < kWordVectors; ++k) {
                const u32 level = level_of(directions.read_again(row, k), fill(ratio));
                const u32 lot = __builtin_convertvector(load<u16>(lots.bytes() + 2 * k * kLanes), u32);
                // Both are exact as floats.
                const f32 rest = __builtin_convertvector((i32)(level - lot), f32);
                bits |= std::uint64_t{bits_above_zero(rest)} << (k * kLanes);
            }
            *packed_word(encoding.out, segment, word, 1) = bits & row.valid;
        });
    });
}

// What a vote says of the elements of a vector, q.
template <int n_planes>
class Said {
public:
    explicit Said(const ScaledBits& said)
        : votes_(said.votes), small_((u32)fill(said.scales[0])), large_((u32)fill(said.scales[1])) {}

    f32 at(std::size_t word, int k) const {
        const std::uint64_t* vote = packed_at(votes_, word, n_planes);
        const auto masks = [&](int plane) {
            const std::uint64_t bits = vote[plane * kBlockWords] >> (k * kLanes);
            return masks_of(static_cast<std::uint32_t>(bits & ((1u << kLanes) - 1)));
        };
        const u32 size = n_planes == 1 ? small_ : choose(masks(n_planes - 1), large_, small_);
        return (f32)(size ^ (~masks(0) & 0x80000000u));
    }

private:
    const std::uint64_t* votes_;
    u32 small_, large_;
};

// Call `visit(said)`.
template <class Visit>
inline void with_said(const ScaledBits& said, Visit visit) {
    if (said.n_planes == 1) {
        visit(Said<1>(said));
    } else {
        visit(Said<2>(said));
    }
}

// fl(c - fl(q - e)).
void move_residual_words(const Segment& segment, std::size_t begin, std::size_t end, const ScaledBits& bits) {
    with_said(bits, [&](auto said) {
        with_blend(segment, [&]<class Param, class Momentum, class BlendType>() {
            const Rests<Param, Momentum, BlendType, false> directions(segment);
            each_word<Param, Momentum, kResiduals>(segment, begin, end, [&](std::size_t word, auto row) {
                for (int k = 0; k < kWordVectors; ++k) {
                    const f32 after = said.at(segment.bucket_word + word, k) - load<f32>(row.estimate + k * kLanes);
                    store(row.estimate + k * kLanes, directions.read_again(row, k) - after);
                }
            });
        });
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

// Call `visit(word, elements)` for words [begin, end) of a row of floats; of the last one, in a copy that is
// copied back.
template <class Visit>
inline void each_row(float* elements, std::size_t n_elements, std::size_t begin, std::size_t end, Visit visit) {
    const std::size_t n_full = n_elements / kWordElements;
    const std::size_t whole_end = end < n_full ? end : n_full;
    for (std::size_t word = begin; word < whole_end; ++word) {
        if (word + kPrefetchWords < n_full) {
            constexpr std::size_t word_bytes = kWordElements * sizeof(float);
            prefetch<3>(elements + word * kWordElements, kPrefetchWords * word_bytes, word_bytes);
        }
        visit(word, elements + word * kWordElements);
    }
    if (end > n_full) {
        const std::size_t n_bytes = (n_elements - n_full * kWordElements) * sizeof(float);
        float room[kWordElements]{};
        std::memcpy(room, elements + n_full * kWordElements, n_bytes);
        visit(n_full, room);
        std::memcpy(elements + n_full * kWordElements, room, n_bytes);
    }
}

// fl(h + q) of words [begin, end).
void add_step_words(const Step& step, std::size_t begin, std::size_t end) {
    with_said(step.said, [&](auto said) {
        each_row(step.estimates, step.n_elements, begin, end, [&](std::size_t word, float* estimates) {
            for (int k = 0; k < kWordVectors; ++k) {
                const f32 h = load<f32>(estimates + k * kLanes);
                store(estimates + k * kLanes, h + said.at(step.first_word + word, k));
            }
        });
    });
}

// Add w * (h + q) of one worker to the sums T of the words [begin, end), which begin at `totals`.
template <bool has_estimates>
void add_summand(const Summand& summand, const Sum& sum, std::size_t begin, std::size_t end, float* totals) {
    const f32 weight = fill(summand.weight);
    const auto add = [&](auto step_at) {
        for (std::size_t word = begin; word < end; ++word) {
            float* total = totals + (word - begin) * kWordElements;
            for (int k = 0; k < kWordVectors; ++k) {
                store(total + k * kLanes, load<f32>(total + k * kLanes) + step_at(word, k) * weight);
            }
        }
    };
    const auto estimate_at = [&](std::size_t word, int k) {
        if (k == 0 && word + kPrefetchWords < sum.n_words()) {
            constexpr std::size_t word_bytes = kWordElements * sizeof(float);
            prefetch<3>(summand.estimates + word * kWordElements, kPrefetchWords * word_bytes, word_bytes);
        }
        return load<f32>(summand.estimates + word * kWordElements + k * kLanes);
    };
    if (summand.said.votes) {
        with_said(summand.said, [&](auto said) {
            add([&](std::size_t word, int k) {
                const f32 q = said.at(sum.begin + word, k);
                if constexpr (has_estimates) {
                    return estimate_at(word, k) + q;
                } else {
                    return q;
                }
            });
        });
    } else if constexpr (has_estimates) {
        add(estimate_at);
    }
}

void count_sum_words(const Sum& sum, std::size_t begin, std::size_t end, Coin tie, std::uint64_t* out,
                     double* sums) {
    alignas(64) float totals[kScaleBlockElements];
    for (std::size_t block = begin; block < end; block += kScaleBlockWords) {
        const std::size_t block_end = block + kScaleBlockWords < end ? block + kScaleBlockWords : end;
        std::memset(totals, 0, sizeof totals);
        for (std::size_t n = 0; n < sum.n_summands; ++n) {
            if (sum.summands[n].estimates) {
                add_summand<true>(sum.summands[n], sum, block, block_end, totals);
            } else {
                add_summand<false>(sum.summands[n], sum, block, block_end, totals);
            }
        }
        // Behind the last element nothing counts.
        const std::size_t n_rest = sum.n_elements - block * kWordElements;
        if (n_rest < kScaleBlockElements) {
            std::memset(totals + n_rest, 0, (kScaleBlockElements - n_rest) * sizeof(float));
        }
        for (std::size_t word = block; word < block_end; ++word) {
            std::uint64_t above = 0;
            std::uint64_t zero = 0;
            float* total = totals + (word - block) * kWordElements;
            for (int k = 0; k < kWordVectors; ++k) {
                const f32 t = load<f32>(total + k * kLanes);
                above |= std::uint64_t{bits_above_zero(t)} << (k * kLanes);
                zero |= std::uint64_t{bits_of_zero(t)} << (k * kLanes);
                store(total + k * kLanes, (u32)t & 0x7FFFFFFF);
            }
            const std::size_t rest = sum.n_elements - word * kWordElements;
            const std::uint64_t valid =
                rest >= kWordElements ? ~std::uint64_t{0} : (std::uint64_t{1} << rest) - 1;
            const std::uint64_t coins = zero ? zero & draw_from(tie, sum.first_word + word, sum.first_bit) : 0;
            *packed_at(out, sum.begin + word, 1) = sum.has_votes ? (above | coins) & valid : 0;
        }
        sums[block / kScaleBlockWords] = sum_of(totals);
    }
}

}  // namespace
}  // namespace distlion
