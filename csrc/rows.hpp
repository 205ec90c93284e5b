// The elements of a parameter, word by word, and the blends of gradient and momentum.
#pragma once

#include <cstring>

#include "core.hpp"
#include "simd.hpp"

namespace distlion {
namespace {

// 64 elements of one parameter.
template <class Param, class Momentum>
struct Row {
    const typename Param::Stored* grad;
    typename Momentum::Stored* exp_avg;
    typename Param::Stored* param;
    float* estimate;
    std::uint64_t valid;  // bit j: element j exists
};

// Ask for `n_bytes` that lie `ahead` of an address. The hardware's own prefetcher stops at the end of
// every page of 4 KiB.
template <int locality>
inline void prefetch(const void* from, std::size_t ahead, std::size_t n_bytes) {
    const auto address = reinterpret_cast<std::uintptr_t>(from) + ahead;
    for (std::size_t line = 0; line < n_bytes; line += 64) {
        __builtin_prefetch(reinterpret_cast<const void*>(address + line), 0, locality);
    }
}

constexpr std::size_t kPrefetchWords = 16;

// What a loop does with a segment. What it does not use is never touched: it may be absent.
struct Access {
    bool reads_votes;  // gradient and momentum
    bool moves_param;
    bool moves_momentum;
    bool prefetches = true;
    bool reads_estimate = false;
    bool moves_estimate = false;
};

// Call `visit(word, row)` for words [begin, end). The last word of a parameter is padded with zeros
// in a copy; what the loop moves is copied back.
template <class Param, class Momentum, Access access, class Visit>
inline void each_word(const Segment& segment, std::size_t begin, std::size_t end, Visit visit) {
    using P = typename Param::Stored;
    using M = typename Momentum::Stored;
    const auto* grad = static_cast<const P*>(segment.grad);
    auto* exp_avg = static_cast<M*>(segment.exp_avg);
    auto* param = static_cast<P*>(segment.param);
    const auto row_at = [&](std::size_t first) {
        Row<Param, Momentum> row{nullptr, nullptr, nullptr, nullptr, ~std::uint64_t{0}};
        if constexpr (access.reads_votes) {
            row.grad = grad + first;
            row.exp_avg = exp_avg + first;
        }
        if constexpr (access.moves_param) {
            row.param = param + first;
        }
        if constexpr (access.reads_estimate) {
            row.estimate = segment.estimate + first;
        }
        return row;
    };
    const std::size_t n_full = segment.n_elements / kWordElements;
    const std::size_t whole_end = end < n_full ? end : n_full;
    for (std::size_t word = begin; word < whole_end; ++word) {
        const auto row = row_at(word * kWordElements);
        // Not beyond the end, where another tensor may lie.
        if (access.prefetches && word + kPrefetchWords < n_full) {
            constexpr std::size_t ahead = kPrefetchWords * kWordElements;
            if constexpr (access.reads_votes) {
                prefetch<3>(row.grad, ahead * sizeof(P), kWordElements * sizeof(P));
                prefetch<3>(row.exp_avg, ahead * sizeof(M), kWordElements * sizeof(M));
            }
            if constexpr (access.moves_param) {
                prefetch<3>(row.param, ahead * sizeof(P), kWordElements * sizeof(P));
            }
            if constexpr (access.reads_estimate) {
                prefetch<3>(row.estimate, ahead * sizeof(float), kWordElements * sizeof(float));
            }
        }
        visit(word, row);
    }
    if (begin > n_full || end <= n_full) {
        return;
    }
    const std::size_t rest = segment.n_elements - n_full * kWordElements;
    const auto row = row_at(n_full * kWordElements);
    P grad_copy[kWordElements]{};
    M exp_avg_copy[kWordElements]{};
    P param_copy[kWordElements]{};
    float estimate_copy[kWordElements]{};
    if constexpr (access.reads_votes) {
        std::memcpy(grad_copy, row.grad, rest * sizeof(P));
        std::memcpy(exp_avg_copy, row.exp_avg, rest * sizeof(M));
    }
    if constexpr (access.moves_param) {
        std::memcpy(param_copy, row.param, rest * sizeof(P));
    }
    if constexpr (access.reads_estimate) {
        std::memcpy(estimate_copy, row.estimate, rest * sizeof(float));
    }
    visit(n_full, Row<Param, Momentum>{grad_copy, exp_avg_copy, param_copy, estimate_copy,
                                       (std::uint64_t{1} << rest) - 1});
    if constexpr (access.moves_momentum) {
        std::memcpy(row.exp_avg, exp_avg_copy, rest * sizeof(M));
    }
    if constexpr (access.moves_param) {
        std::memcpy(row.param, param_copy, rest * sizeof(P));
    }
    if constexpr (access.moves_estimate) {
        std::memcpy(row.estimate, estimate_copy, rest * sizeof(float));
    }
}

struct LaneBits {
    std::uint64_t above, zero;
};

// c and m' of one vector of elements.
struct Blend {
    f32 beta1, one_minus_beta1, beta2, one_minus_beta2, grad_scale;

    explicit Blend(const Segment& segment)
        : beta1(fill(segment.beta1)),
          one_minus_beta1(fill(segment.one_minus_beta1)),
          beta2(fill(segment.beta2)),
          one_minus_beta2(fill(segment.one_minus_beta2)),
          grad_scale(fill(segment.grad_scale)) {}

    // A scale of 1 changes no bit.
    template <class Param>
    f32 scaled_grad(const typename Param::Stored* grad) const {
        return Param::widen(grad) * grad_scale;
    }
    f32 direction(f32 m, f32 g) const { return beta1 * m + one_minus_beta1 * g; }
    // What a vote is on, and where it is above 0 and where 0: a bit for each lane.
    static f32 voted(f32 c, f32) { return c; }
    static LaneBits vote(f32 c, f32) { return {bits_above_zero(c), bits_of_zero(c)}; }
    f32 new_momentum(f32 m, f32 g) const { return beta2 * m + one_minus_beta2 * g; }
};

// Of a cautious parameter.
struct CautiousBlend : Blend {
    using Blend::Blend;
    static f32 voted(f32 c, f32 g) { return keep_same_sign(c, g); }
    static LaneBits vote(f32 c, f32 g) {
        const std::uint32_t above = bits_above_zero(c) & bits_above_zero(g);
        const std::uint32_t below = bits_below_zero(c) & bits_below_zero(g);
        return {above, (above | below) ^ ((1u << kLanes) - 1)};
    }
};

// Call `visit.operator()<Param, Momentum>()` with the dtypes of a segment.
template <class Visit>
inline auto with_types(const Segment& segment, Visit visit) {
    const bool is_wide = segment.exp_avg_type == DType::float32;
    switch (segment.param_type) {
        case DType::bfloat16:
            return is_wide ? visit.template operator()<BFloat16, Float32>()
                           : visit.template operator()<BFloat16, BFloat16>();
        case DType::float16:
            return is_wide ? visit.template operator()<Float16, Float32>()
                           : visit.template operator()<Float16, BFloat16>();
        default:
            return is_wide ? visit.template operator()<Float32, Float32>()
                           : visit.template operator()<Float32, BFloat16>();
    }
}

// Call `visit.operator()<Param, Momentum, Blend>()` with the dtypes and the blend of a segment.
template <class Visit>
inline auto with_blend(const Segment& segment, Visit visit) {
    return with_types(segment, [&]<class Param, class Momentum>() {
        return segment.is_cautious ? visit.template operator()<Param, Momentum, CautiousBlend>()
                                   : visit.template operator()<Param, Momentum, Blend>();
    });
}

}  // namespace
}  // namespace distlion
