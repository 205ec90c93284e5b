// Checks: the digest of a tensor, the checksum of a frame.
#pragma once

#include "coin.hpp"
#include "simd.hpp"

namespace distlion {
namespace {

template <class Element>
std::uint64_t digest_elements(const Element* data, std::size_t begin, std::size_t end) {
    std::uint64_t total = 0;
    u64 totals{};
    u64 positions{};
    std::size_t j = begin;
    for (int lane = 0; lane < kVectorWords; ++lane) {
        positions[lane] = (begin + lane + 1) * kGolden;
    }
    for (; j + kVectorWords <= end; j += kVectorWords) {
        u64 bits{};
        for (int lane = 0; lane < kVectorWords; ++lane) {
            bits[lane] = data[j + lane];
        }
        totals += mix(bits + positions);
        positions += kVectorWords * kGolden;
    }
    for (int lane = 0; lane < kVectorWords; ++lane) {
        total += totals[lane];
    }
    for (; j < end; ++j) {
        total += mix(data[j] + (j + 1) * kGolden);
    }
    return total;
}

std::uint64_t digest_range(const void* data, std::size_t element_bytes, std::size_t begin,
                           std::size_t end) {
    switch (element_bytes) {
        case 1:
            return digest_elements(static_cast<const std::uint8_t*>(data), begin, end);
        case 2:
            return digest_elements(static_cast<const std::uint16_t*>(data), begin, end);
        default:
            return digest_elements(static_cast<const std::uint32_t*>(data), begin, end);
    }
}

// CRC-32 of IEEE 802.3: polynomial 0x04C11DB7, bits reflected, register and result inverted.

constexpr std::uint32_t kReflectedPolynomial = 0xEDB88320;

// table[k][b]: the register after byte b and k zero bytes.
struct CrcTables {
    std::uint32_t table[8][256];

    constexpr CrcTables() : table{} {
        for (std::uint32_t byte = 0; byte < 256; ++byte) {
            std::uint32_t crc = byte;
            for (int bit = 0; bit < 8; ++bit) {
                crc = (crc >> 1) ^ (crc & 1 ? kReflectedPolynomial : 0);
            }
            table[0][byte] = crc;
        }
        for (int zeros = 1; zeros < 8; ++zeros) {
            for (std::uint32_t byte = 0; byte < 256; ++byte) {
                const std::uint32_t crc = table[zeros - 1][byte];
                table[zeros][byte] = (crc >> 8) ^ table[0][crc & 0xFF];
            }
        }
    }
};

constexpr CrcTables kCrc;

// Eight bytes at a time, by tables; `crc` is the bare register.
std::uint32_t crc_by_tables(const std::uint8_t* data, std::size_t n_bytes, std::uint32_t crc) {
    for (; n_bytes >= 8; data += 8, n_bytes -= 8) {
        std::uint64_t next;
        std::memcpy(&next, data, 8);
        next ^= crc;
        crc = 0;
        for (int byte = 0; byte < 8; ++byte) {
            crc ^= kCrc.table[7 - byte][(next >> (8 * byte)) & 0xFF];
        }
    }
    for (; n_bytes > 0; ++data, --n_bytes) {
        crc = (crc >> 8) ^ kCrc.table[0][(crc ^ *data) & 0xFF];
    }
    return crc;
}

#if defined(__PCLMUL__)

// x^n mod P, bits reflected, times x: what moves a register n bits ahead by carry-less product.
constexpr std::uint64_t power_of_x(int n) {
    std::uint32_t power = 0x80000000;  // x^0
    for (int k = 0; k < n; ++k) {
        power = (power >> 1) ^ (power & 1 ? kReflectedPolynomial : 0);
    }
    return std::uint64_t{power} << 1;
}

// Move 16 bytes ahead by the distance that `powers` says, and add what stands there.
inline __m128i fold(__m128i register_, __m128i next, __m128i powers) {
    const __m128i low = _mm_clmulepi64_si128(register_, powers, 0x00);
    const __m128i high = _mm_clmulepi64_si128(register_, powers, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

template <int bits>
inline __m128i powers_for() {
    constexpr std::uint64_t low = power_of_x(bits + 32);
    constexpr std::uint64_t high = power_of_x(bits - 32);
    return _mm_set_epi64x(static_cast<long long>(high), static_cast<long long>(low));
}

// 64 bytes at a time; the last 16 that the folds leave go through the tables. After V. Gopal et al.,
// "Fast CRC computation for generic polynomials using PCLMULQDQ", Intel 2009.
std::uint32_t crc_by_folding(const std::uint8_t* data, std::size_t n_bytes, std::uint32_t crc) {
    if (n_bytes < 128) {
        return crc_by_tables(data, n_bytes, crc);
    }
    const auto row = [&](std::size_t at) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + at));
    };
    __m128i lanes[4] = {row(0), row(16), row(32), row(48)};
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
    const __m128i by_64_bytes = powers_for<512>();
    const __m128i by_16_bytes = powers_for<128>();
    data += 64;
    n_bytes -= 64;
    for (; n_bytes >= 64; data += 64, n_bytes -= 64) {
        for (int lane = 0; lane < 4; ++lane) {
            lanes[lane] = fold(lanes[lane], row(16 * lane), by_64_bytes);
        }
    }
    __m128i folded = lanes[0];
    for (int lane = 1; lane < 4; ++lane) {
        folded = fold(folded, lanes[lane], by_16_bytes);
    }
    alignas(16) std::uint8_t left[16];
    _mm_store_si128(reinterpret_cast<__m128i*>(left), folded);
    return crc_by_tables(data, n_bytes, crc_by_tables(left, 16, 0));
}

#endif

std::uint32_t checksum_bytes(const std::uint8_t* data, std::size_t n_bytes, std::uint32_t start) {
#if defined(__PCLMUL__)
    return ~crc_by_folding(data, n_bytes, ~start);
#else
    return ~crc_by_tables(data, n_bytes, ~start);
#endif
}

}  // namespace
}  // namespace distlion
