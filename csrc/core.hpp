// What the core computes on, free of Python: plain structs over raw spans, and the table of loops that
// every instruction set fills. The arithmetic is that of src/distlion/kernels/reference.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace distlion {

constexpr std::size_t kWordElements = 64;
constexpr std::size_t kBlockWords = 8;
constexpr std::size_t kScaleBlockElements = 4096;
constexpr std::size_t kScaleBlockWords = kScaleBlockElements / kWordElements;
// A sum of 4,096 votes of 8 bits fills 20 planes.
constexpr std::size_t kMaxWorkers = 4096;
constexpr std::size_t kMaxPlanes = 20;

enum class DType : std::uint8_t { float32, bfloat16, float16 };

// A row of random words: src/distlion/kernels/coin.py.
struct Coin {
    std::uint64_t key;
    bool inverted;
};

// One parameter. `grad` is null where this worker abstains.
struct Segment {
    const void* grad;
    void* exp_avg;
    void* param;
    std::size_t n_elements;
    std::uint64_t first_word;  // element 0 has bit `first_bit` of this word of a coin
    std::size_t bucket_word;
    DType param_type;
    DType exp_avg_type;
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
    float decay;       // d = 1 - lr * weight_decay
    float step_width;  // a = lr / n
    float grad_scale;
    bool is_cautious;  // c is 0 where its sign is not that of g
    std::int64_t n_present;
    unsigned first_bit;
    float* estimate = nullptr;  // h, where a vote is on rests; or e

    std::size_t n_words() const { return (n_elements + kWordElements - 1) / kWordElements; }
    std::size_t n_scale_blocks() const { return (n_elements + kScaleBlockElements - 1) / kScaleBlockElements; }
};

enum class Vote : std::uint8_t { none, signs, ternary, pairs, levels, directions, rests, lots };

struct Encoding {
    Vote vote = Vote::none;
    std::uint64_t* out = nullptr;
    std::size_t n_planes = 0;
    Coin zero{};                              // signs, pairs, levels, rests; of lots the only one
    bool are_residuals = false;               // rests: estimates add to directions
    bool is_l1 = true;                        // levels: mean |c|, else max |c|
    double step = 1.0;                        // levels
    DType direction_type = DType::float32;    // directions
};

enum class Tally : std::uint8_t { signs, signs_or_zero, ternary, pairs, pairs_or_zero, ones, levels, directions };

// The part of one parameter that lies in the shard: words [begin, end) of it, its voters a row of ranks.
struct Run {
    const std::uint32_t* voters;
    std::size_t n_voters;
    std::size_t begin, end;
    std::size_t n_elements;
    std::uint64_t first_word;
    unsigned first_bit;
    std::size_t param;  // its number in the bucket
};

// A vote of +-scales on some elements of one parameter.
struct ScaledBits {
    const std::uint64_t* votes;  // (blocks, planes, 8)
    std::size_t n_planes;        // 1 or 2
    float scales[2];             // where the second plane's bit is 0, and where it is 1
};

// What a vote on rests adds to some estimates of one parameter.
struct Step {
    float* estimates;
    std::size_t n_elements;
    ScaledBits said;
    std::size_t first_word;  // of the votes: that of elements 0 to 63

    std::size_t n_words() const { return (n_elements + kWordElements - 1) / kWordElements; }
};

// What the vote of one worker adds to a sum: w * (h + q).
struct Summand {
    const float* estimates;  // h of element 0 and on, up to the end of a word; or null for 0
    ScaledBits said;         // no votes: q is 0
    float weight;
};

// The part of one parameter that lies in a shard, and all workers' votes on it.
struct Sum {
    const Summand* summands;
    std::size_t n_summands;
    std::size_t n_elements;
    std::size_t begin;  // word of the votes and of `out`
    std::uint64_t first_word;
    unsigned first_bit;
    bool has_votes;
    double* total;  // where the sum of absolute values goes

    std::size_t n_words() const { return (n_elements + kWordElements - 1) / kWordElements; }
    std::size_t n_scale_blocks() const { return (n_elements + kScaleBlockElements - 1) / kScaleBlockElements; }
};

struct Counting {
    Tally tally;
    const std::uint64_t* votes;  // (workers, blocks, planes, 8)
    std::size_t worker_words;    // from one worker's votes to the next one's
    std::size_t n_planes;
    std::uint64_t* out;  // (blocks, out_planes, 8); a loop adds to zeros
    std::size_t out_planes;
    Coin tie;
    DType direction_type;
};

enum class ReplyFormat : std::uint8_t { sign, ternary, count, own };

struct Commitment {
    bool moves_param = true;
    ReplyFormat format = ReplyFormat::own;  // own: the sign of the worker's own direction, 0 for 0
    const std::uint64_t* reply = nullptr;
    std::size_t n_planes = 0;
    bool rounds_stochastically = false;
    Coin rounding{};
};

// A parameter after a vote, its values before it, and the momentum of what votes did.
struct OuterMove {
    float* param;
    const float* start;
    float* buffer;
    std::size_t n_elements;
    float momentum, lr;
    bool is_nesterov;
};

// Rows of bytes, each contiguous, that begin `stride` bytes after one another.
struct ByteRows {
    const std::uint8_t* data;
    std::size_t n_rows, n_bytes;
    std::ptrdiff_t stride;
};

struct MutableByteRows {
    std::uint8_t* data;
    std::size_t n_rows, n_bytes;
    std::ptrdiff_t stride;
};

// A checksum, CRC-32 as of zlib, goes over all bytes of a frame but its own.
constexpr std::size_t kChecksumBytes = 4;

// The loops of one instruction set. Words are counted from the start of the segment.
struct Loops {
    // Returns whether all is finite. Cuts must be at multiples of kScaleBlockWords.
    bool (*encode)(const Segment& segment, std::size_t begin, std::size_t end,
                   const Encoding& encoding);
    // Votes on rests d, in two passes with cuts as those of `encode`. The first writes signs and, for
    // each scale block at its place in `sums`, the sum of |d|; it returns what `encode` does.
    bool (*encode_rests)(const Segment& segment, std::size_t begin, std::size_t end,
                         const Encoding& encoding, double* sums);
    // The second writes the second plane, which of |d| are large: at least `mean`; the sums of those
    // that are not and of those that are; and returns how many are.
    std::size_t (*encode_sizes)(const Segment& segment, std::size_t begin, std::size_t end,
                                const Encoding& encoding, float mean, double* sums, double* large_sums);
    // Adds the sums of scale blocks by the same tree, again and again until one is left: in place.
    double (*add_sums)(double* sums, std::size_t n_sums);
    // Stochastic signs, in two passes likewise. The first writes the sums of |c| and the largest ones; the
    // second the bits, by the ratio of a level to a direction.
    bool (*measure)(const Segment& segment, std::size_t begin, std::size_t end, double* sums, float* largest);
    void (*encode_lots)(const Segment& segment, std::size_t begin, std::size_t end,
                        const Encoding& encoding, float ratio);
    // Moves words [begin, end) of a segment's residuals by its vote.
    void (*move_residual)(const Segment& segment, std::size_t begin, std::size_t end, const ScaledBits& said);
    // Moves words [begin, end), counted from the start of the step.
    void (*add_step)(const Step& step, std::size_t begin, std::size_t end);
    // Writes the signs of words [begin, end), counted from the start of the sum, and the sum of |T| of
    // each scale block; cuts as those of `encode`.
    void (*count_sum)(const Sum& sum, std::size_t begin, std::size_t end, Coin tie, std::uint64_t* out,
                      double* sums);
    // Writes the words of `run` that lie in [begin, end); cuts must be at multiples of kBlockWords.
    void (*count)(const Run& run, std::size_t begin, std::size_t end, const Counting& counting);
    void (*commit)(const Segment& segment, std::size_t begin, std::size_t end,
                   const Commitment& commitment);
    // Moves elements [begin, end) from where a vote began.
    void (*add_momentum)(const OuterMove& move, std::size_t begin, std::size_t end);
    // The sum of the mixed elements [begin, end), each of `element_bytes`.
    std::uint64_t (*digest)(const void* data, std::size_t element_bytes, std::size_t begin,
                            std::size_t end);
    // Writes the sums of the blocks of kScaleBlockElements that begin in [begin, end), at their place
    // in `out`; `begin` must be at one, and `end` too or at the tensor's.
    void (*square_sums)(const void* data, DType type, std::size_t begin, std::size_t end, double* out);
    std::uint32_t (*checksum)(const std::uint8_t* data, std::size_t n_bytes, std::uint32_t start);
    // The floors of a benchmark: what encode and commit read and write, and hardly any arithmetic.
    void (*stream_encode)(const float* grad, const float* exp_avg, std::size_t n_words,
                          std::uint64_t* out);
    void (*stream_commit)(const float* grad, float* exp_avg, float* param, std::size_t n_words,
                          const std::uint64_t* reply);
};

// Those that this machine runs, the plainest first.
struct InstructionSet {
    const char* name;
    const Loops* loops;
};
constexpr std::size_t kMaxInstructionSets = 3;
std::size_t list_instruction_sets(InstructionSet (&found)[kMaxInstructionSets]);

// Whole buckets, cut into parts for `threads`.

void encode(const Loops& loops, const Segment* segments, std::size_t n_segments,
            const Encoding& encoding, std::size_t n_blocks, int threads, bool* finite);
// `scales`: as many for each segment as there are planes, 1 or 2.
void encode_rests(const Loops& loops, const Segment* segments, std::size_t n_segments,
                  const Encoding& encoding, std::size_t n_blocks, int threads, bool* finite,
                  float* scales);
// `reach`: of each segment, or null; then it is `spread` means, or where that is negative the largest |c|.
void encode_lots(const Loops& loops, const Segment* segments, std::size_t n_segments,
                 const Encoding& encoding, std::size_t n_blocks, const float* reach, float spread, int threads,
                 bool* finite, float* scales);
// `said`: of each segment.
void move_residuals(const Loops& loops, const Segment* segments, std::size_t n_segments,
                    const ScaledBits* said, const bool* finite, int threads);
void add_steps(const Loops& loops, const Step* steps, std::size_t n_steps, int threads);
void count_sums(const Loops& loops, const Sum* sums, std::size_t n_sums, Coin tie, std::uint64_t* out,
                std::size_t n_blocks, int threads);
void count(const Loops& loops, const Run* runs, std::size_t n_runs, const Counting& counting,
           std::size_t n_blocks, int threads);
void commit(const Loops& loops, const Segment* segments, std::size_t n_segments,
            const Commitment& commitment, int threads);
void add_momentum(const Loops& loops, const OuterMove& move, int threads);
std::uint64_t digest(const Loops& loops, const void* data, std::size_t element_bytes,
                     std::size_t n_elements, int threads);
void square_sums(const Loops& loops, const void* data, DType type, std::size_t n_elements, double* out,
                 int threads);
// Rows of `front`, with the row's checksum at `checksum_at`, and a payload.
void write_frames(const Loops& loops, const MutableByteRows& out, const std::uint8_t* front,
                  std::size_t front_bytes, std::size_t checksum_at, const ByteRows& payloads, int threads);
// Whether each row has its checksum at `checksum_at`.
void check_frames(const Loops& loops, const ByteRows& rows, std::size_t checksum_at, bool* intact,
                  int threads);
void stream_encode(const Loops& loops, const float* grad, const float* exp_avg, std::size_t n_words,
                   std::uint64_t* out, int threads);
void stream_commit(const Loops& loops, const float* grad, float* exp_avg, float* param,
                   std::size_t n_words, const std::uint64_t* reply, int threads);

}  // namespace distlion
