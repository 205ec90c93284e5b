// All loops of one instruction set. The build compiles this file once for each, with its flags and
// with DISTLION_INSTRUCTION_SET as the name that dispatch.cpp knows it by.

#include <type_traits>

#include "core.hpp"
#include "checks.hpp"
#include "commit.hpp"
#include "count.hpp"
#include "encode.hpp"
#include "feedback.hpp"
#include "sums.hpp"

namespace distlion {
namespace {

void stream_encode_words(const float* grad, const float* exp_avg, std::size_t n_words,
                         std::uint64_t* out) {
    for (std::size_t word = 0; word < n_words; ++word) {
        u32 seen{};
        for (int k = 0; k < kWordVectors; ++k) {
            const std::size_t at = word * kWordElements + k * kLanes;
            seen |= load<u32>(grad + at) ^ load<u32>(exp_avg + at);
        }
        store(out + word, ((u64)seen)[0]);
    }
}

void stream_commit_words(const float* grad, float* exp_avg, float* param, std::size_t n_words,
                         const std::uint64_t* reply) {
    for (std::size_t word = 0; word < n_words; ++word) {
        const u32 bits = fill(static_cast<std::uint32_t>(reply ? reply[word] : 0));
        for (int k = 0; k < kWordVectors; ++k) {
            const std::size_t at = word * kWordElements + k * kLanes;
            const u32 g = load<u32>(grad + at);
            store(exp_avg + at, load<u32>(exp_avg + at) ^ g);
            store(param + at, load<u32>(param + at) ^ bits);
        }
    }
}

}  // namespace

extern const Loops DISTLION_INSTRUCTION_SET;
const Loops DISTLION_INSTRUCTION_SET = {
    encode_words,      encode_rest_words, encode_size_words,   add_sums,
    measure_words,     encode_lot_words,  move_residual_words, add_step_words,
    count_sum_words,   count_words,       commit_words,        add_momentum_range,
    digest_range,      square_sums_range, checksum_bytes,      stream_encode_words,
    stream_commit_words,
};

}  // namespace distlion
