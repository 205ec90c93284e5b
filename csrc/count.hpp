// Counting: the votes of many workers are added bit-sliced. A vector holds one bit of many
// coordinates; the sum of a coordinate lies across the planes of a column of such vectors.
#pragma once

#include "coin.hpp"
#include "rows.hpp"

namespace distlion {
namespace {

// a + b + carry of one bit each: the sum is left in `a`, the carry returned.
inline u64 add_bits(u64& a, u64 b, u64 carry) {
    const u64 either = a ^ b;
    const u64 both = a & b;
    a = either ^ carry;
    return both | (either & carry);
}

// Sums of up to 2^20 - 1, and how they compare with a number.
struct BitSlicedSum {
    u64 planes[kMaxPlanes];
    int n_planes;

    explicit BitSlicedSum(int n_planes) : n_planes(n_planes) {
        for (int plane = 0; plane < n_planes; ++plane) {
            planes[plane] = u64{};
        }
    }

    void carry_into(int plane, u64 carry) {
        for (; plane < n_planes; ++plane) {
            const u64 next = planes[plane] & carry;
            planes[plane] ^= carry;
            carry = next;
        }
    }

    // Add 2^Depth votes of one bit, taken from `next()`; what overflows plane Depth - 1 is returned.
    template <int Depth, class Next>
    u64 add_many(Next& next) {
        if constexpr (Depth == 0) {
            return next();
        } else {
            const u64 first = add_many<Depth - 1>(next);
            const u64 second = add_many<Depth - 1>(next);
            return add_bits(planes[Depth - 1], first, second);
        }
    }

    // Masks of the coordinates whose sum is above `limit`, and of those where it is not `limit`.
    struct Comparison {
        u64 above, differs;
    };
    Comparison compare(std::uint64_t limit) const {
        u64 above{};
        u64 equal = ~u64{};
        for (int plane = n_planes; plane-- > 0;) {
            const u64 wanted = u64{} - ((limit >> plane) & 1);
            above |= equal & planes[plane] & ~wanted;
            equal &= ~(planes[plane] ^ wanted);
        }
        return {above, ~equal};
    }
};

// The number of planes that hold `most`.
inline int planes_for(std::uint64_t most) {
    int n_planes = 0;
    for (; most; most >>= 1) {
        ++n_planes;
    }
    return n_planes;
}

// The place of one vector of words within the votes and the reply.
struct Column {
    std::size_t block, lane;
};

inline const std::uint64_t* votes_at(const Counting& counting, std::uint32_t worker,
                                     Column column) {
    return counting.votes + worker * counting.worker_words +
           column.block * kBlockWords * counting.n_planes + column.lane;
}

// Every vote becomes an unsigned number u with plane 0 lowest; the sign of the sum of votes is how
// the sum of the u compares with the number `balance` / 2.

// vote = 2 u - 1
inline BitSlicedSum sum_signs(const Run& run, const Counting& counting, Column column) {
    BitSlicedSum sum(planes_for(run.n_voters));
    std::size_t voter = 0;
    auto next = [&] { return load<u64>(votes_at(counting, run.voters[voter++], column)); };
    while (run.n_voters - voter >= 16) {
        sum.carry_into(4, sum.add_many<4>(next));
    }
    while (run.n_voters - voter >= 4) {
        sum.carry_into(2, sum.add_many<2>(next));
    }
    while (voter < run.n_voters) {
        sum.carry_into(0, next());
    }
    return sum;
}

// vote = u - 1, where u = 0, 1, 2
inline BitSlicedSum sum_ternary(const Run& run, const Counting& counting, Column column) {
    BitSlicedSum sum(planes_for(2 * run.n_voters));
    for (std::size_t voter = 0; voter < run.n_voters; ++voter) {
        const std::uint64_t* vote = votes_at(counting, run.voters[voter], column);
        const u64 sign = load<u64>(vote);
        const u64 non_zero = load<u64>(vote + kBlockWords);
        sum.carry_into(0, ~non_zero);
        sum.carry_into(1, sign & non_zero);
    }
    return sum;
}

// vote = 2 u - (2^p - 1): the top bit of u is the sign, the others those of a, inverted where the
// sign is negative
inline BitSlicedSum sum_levels(const Run& run, const Counting& counting, Column column) {
    const int n_bits = static_cast<int>(counting.n_planes);
    BitSlicedSum sum(planes_for(run.n_voters * ((std::uint64_t{1} << n_bits) - 1)));
    for (std::size_t voter = 0; voter < run.n_voters; ++voter) {
        const std::uint64_t* vote = votes_at(counting, run.voters[voter], column);
        const u64 sign = load<u64>(vote);
        u64 carry{};
        for (int bit = 0; bit < n_bits - 1; ++bit) {
            const u64 magnitude = load<u64>(vote + (bit + 1) * kBlockWords);
            carry = add_bits(sum.planes[bit], ~(magnitude ^ sign), carry);
        }
        carry = add_bits(sum.planes[n_bits - 1], sign, carry);
        sum.carry_into(n_bits, carry);
    }
    return sum;
}

// Which bits of a vector of words belong to the run.
inline u64 valid_bits(const Run& run, std::size_t word) {
    std::uint64_t valid[kVectorWords];
    for (int lane = 0; lane < kVectorWords; ++lane) {
        // Unsigned: a word before the run wraps around and is beyond its end.
        const std::size_t first = (word + lane - run.begin) * kWordElements;
        const bool is_inside = word + lane >= run.begin && word + lane < run.end;
        const std::size_t rest = is_inside && first < run.n_elements ? run.n_elements - first : 0;
        valid[lane] = rest >= kWordElements ? ~std::uint64_t{0} : (std::uint64_t{1} << rest) - 1;
    }
    return load<u64>(valid);
}

inline void put(std::uint64_t* out, u64 bits, u64 valid) {
    store(out, load<u64>(out) | (bits & valid));
}

inline u64 draw_coins(Coin coin, std::uint64_t first_word) {
    constexpr std::uint64_t golden = kGolden;
    u64 z{};
    for (int lane = 0; lane < kVectorWords; ++lane) {
        z[lane] = coin.key + (first_word + lane + 1) * golden;
    }
    const u64 bits = mix(z);
    return coin.inverted ? ~bits : bits;
}

inline BitSlicedSum sum_votes(const Run& run, const Counting& counting, Column column) {
    switch (counting.tally) {
        case Tally::ternary:
            return sum_ternary(run, counting, column);
        case Tally::levels:
            return sum_levels(run, counting, column);
        default:
            return sum_signs(run, counting, column);
    }
}

// Twice the sum of the u of votes that cancel.
inline std::uint64_t balance(const Run& run, const Counting& counting) {
    switch (counting.tally) {
        case Tally::ternary:
            return 2 * run.n_voters;
        case Tally::levels:
            return run.n_voters * ((std::uint64_t{1} << counting.n_planes) - 1);
        default:
            return run.n_voters;
    }
}

void count_bits(const Run& run, std::size_t begin, std::size_t end, const Counting& counting) {
    const std::size_t first = (run.begin > begin ? run.begin : begin) / kVectorWords * kVectorWords;
    const std::size_t last = run.end < end ? run.end : end;
    const std::uint64_t twice = balance(run, counting);
    for (std::size_t word = first; word < last; word += kVectorWords) {
        const Column column{word / kBlockWords, word % kBlockWords};
        const BitSlicedSum sum = sum_votes(run, counting, column);
        const u64 valid = valid_bits(run, word);
        std::uint64_t* out =
            counting.out + column.block * kBlockWords * counting.out_planes + column.lane;
        if (counting.tally == Tally::ones) {
            for (int plane = 0; plane < sum.n_planes; ++plane) {
                put(out + plane * kBlockWords, sum.planes[plane], valid);
            }
            continue;
        }
        const auto [above, differs] = sum.compare(twice / 2);
        if (counting.out_planes == 2) {
            // An odd balance lies between two sums: none is equal to it.
            put(out, above, valid);
            put(out + kBlockWords, twice % 2 ? ~u64{} : differs, valid);
        } else if (twice % 2) {
            put(out, above, valid);
        } else {
            const u64 coins = draw_coins(counting.tie, run.first_word + (word - run.begin));
            put(out, above | (~differs & coins), valid);
        }
    }
}

// The sign of sums of directions, added in float32 in rank order. NaN counts as not 0.
template <class Direction>
void count_directions(const Run& run, std::size_t begin, std::size_t end,
                      const Counting& counting) {
    const std::size_t first = run.begin > begin ? run.begin : begin;
    const std::size_t last = run.end < end ? run.end : end;
    for (std::size_t word = first; word < last; ++word) {
        const std::size_t done = (word - run.begin) * kWordElements;
        const std::size_t rest = run.n_elements - done;
        const std::uint64_t valid =
            rest >= kWordElements ? ~std::uint64_t{0} : (std::uint64_t{1} << rest) - 1;
        std::uint64_t above = 0;
        std::uint64_t zero = 0;
        for (int k = 0; k < kWordVectors; ++k) {
            f32 total{};
            for (std::size_t voter = 0; voter < run.n_voters; ++voter) {
                const auto* values = reinterpret_cast<const typename Direction::Stored*>(
                    counting.votes + run.voters[voter] * counting.worker_words);
                total += Direction::widen(values + word * kWordElements + k * kLanes);
            }
            above |= std::uint64_t{bits_above_zero(total)} << (k * kLanes);
            zero |= std::uint64_t{bits_of_zero(total)} << (k * kLanes);
        }
        std::uint64_t* out = counting.out + word / kBlockWords * kBlockWords * 2 + word % kBlockWords;
        out[0] = above & valid;
        out[kBlockWords] = ~zero & valid;
    }
}

void count_words(const Run& run, std::size_t begin, std::size_t end, const Counting& counting) {
    if (counting.tally != Tally::directions) {
        count_bits(run, begin, end, counting);
    } else if (counting.direction_type == DType::float32) {
        count_directions<Float32>(run, begin, end, counting);
    } else {
        count_directions<BFloat16>(run, begin, end, counting);
    }
}

}  // namespace
}  // namespace distlion
