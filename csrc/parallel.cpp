// Whole buckets, cut into parts of equal length for the threads.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "core.hpp"
#include "parts.hpp"

namespace distlion {
namespace {

// 256 Ki elements, 100 microseconds of work or more.
constexpr std::size_t kLeastWords = 4096;
std::size_t element_bytes(DType type) { return type == DType::float32 ? 4 : 2; }

// Ask for the first 4 KiB of each tensor of a segment: between small tensors, which lie anywhere, the
// hardware's prefetcher has nothing to go by.
void prefetch_start(const void* tensor, std::size_t n_elements, DType type) {
    const std::size_t n_bytes = n_elements * element_bytes(type);
    for (std::size_t byte = 0; tensor && byte < n_bytes && byte < 4096; byte += 64) {
        __builtin_prefetch(static_cast<const char*>(tensor) + byte, 0, 2);
    }
}

void prefetch_start(const Segment& segment) {
    prefetch_start(segment.grad, segment.n_elements, segment.param_type);
    prefetch_start(segment.exp_avg, segment.n_elements, segment.exp_avg_type);
    prefetch_start(segment.estimate, segment.n_elements, DType::float32);
}

void prefetch_start(const Step& step) { prefetch_start(step.estimates, step.n_elements, DType::float32); }
void prefetch_start(const Sum&) {}

// Call `work(k, begin, end)` for every part of the words of all segments, or steps, one after the
// other, cut at multiples of kScaleBlockWords of a segment.
template <class Segment, class Work>
void over_segments(const Segment* segments, std::size_t n_segments, int threads, Work work) {
    std::size_t n_words = 0;
    for (std::size_t k = 0; k < n_segments; ++k) {
        n_words += segments[k].n_words();
    }
    in_parts(n_words, kScaleBlockWords, kLeastWords, threads, [=](std::size_t begin, std::size_t end) {
        std::size_t start = 0;
        for (std::size_t k = 0; k < n_segments && start < end; start += segments[k++].n_words()) {
            const std::size_t n_here = segments[k].n_words();
            // Rounding up both ends leaves neither gap nor overlap between parts.
            const auto within = [&](std::size_t at) {
                const std::size_t offset = at < start ? 0 : at - start;
                const std::size_t rounded =
                    (offset + kScaleBlockWords - 1) / kScaleBlockWords * kScaleBlockWords;
                return rounded < n_here ? rounded : n_here;
            };
            if (k + 1 < n_segments) {
                prefetch_start(segments[k + 1]);
            }
            if (within(begin) < within(end)) {
                work(k, within(begin), within(end));
            }
        }
    });
}

// Clear words [begin, end) of an encoded bucket.
void clear_words(const Encoding& encoding, std::size_t begin, std::size_t end) {
    const std::size_t n_planes = encoding.n_planes;
    if (begin == end) {
        return;
    }
    if (encoding.vote == Vote::directions) {  // which are not cut into planes
        std::memset(encoding.out + begin * n_planes, 0,
                    (end - begin) * n_planes * sizeof(std::uint64_t));
        return;
    }
    for (std::size_t word = begin; word < end; ++word) {
        std::uint64_t* at =
            encoding.out + word / kBlockWords * kBlockWords * n_planes + word % kBlockWords;
        for (std::size_t plane = 0; plane < n_planes; ++plane) {
            at[plane * kBlockWords] = 0;
        }
    }
}

// Encode what has a gradient by `work(k, begin, end)`, which returns whether all is finite. All else in
// the bucket is cleared.
template <class Work>
void encode_by(const Segment* segments, std::size_t n_segments, const Encoding& encoding,
               std::size_t n_blocks, int threads, bool* finite, Work work) {
    std::vector<std::atomic<bool>> is_finite(n_segments);
    for (auto& flag : is_finite) {
        flag.store(true, std::memory_order_relaxed);
    }
    over_segments(segments, n_segments, threads, [&](std::size_t k, std::size_t begin, std::size_t end) {
        if (segments[k].grad && !work(k, begin, end)) {
            is_finite[k].store(false, std::memory_order_relaxed);
        }
    });
    std::size_t written_end = 0;
    for (std::size_t k = 0; k < n_segments; ++k) {
        finite[k] = is_finite[k].load(std::memory_order_relaxed);
        if (segments[k].grad && finite[k] && encoding.vote != Vote::none) {
            clear_words(encoding, written_end, segments[k].bucket_word);
            written_end = segments[k].bucket_word + segments[k].n_words();
        }
    }
    clear_words(encoding, written_end, n_blocks * kBlockWords);
}

// Where the sums of each segment's scale blocks begin, and behind them the number of all.
template <class Segment>
std::vector<std::size_t> find_starts(const Segment* segments, std::size_t n_segments) {
    std::vector<std::size_t> starts(n_segments + 1);
    for (std::size_t k = 0; k < n_segments; ++k) {
        starts[k + 1] = starts[k] + segments[k].n_scale_blocks();
    }
    return starts;
}

float mean_of(double sum, std::size_t count) {
    return static_cast<float>(sum / static_cast<double>(count > 0 ? count : 1));
}

}  // namespace

void encode(const Loops& loops, const Segment* segments, std::size_t n_segments,
            const Encoding& encoding, std::size_t n_blocks, int threads, bool* finite) {
    encode_by(segments, n_segments, encoding, n_blocks, threads, finite,
              [&](std::size_t k, std::size_t begin, std::size_t end) {
                  return loops.encode(segments[k], begin, end, encoding);
              });
}

void encode_rests(const Loops& loops, const Segment* segments, std::size_t n_segments,
                  const Encoding& encoding, std::size_t n_blocks, int threads, bool* finite,
                  float* scales) {
    const std::vector<std::size_t> starts = find_starts(segments, n_segments);
    const std::size_t n_scales = encoding.n_planes;
    std::vector<double> sums(starts[n_segments]);
    const auto sum_up = [&](std::vector<double>& each, std::size_t k) {
        return loops.add_sums(each.data() + starts[k], segments[k].n_scale_blocks());
    };
    encode_by(segments, n_segments, encoding, n_blocks, threads, finite,
              [&](std::size_t k, std::size_t begin, std::size_t end) {
                  return loops.encode_rests(segments[k], begin, end, encoding, sums.data() + starts[k]);
              });
    const auto votes = [&](std::size_t k) { return segments[k].grad && finite[k]; };
    for (std::size_t k = 0; k < n_segments; ++k) {
        for (std::size_t plane = 0; plane < n_scales; ++plane) {
            scales[k * n_scales + plane] = 0;
        }
        if (!votes(k)) {
            continue;
        }
        const float mean = mean_of(sum_up(sums, k), segments[k].n_elements);
        if (std::isfinite(mean)) {
            scales[k * n_scales] = mean;
        } else {  // c - h is beyond the range of a float, though c is not
            finite[k] = false;
            clear_words(encoding, segments[k].bucket_word, segments[k].bucket_word + segments[k].n_words());
        }
    }
    if (n_scales == 1) {
        return;
    }
    std::vector<double> large_sums(starts[n_segments]);
    std::vector<std::atomic<std::size_t>> n_large(n_segments);
    over_segments(segments, n_segments, threads, [&](std::size_t k, std::size_t begin, std::size_t end) {
        if (votes(k)) {
            n_large[k].fetch_add(loops.encode_sizes(segments[k], begin, end, encoding,
                                                    scales[k * n_scales], sums.data() + starts[k],
                                                    large_sums.data() + starts[k]));
        }
    });
    for (std::size_t k = 0; k < n_segments; ++k) {
        if (votes(k)) {
            const std::size_t count = n_large[k].load();
            scales[k * n_scales] = mean_of(sum_up(sums, k), segments[k].n_elements - count);
            scales[k * n_scales + 1] = mean_of(sum_up(large_sums, k), count);
        }
    }
}

void encode_lots(const Loops& loops, const Segment* segments, std::size_t n_segments,
                 const Encoding& encoding, std::size_t n_blocks, const float* reach, float spread, int threads,
                 bool* finite, float* scales) {
    const std::vector<std::size_t> starts = find_starts(segments, n_segments);
    std::vector<double> sums(starts[n_segments]);
    std::vector<float> largest(starts[n_segments]);
    encode_by(segments, n_segments, encoding, n_blocks, threads, finite,
              [&](std::size_t k, std::size_t begin, std::size_t end) {
                  return loops.measure(segments[k], begin, end, sums.data() + starts[k],
                                       largest.data() + starts[k]);
              });
    std::vector<float> ratios(n_segments);
    for (std::size_t k = 0; k < n_segments; ++k) {
        scales[k] = 0;
        if (!segments[k].grad || !finite[k] || segments[k].n_elements == 0) {
            continue;
        }
        const float most = *std::max_element(largest.begin() + starts[k], largest.begin() + starts[k + 1]);
        scales[k] = mean_of(loops.add_sums(sums.data() + starts[k], segments[k].n_scale_blocks()),
                            segments[k].n_elements);
        const float bound = reach ? reach[k] : spread >= 0 ? scales[k] * spread : most;
        const double ratio = 32768.0 / static_cast<double>(bound);
        ratios[k] = bound == 0 ? 0.0f : static_cast<float>(ratio < 0x1.fffffep127 ? ratio : 0x1.fffffep127);
    }
    over_segments(segments, n_segments, threads, [&](std::size_t k, std::size_t begin, std::size_t end) {
        if (segments[k].grad && finite[k]) {
            loops.encode_lots(segments[k], begin, end, encoding, ratios[k]);
        }
    });
}

void move_residuals(const Loops& loops, const Segment* segments, std::size_t n_segments,
                    const ScaledBits* said, const bool* finite, int threads) {
    over_segments(segments, n_segments, threads, [&](std::size_t k, std::size_t begin, std::size_t end) {
        if (segments[k].grad && finite[k]) {
            loops.move_residual(segments[k], begin, end, said[k]);
        }
    });
}

void count_sums(const Loops& loops, const Sum* sums, std::size_t n_sums, Coin tie, std::uint64_t* out,
                std::size_t n_blocks, int threads) {
    std::fill_n(out, n_blocks * kBlockWords, std::uint64_t{0});
    const std::vector<std::size_t> starts = find_starts(sums, n_sums);
    std::vector<double> each(starts[n_sums]);
    over_segments(sums, n_sums, threads, [&](std::size_t k, std::size_t begin, std::size_t end) {
        loops.count_sum(sums[k], begin, end, tie, out, each.data() + starts[k]);
    });
    for (std::size_t k = 0; k < n_sums; ++k) {
        *sums[k].total = loops.add_sums(each.data() + starts[k], sums[k].n_scale_blocks());
    }
}

void add_steps(const Loops& loops, const Step* steps, std::size_t n_steps, int threads) {
    over_segments(steps, n_steps, threads, [&](std::size_t k, std::size_t begin, std::size_t end) {
        loops.add_step(steps[k], begin, end);
    });
}

void count(const Loops& loops, const Run* runs, std::size_t n_runs, const Counting& counting,
           std::size_t n_blocks, int threads) {
    const std::size_t n_words = n_blocks * kBlockWords;
    if (n_words == 0) {
        return;
    }
    std::size_t n_voters = 1;
    for (std::size_t k = 0; k < n_runs; ++k) {
        n_voters = runs[k].n_voters > n_voters ? runs[k].n_voters : n_voters;
    }
    // A vote is 32 times less to read than a gradient, and there are many.
    const std::size_t least = kLeastWords * 32 / (n_voters * counting.n_planes) + kBlockWords;
    in_parts(n_words, kBlockWords, least, threads, [&](std::size_t begin, std::size_t end) {
        std::memset(counting.out + begin * counting.out_planes, 0,
                    (end - begin) * counting.out_planes * sizeof(std::uint64_t));
        for (std::size_t k = 0; k < n_runs; ++k) {
            if (runs[k].begin < end && runs[k].end > begin) {
                loops.count(runs[k], begin, end, counting);
            }
        }
    });
}

void commit(const Loops& loops, const Segment* segments, std::size_t n_segments,
            const Commitment& commitment, int threads) {
    over_segments(segments, n_segments, threads, [&](std::size_t k, std::size_t begin, std::size_t end) {
        if (segments[k].n_present > 0) {
            loops.commit(segments[k], begin, end, commitment);
        }
    });
}

void add_momentum(const Loops& loops, const OuterMove& move, int threads) {
    in_parts(move.n_elements, kWordElements, kLeastWords * kWordElements, threads,
             [=, &loops](std::size_t begin, std::size_t end) { loops.add_momentum(move, begin, end); });
}

std::uint64_t digest(const Loops& loops, const void* data, std::size_t element_bytes,
                     std::size_t n_elements, int threads) {
    std::atomic<std::uint64_t> total{0};
    in_parts(n_elements, kWordElements, kLeastWords * kWordElements, threads,
             [&](std::size_t begin, std::size_t end) {
                 total.fetch_add(loops.digest(data, element_bytes, begin, end));
             });
    return total.load();
}

void square_sums(const Loops& loops, const void* data, DType type, std::size_t n_elements, double* out,
                 int threads) {
    in_parts(n_elements, kScaleBlockElements, kLeastWords * kWordElements, threads,
             [=, &loops](std::size_t begin, std::size_t end) {
                 loops.square_sums(data, type, begin, end, out);
             });
}

void stream_encode(const Loops& loops, const float* grad, const float* exp_avg, std::size_t n_words,
                   std::uint64_t* out, int threads) {
    in_parts(n_words, kScaleBlockWords, kLeastWords, threads, [=, &loops](std::size_t begin, std::size_t end) {
        loops.stream_encode(grad + begin * kWordElements, exp_avg + begin * kWordElements,
                            end - begin, out + begin);
    });
}

void stream_commit(const Loops& loops, const float* grad, float* exp_avg, float* param,
                   std::size_t n_words, const std::uint64_t* reply, int threads) {
    in_parts(n_words, kScaleBlockWords, kLeastWords, threads, [=, &loops](std::size_t begin, std::size_t end) {
        loops.stream_commit(grad + begin * kWordElements, exp_avg + begin * kWordElements,
                            param + begin * kWordElements, end - begin,
                            reply ? reply + begin : nullptr);
    });
}

}  // namespace distlion
