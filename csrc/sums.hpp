// Sums of 4,096 numbers in double, by a fixed tree: they depend on no vector's width.
#pragma once

#include <cstring>
#include <type_traits>

#include "core.hpp"
#include "simd.hpp"

namespace distlion {
namespace {

// Three halvings of 8 * n numbers x(0), x(1), ... at once.
template <int n, class Numbers>
inline void halve_thrice(Numbers x, double* sums) {
    for (int j = 0; j < n; ++j) {
        const auto at = [&](int octant) { return x(j + n * octant); };
        sums[j] = ((at(0) + at(4)) + (at(2) + at(6))) + ((at(1) + at(5)) + (at(3) + at(7)));
    }
}

// Adds t[j] + t[j + h] for h = 2048, 1024, ..., 1, where t[j] = term(x[j]).
template <class Number, class Term>
inline double sum_by_halving(const Number* x, Term term) {
    double of_8[512], of_64[64], of_512[8], of_4096;
    halve_thrice<512>([&](int j) { return term(static_cast<double>(x[j])); }, of_8);
    halve_thrice<64>([&](int j) { return of_8[j]; }, of_64);
    halve_thrice<8>([&](int j) { return of_64[j]; }, of_512);
    halve_thrice<1>([&](int j) { return of_512[j]; }, &of_4096);
    return of_4096;
}

// Widen a block of `n_elements` into `room`, zeros behind them. A whole block of floats stays where it is.
template <class Type>
inline const float* widen_block(const typename Type::Stored* block, std::size_t n_elements,
                                float (&room)[kScaleBlockElements]) {
    using Stored = typename Type::Stored;
    const std::size_t n_whole = n_elements / kLanes * kLanes;
    if constexpr (std::is_same_v<Type, Float32>) {
        if (n_whole == kScaleBlockElements) {
            return block;
        }
    }
    for (std::size_t j = 0; j < n_whole; j += kLanes) {
        store(room + j, Type::widen(block + j));
    }
    if (n_whole < kScaleBlockElements) {
        Stored rest[kLanes]{};
        std::memcpy(rest, block + n_whole, (n_elements - n_whole) * sizeof(Stored));
        std::memset(room + n_whole, 0, (kScaleBlockElements - n_whole) * sizeof(float));
        store(room + n_whole, Type::widen(rest));
    }
    return room;
}

template <class Type>
void square_sums_of(const void* data, std::size_t begin, std::size_t end, double* out) {
    const auto* elements = static_cast<const typename Type::Stored*>(data);
    alignas(64) float room[kScaleBlockElements];
    for (std::size_t at = begin; at < end; at += kScaleBlockElements) {
        const std::size_t n_rest = end - at;
        const std::size_t n_here = n_rest < kScaleBlockElements ? n_rest : kScaleBlockElements;
        const float* x = widen_block<Type>(elements + at, n_here, room);
        out[at / kScaleBlockElements] = sum_by_halving(x, [](double number) { return number * number; });
    }
}

void square_sums_range(const void* data, DType type, std::size_t begin, std::size_t end, double* out) {
    switch (type) {
        case DType::bfloat16:
            return square_sums_of<BFloat16>(data, begin, end, out);
        case DType::float16:
            return square_sums_of<Float16>(data, begin, end, out);
        default:
            return square_sums_of<Float32>(data, begin, end, out);
    }
}

}  // namespace
}  // namespace distlion
