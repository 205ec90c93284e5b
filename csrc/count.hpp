// Counting: the votes of many workers are added bit-sliced. A vector holds one bit of many
// elements; the sum of an element lies across the planes of a column of such vectors.
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

    void carry_into(int plane, int n_planes, u64 carry) {
        for (; plane < n_planes; ++plane) {
            const u64 next = planes[plane] & carry;
            planes[plane] ^= carry;
            carry = next;
        }
    }

    // Add 2^Depth bits taken from `next()` to plane `lowest`; what overflows the Depth planes from
    // there on is returned.
    template <int Depth, class Next>
    u64 add_many(int lowest, Next& next) {
        if constexpr (Depth == 0) {
            return next();
        } else {
            const u64 first = add_many<Depth - 1>(lowest, next);
            const u64 second = add_many<Depth - 1>(lowest, next);
            return add_bits(planes[lowest + Depth - 1], first, second);
        }
    }

    // Masks of the elements whose sum is above `limit`, and of those where it is not `limit`.
    struct Comparison {
        u64 above, differs;
    };
    Comparison compare(int n_planes, std::uint64_t limit) const {
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

inline bool counts_pairs(Tally tally) { return tally == Tally::pairs || tally == Tally::pairs_or_zero; }

// Every vote becomes an unsigned number u, plane 0 lowest; the sign of the sum of votes is how the sum
// of the u compares with half of `balance`.
//     signs      vote = 2 u - 1
//     ternary    vote = u - 1, where u = 0, 1, 2
//     levels     vote = 2 u - (2^p - 1): the top bit of u is the sign, the others are those of a,
//                inverted where the sign is negative
//     pairs      two votes, each as signs: the first plane and the second
struct Ballots {
    const Counting& counting;
    const Run& run;
    std::size_t first_plane;
    int n_bits;             // of u
    std::uint64_t highest;  // u
    std::uint64_t balance;  // twice the sum of the u of votes that cancel

    Ballots(const Counting& counting, const Run& run, std::size_t first_plane = 0)
        : counting(counting), run(run), first_plane(first_plane) {
        n_bits = counts_pairs(counting.tally) ? 1 : static_cast<int>(counting.n_planes);
        const bool is_ternary = counting.tally == Tally::ternary;
        highest = is_ternary ? 2 : (std::uint64_t{1} << n_bits) - 1;
        balance = run.n_voters * highest;
    }

    // Bit `bit` of the u of one voter, for the words from `word` on.
    u64 read(std::size_t voter, std::size_t word, int bit) const {
        const std::uint64_t* vote = counting.votes + run.voters[voter] * counting.worker_words +
                                    word / kBlockWords * kBlockWords * counting.n_planes +
                                    first_plane * kBlockWords + word % kBlockWords;
        const u64 sign = load<u64>(vote);
        if (counting.tally == Tally::ternary) {
            const u64 non_zero = load<u64>(vote + kBlockWords);
            return bit == 0 ? ~non_zero : sign & non_zero;
        }
        if (bit == n_bits - 1) {
            return sign;
        }
        return ~(load<u64>(vote + (bit + 1) * kBlockWords) ^ sign);
    }

    // Add the votes of `n_voters` from `first` on.
    void add(BitSlicedSum& sum, int n_planes, std::size_t word, std::size_t first,
             std::size_t n_voters) const {
        for (int bit = 0; bit < n_bits; ++bit) {
            std::size_t voter = first;
            auto next = [&] { return read(voter++, word, bit); };
            for (std::size_t rest = n_voters; rest > 0;) {
                if (rest >= 16) {
                    sum.carry_into(bit + 4, n_planes, sum.add_many<4>(bit, next));
                    rest -= 16;
                } else if (rest >= 4) {
                    sum.carry_into(bit + 2, n_planes, sum.add_many<2>(bit, next));
                    rest -= 4;
                } else {
                    sum.carry_into(bit, n_planes, next());
                    --rest;
                }
            }
        }
    }
};

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
    u64 z{};
    for (int lane = 0; lane < kVectorWords; ++lane) {
        z[lane] = coin.key + (first_word + lane + 1) * kGolden;
    }
    const u64 bits = mix(z);
    return coin.inverted ? ~bits : bits;
}

// As draw_from, for a bit other than 0. Not inlined: that would slow down the loop of those at bit 0.
[[gnu::noinline]] u64 draw_coins_from(Coin coin, std::uint64_t first_word, unsigned first_bit) {
    return (draw_coins(coin, first_word) >> first_bit) |
           (draw_coins(coin, first_word + 1) << (kWordElements - first_bit));
}

// Where the sum of votes is above 0, and where it is not 0.
inline BitSlicedSum::Comparison find_signs(const BitSlicedSum& sum, int n_planes, const Ballots& ballots) {
    BitSlicedSum::Comparison signs = sum.compare(n_planes, ballots.balance / 2);
    // An odd balance lies between two sums: none is equal to it.
    if (ballots.balance % 2 != 0) {
        signs.differs = ~u64{};
    }
    return signs;
}

// Where two sums are above 0, and where they have the same sign.
inline BitSlicedSum::Comparison keep_agreed(BitSlicedSum::Comparison first, BitSlicedSum::Comparison second) {
    const u64 above = first.above & second.above;
    const u64 below = (first.differs & ~first.above) & (second.differs & ~second.above);
    return {above, above | below};
}

// Write the reply for the words from `word` on, by the sums of each plane of pairs, or by one sum.
template <std::size_t n_sums>
inline void reply_with(const BitSlicedSum (&sums)[n_sums], int n_planes, const Ballots (&ballots)[n_sums],
                       std::size_t word) {
    const Counting& counting = ballots[0].counting;
    const Run& run = ballots[0].run;
    const u64 valid = valid_bits(run, word);
    std::uint64_t* out = counting.out + word / kBlockWords * kBlockWords * counting.out_planes +
                         word % kBlockWords;
    if (counting.tally == Tally::ones) {
        for (int plane = 0; plane < n_planes; ++plane) {
            put(out + plane * kBlockWords, sums[0].planes[plane], valid);
        }
        return;
    }
    BitSlicedSum::Comparison signs = find_signs(sums[0], n_planes, ballots[0]);
    if constexpr (n_sums == 2) {
        signs = keep_agreed(signs, find_signs(sums[1], n_planes, ballots[1]));
    }
    const auto [above, differs] = signs;
    const bool may_be_zero = n_sums == 2 || ballots[0].balance % 2 == 0;
    if (counting.out_planes == 2) {
        put(out, above, valid);
        put(out + kBlockWords, differs, valid);
    } else if (may_be_zero) {
        const std::uint64_t first_word = run.first_word + (word - run.begin);
        const u64 coins = run.first_bit == 0 ? draw_coins(counting.tie, first_word)
                                             : draw_coins_from(counting.tie, first_word, run.first_bit);
        put(out, above | (~differs & coins), valid);
    } else {
        put(out, above, valid);
    }
}

// Votes are read in tiles, 16 workers at a time: so many rows at once the hardware's prefetcher follows.
constexpr std::size_t kTileVectors = 8;
constexpr std::size_t kTileWords = kTileVectors * kVectorWords;
constexpr std::size_t kTileVoters = 16;

template <std::size_t n_sums>
void count_bits(const Run& run, std::size_t begin, std::size_t end,
                const Ballots (&ballots)[n_sums]) {
    const int n_planes = planes_for(run.n_voters * ballots[0].highest);
    const std::size_t first = (run.begin > begin ? run.begin : begin) / kVectorWords * kVectorWords;
    const std::size_t last = run.end < end ? run.end : end;
    for (std::size_t tile = first; tile < last; tile += kTileWords) {
        const std::size_t tile_end = tile + kTileWords < last ? tile + kTileWords : last;
        BitSlicedSum sums[kTileVectors][n_sums];
        for (auto& of_word : sums) {
            for (BitSlicedSum& sum : of_word) {
                for (int plane = 0; plane < n_planes; ++plane) {
                    sum.planes[plane] = u64{};
                }
            }
        }
        for (std::size_t voter = 0; voter < run.n_voters; voter += kTileVoters) {
            const std::size_t rest = run.n_voters - voter;
            const std::size_t n_voters = rest < kTileVoters ? rest : kTileVoters;
            auto* of_word = sums;
            for (std::size_t word = tile; word < tile_end; word += kVectorWords, ++of_word) {
                for (std::size_t k = 0; k < n_sums; ++k) {
                    ballots[k].add((*of_word)[k], n_planes, word, voter, n_voters);
                }
            }
        }
        const auto* of_word = sums;
        for (std::size_t word = tile; word < tile_end; word += kVectorWords) {
            reply_with(*of_word++, n_planes, ballots, word);
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
    if (counts_pairs(counting.tally)) {
        count_bits<2>(run, begin, end, {{counting, run, 0}, {counting, run, 1}});
    } else if (counting.tally != Tally::directions) {
        count_bits<1>(run, begin, end, {{counting, run}});
    } else if (counting.direction_type == DType::float32) {
        count_directions<Float32>(run, begin, end, counting);
    } else {
        count_directions<BFloat16>(run, begin, end, counting);
    }
}

}  // namespace
}  // namespace distlion
