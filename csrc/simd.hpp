// Vectors of the instruction set that a file is compiled for: kLanes floats, or as many bytes of
// something else. Arithmetic is written with the operators of GCC's and Clang's vector types; only
// what these cannot say needs intrinsics. Everything has internal linkage, so that no function
// compiled for one instruction set can be linked into the loops of another. There is no library
// underneath: those that choose at run time are not on PyPI, and a package must build from source
// with a compiler alone.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace distlion {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kWordVectors = 64 / kLanes;  // vectors of floats that hold the elements of a word
constexpr int kVectorWords = kLanes / 2;   // words in one vector

using f32 = float __attribute__((vector_size(4 * kLanes)));
using i32 = std::int32_t __attribute__((vector_size(4 * kLanes)));
using u32 = std::uint32_t __attribute__((vector_size(4 * kLanes)));
using u64 = std::uint64_t __attribute__((vector_size(4 * kLanes)));
using u16 = std::uint16_t __attribute__((vector_size(2 * kLanes)));
using u8 = std::uint8_t __attribute__((vector_size(kLanes)));

template <class Vector>
inline Vector load(const void* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

template <class Vector>
inline void store(void* to, Vector vector) {
    std::memcpy(to, &vector, sizeof vector);
}

inline u32 fill(std::uint32_t value) { return u32{} + value; }
// Not by a sum, which would lose the sign of -0.
inline f32 fill(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return (f32)fill(bits);
}

// Take `yes` where the mask is all ones, `no` where it is 0.
inline u32 choose(u32 mask, u32 yes, u32 no) { return (mask & yes) | (~mask & no); }

// Bits of lanes: lane k of a comparison is bit k.

#if defined(__AVX512F__)

inline std::uint32_t bits_above_zero(f32 x) {
    return _mm512_cmp_ps_mask((__m512)x, _mm512_setzero_ps(), _CMP_GT_OQ);
}
inline std::uint32_t bits_below_zero(f32 x) {
    return _mm512_cmp_ps_mask((__m512)x, _mm512_setzero_ps(), _CMP_LT_OQ);
}
inline std::uint32_t bits_of_zero(f32 x) {
    return _mm512_cmp_ps_mask((__m512)x, _mm512_setzero_ps(), _CMP_EQ_OQ);
}
inline std::uint32_t bits_at_least(f32 x, f32 least) {
    return _mm512_cmp_ps_mask((__m512)x, (__m512)least, _CMP_GE_OQ);
}
inline bool any_top_bit(u32 x) { return _mm512_movepi32_mask((__m512i)x) != 0; }
inline u32 masks_of(std::uint32_t bits) { return (u32)_mm512_movm_epi32((__mmask16)bits); }
inline f32 keep_same_sign(f32 x, f32 y) {
    const std::uint32_t above = bits_above_zero(x) & bits_above_zero(y);
    const std::uint32_t below = bits_below_zero(x) & bits_below_zero(y);
    return (f32)_mm512_maskz_mov_ps((__mmask16)(above | below), (__m512)x);
}

#elif defined(__AVX2__)

inline std::uint32_t bits_above_zero(f32 x) {
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_setzero_ps(), _CMP_GT_OQ));
}
inline std::uint32_t bits_below_zero(f32 x) {
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_setzero_ps(), _CMP_LT_OQ));
}
inline std::uint32_t bits_of_zero(f32 x) {
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_setzero_ps(), _CMP_EQ_OQ));
}
inline std::uint32_t bits_at_least(f32 x, f32 least) {
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)least, _CMP_GE_OQ));
}
inline bool any_top_bit(u32 x) { return _mm256_movemask_ps((__m256)x) != 0; }
inline u32 masks_of(std::uint32_t bits) {
    constexpr u32 lane_bits = {1, 2, 4, 8, 16, 32, 64, 128};
    return (u32)((fill(bits) & lane_bits) == lane_bits);
}

#elif defined(__SSE2__)

inline std::uint32_t bits_above_zero(f32 x) {
    return _mm_movemask_ps(_mm_cmpgt_ps((__m128)x, _mm_setzero_ps()));
}
inline std::uint32_t bits_below_zero(f32 x) {
    return _mm_movemask_ps(_mm_cmplt_ps((__m128)x, _mm_setzero_ps()));
}
inline std::uint32_t bits_of_zero(f32 x) {
    return _mm_movemask_ps(_mm_cmpeq_ps((__m128)x, _mm_setzero_ps()));
}
inline std::uint32_t bits_at_least(f32 x, f32 least) {
    return _mm_movemask_ps(_mm_cmpge_ps((__m128)x, (__m128)least));
}
inline bool any_top_bit(u32 x) { return _mm_movemask_ps((__m128)x) != 0; }
inline u32 masks_of(std::uint32_t bits) {
    constexpr u32 lane_bits = {1, 2, 4, 8};
    return (u32)((fill(bits) & lane_bits) == lane_bits);
}

#elif defined(__aarch64__)

constexpr u32 kLaneBits = {1, 2, 4, 8};
inline std::uint32_t bits_of_masks(uint32x4_t masks) {
    return vaddvq_u32(vandq_u32(masks, (uint32x4_t)kLaneBits));
}
inline std::uint32_t bits_above_zero(f32 x) { return bits_of_masks(vcgtzq_f32((float32x4_t)x)); }
inline std::uint32_t bits_below_zero(f32 x) { return bits_of_masks(vcltzq_f32((float32x4_t)x)); }
inline std::uint32_t bits_of_zero(f32 x) { return bits_of_masks(vceqzq_f32((float32x4_t)x)); }
inline std::uint32_t bits_at_least(f32 x, f32 least) {
    return bits_of_masks(vcgeq_f32((float32x4_t)x, (float32x4_t)least));
}
inline bool any_top_bit(u32 x) { return vmaxvq_u32((uint32x4_t)x) >> 31; }
inline u32 masks_of(std::uint32_t bits) {
    return (u32)((fill(bits) & kLaneBits) == kLaneBits);
}

#endif

#if !defined(__AVX512F__)
// x where x and y are both above or both below 0, else +0. Not by their product, which may underflow.
inline f32 keep_same_sign(f32 x, f32 y) {
    const u32 above = (u32)(x > f32{}) & (u32)(y > f32{});
    const u32 below = (u32)(x < f32{}) & (u32)(y < f32{});
    return (f32)((u32)x & (above | below));
}
#endif

// Gather bit `bit` of 64 bytes into a word, lowest byte first.
inline std::uint64_t gather_bit(const std::uint8_t (&bytes)[64], int bit) {
#if defined(__AVX512F__)
    const __m512i row = _mm512_loadu_si512(bytes);
    return _mm512_movepi8_mask(_mm512_sll_epi16(row, _mm_cvtsi32_si128(7 - bit)));
#else
    std::uint64_t word = 0;
    for (int group = 0; group < 8; ++group) {
        std::uint64_t octet;
        std::memcpy(&octet, bytes + 8 * group, 8);
        // The product moves bit 0 of byte k to bit 56 + k; no two of its terms meet.
        octet = (((octet >> bit) & 0x0101010101010101) * 0x0102040810204080) >> 56;
        word |= octet << (8 * group);
    }
    return word;
#endif
}

// The dtypes of tensors. `first_infinite` is the absolute value, as bits of a float, from which on a
// float is stored as an infinity.

struct Float32 {
    using Stored = float;
    static constexpr std::uint32_t first_infinite = 0x7F800000;
    static f32 widen(const Stored* from) { return load<f32>(from); }
    static void narrow(Stored* to, f32 x) { store(to, x); }
};

struct BFloat16 {
    using Stored = std::uint16_t;
    static constexpr std::uint32_t first_infinite = 0x7F7F8000;
    static f32 widen(const Stored* from) {
        return (f32)(__builtin_convertvector(load<u16>(from), u32) << 16);
    }
    static void narrow(Stored* to, f32 x) {
        const u32 bits = (u32)x;
        const u32 rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
        const u32 is_nan = (u32)((bits & 0x7FFFFFFF) > 0x7F800000);
        store(to, __builtin_convertvector(choose(is_nan, fill(0x7FC0u), rounded), u16));
    }
    // Add 16 random bits below the mantissa that is kept, then cut; infinities and NaN stay.
    static void narrow_at_random(Stored* to, f32 x, const void* noise) {
        const u32 bits = (u32)x;
        const u32 is_finite = (u32)((bits & 0x7FFFFFFF) < 0x7F800000);
        const u32 noisy = bits + (is_finite & __builtin_convertvector(load<u16>(noise), u32));
        const u32 is_nan = (u32)((bits & 0x7FFFFFFF) > 0x7F800000);
        store(to, __builtin_convertvector(choose(is_nan, fill(0x7FC0u), noisy >> 16), u16));
    }
};

struct Float16 {
    using Stored = std::uint16_t;
    static constexpr std::uint32_t first_infinite = 0x477FF000;
#if defined(__AVX512F__)
    static f32 widen(const Stored* from) {
        return (f32)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
    }
    static void narrow(Stored* to, f32 x) {
        const __m256i halves =
            _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm256_storeu_si256((__m256i*)to, halves);
    }
#elif defined(__F16C__)
    static f32 widen(const Stored* from) {
        return (f32)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
    }
    static void narrow(Stored* to, f32 x) {
        const __m128i halves =
            _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128((__m128i*)to, halves);
    }
#elif defined(__aarch64__)
    static f32 widen(const Stored* from) {
        return (f32)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
    }
    static void narrow(Stored* to, f32 x) {
        vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
    }
#else
    // Exact by floats: a half's exponent and mantissa, moved up, are a float that is 2^112 times too
    // small; those with the highest exponent are infinities and NaN.
    static f32 widen(const Stored* from) {
        const u32 half = __builtin_convertvector(load<u16>(from), u32);
        const u32 magnitude = (half & 0x7FFF) << 13;
        const u32 scaled = (u32)((f32)magnitude * 0x1p112f);
        const u32 is_special = (u32)(magnitude >= (0x7C00u << 13));
        const u32 special = magnitude | 0x7F800000;
        return (f32)(choose(is_special, special, scaled) | ((half & 0x8000) << 16));
    }
    static void narrow(Stored* to, f32 x) {
        const u32 sign = (u32)x & 0x80000000;
        const u32 magnitude = (u32)x ^ sign;
        // Small ones: added to 0.5, a float's last bit is worth 2^-24, a half's smallest step.
        const u32 small = (u32)((f32)magnitude + 0.5f) - 0x3F000000;
        const u32 normal =
            (magnitude - (112u << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
        u32 half = choose((u32)(magnitude < (113u << 23)), small, normal);
        half = choose((u32)(magnitude >= first_infinite), fill(0x7C00u), half);
        half = choose((u32)(magnitude > 0x7F800000), fill(0x7E00u), half);
        store(to, __builtin_convertvector(half | (sign >> 16), u16));
    }
#endif
};

// Notes whether values would be stored as finite numbers of a dtype.
template <class Type>
class FiniteCheck {
public:
    // The sum's top bit is set from `first_infinite` on.
    void see(f32 x) { seen_ |= ((u32)x & 0x7FFFFFFF) + (0x80000000 - Type::first_infinite); }
    bool all_finite() const { return !any_top_bit(seen_); }

private:
    u32 seen_{};
};

}  // namespace
}  // namespace distlion
