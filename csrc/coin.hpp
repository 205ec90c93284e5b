// splitmix64, on single words and on vectors of words: src/distlion/kernels/coin.py.
#pragma once

#include <cstdint>

#include "core.hpp"

namespace distlion {
namespace {

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;

template <class Word>
inline Word mix(Word z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

inline std::uint64_t draw(Coin coin, std::uint64_t word) {
    const std::uint64_t bits = mix(coin.key + (word + 1) * kGolden);
    return coin.inverted ? ~bits : bits;
}

// 64 bits from bit `first_bit`, 0 to 63, of a word on.
inline std::uint64_t draw_from(Coin coin, std::uint64_t word, unsigned first_bit) {
    const std::uint64_t bits = draw(coin, word);
    return first_bit == 0 ? bits : (bits >> first_bit) | (draw(coin, word + 1) << (64 - first_bit));
}

// 16 bits for each of the 64 elements from bit `first_bit` of a word on.
class Noise {
public:
    Noise(Coin coin, std::uint64_t word, unsigned first_bit) : skipped_(first_bit % 4) {
        const std::uint64_t first = 16 * word + first_bit / 4;
        for (int k = 0; k < 16; ++k) {
            words_[k] = draw(coin, first + k);
        }
        if (skipped_ > 0) {
            words_[16] = draw(coin, first + 16);
        }
    }

    const std::uint8_t* bytes() const { return reinterpret_cast<const std::uint8_t*>(words_) + 2 * skipped_; }

private:
    std::uint64_t words_[17];
    unsigned skipped_;  // elements that the first word has bits for, but that come before
};

}  // namespace
}  // namespace distlion
