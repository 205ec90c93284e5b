// Prints a line for every op and case: what went in is drawn from a coin, what comes out is hashed.
// Two builds whose lines are equal compute the same bits.

#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "core.hpp"
#include "coin.hpp"

using namespace distlion;

namespace {

using Bytes = std::vector<std::uint8_t>;
using Words = std::vector<std::uint64_t>;

constexpr std::size_t kElements = 9001;  // three scale blocks, the last word in part
constexpr std::size_t kWords = (kElements + kWordElements - 1) / kWordElements;
constexpr std::size_t kFirstWord = 3;
constexpr std::size_t kBlocks = (kFirstWord + kWords + kBlockWords - 1) / kBlockWords + 1;

class Draws {
public:
    explicit Draws(std::uint64_t key) : coin_{key, false} {}

    std::uint64_t word() { return draw(coin_, next_++); }

    // Within (-1, 1), now and then 0, -0, denormal or large.
    float number() {
        const std::uint64_t kind = word();
        const double uniform = static_cast<double>(word() >> 11) * 0x1p-52 - 1.0;
        switch (kind % 37) {
            case 0: return 0.0f;
            case 1: return -0.0f;
            case 2: return 1e-41f;
            case 3: return 6e4f;
            default: return static_cast<float>(kind % 3 == 0 ? uniform * 1e-6 : uniform);
        }
    }

    Bytes numbers(DType type) {
        Bytes bytes;
        for (std::size_t k = 0; k < kElements; ++k) {
            std::uint32_t bits;
            const float x = number();
            std::memcpy(&bits, &x, 4);
            if (type == DType::bfloat16) {
                bits >>= 16;
            } else if (type == DType::float16) {  // any finite half
                bits = ((bits >> 16) & 0x8000) | static_cast<std::uint32_t>(word() % 0x7C00);
            }
            const std::size_t size = type == DType::float32 ? 4 : 2;
            const auto* begin = reinterpret_cast<const std::uint8_t*>(&bits);
            bytes.insert(bytes.end(), begin, begin + size);
        }
        return bytes;
    }

    Words words(std::size_t n) {
        Words drawn(n);
        for (auto& each : drawn) {
            each = word();
        }
        return drawn;
    }

private:
    Coin coin_;
    std::uint64_t next_ = 0;
};

template <class Row>
unsigned long long hash(const Row& row) {
    std::uint64_t state = row.size();
    for (const auto each : row) {
        state = mix(state ^ each);
    }
    return state;
}

void print_encodings(const Loops& loops, const Segment& segment, int number) {
    std::vector<Encoding> encodings = {
        {.vote = Vote::signs, .n_planes = 1, .zero = {5, true}},
        {.vote = Vote::ternary, .n_planes = 2},
        {.vote = Vote::pairs, .n_planes = 2, .zero = {5, true}},
        {.vote = Vote::directions, .n_planes = 32, .direction_type = DType::float32},
        {.vote = Vote::directions, .n_planes = 16, .direction_type = DType::bfloat16},
    };
    for (std::size_t planes = 1; planes <= 8; ++planes) {
        for (const bool is_l1 : {false, true}) {
            encodings.push_back({.vote = Vote::levels, .n_planes = planes, .zero = {5, false},
                                 .is_l1 = is_l1, .step = 0.3});
        }
    }
    for (Encoding& encoding : encodings) {
        Words out(kBlocks * kBlockWords * encoding.n_planes);
        encoding.out = out.data();
        bool is_finite;
        encode(loops, &segment, 1, encoding, kBlocks, 1, &is_finite);
        std::printf("encode %d %d %zu: %d %016llx\n", number, static_cast<int>(encoding.vote),
                    encoding.n_planes, is_finite, hash(out));
    }
}

void print_sum(const Loops& loops, const ScaledBits& said, const float* estimates, int number) {
    const Summand summands[] = {{estimates, said, 1.0f}, {nullptr, said, 3.0f}};
    double total = 0;
    const Sum sum{summands, 2, kElements, kFirstWord, 77, 5, true, &total};
    Words out(kBlocks * kBlockWords);
    count_sums(loops, &sum, 1, {9, true}, out.data(), kBlocks, 1);
    std::uint64_t bits;
    std::memcpy(&bits, &total, sizeof bits);
    std::printf("sum %d %zu: %016llx %016llx\n", number, said.n_planes, hash(out),
                static_cast<unsigned long long>(bits));
}

void print_feedback(const Loops& loops, Segment segment, Draws& draws, int number) {
    const Bytes estimates = draws.numbers(DType::float32);
    for (const std::size_t planes : {1, 2}) {
        for (const bool are_residuals : {false, true}) {
            Bytes after = estimates;
            segment.estimate = reinterpret_cast<float*>(after.data());
            Words out(kBlocks * kBlockWords * planes);
            const Encoding encoding{.vote = Vote::rests, .out = out.data(), .n_planes = planes,
                                    .zero = {5, false}, .are_residuals = are_residuals};
            bool is_finite;
            float scales[2] = {0, 0};
            encode_rests(loops, &segment, 1, encoding, kBlocks, 1, &is_finite, scales);
            const ScaledBits said{out.data(), planes, {scales[0], scales[planes - 1]}};
            Bytes padded = after;
            padded.resize(sizeof(float) * kWordElements * segment.n_words());
            print_sum(loops, said, reinterpret_cast<const float*>(padded.data()), number);
            if (are_residuals) {
                move_residuals(loops, &segment, 1, &said, &is_finite, 1);
            } else {
                const Step step{segment.estimate, kElements, said, kFirstWord};
                add_steps(loops, &step, 1, 1);
            }
            std::uint32_t bits[2];
            std::memcpy(bits, scales, sizeof bits);
            std::printf("rests %d %zu %d: %d %016llx %08x %08x %016llx\n", number, planes, are_residuals,
                        is_finite, hash(out), bits[0], bits[1], hash(after));
        }
    }
    Words out(kBlocks * kBlockWords);
    const Encoding encoding{.vote = Vote::lots, .out = out.data(), .n_planes = 1, .zero = {5, false}};
    bool is_finite;
    float scale = 0;
    encode_lots(loops, &segment, 1, encoding, kBlocks, nullptr, -1.0f, 1, &is_finite, &scale);
    std::uint32_t bits;
    std::memcpy(&bits, &scale, sizeof bits);
    std::printf("lots %d: %d %016llx %08x\n", number, is_finite, hash(out), bits);
}

void print_commits(const Loops& loops, Segment segment, const Bytes& param, const Bytes& exp_avg,
                   Draws& draws, int number) {
    const std::pair<ReplyFormat, std::size_t> formats[] = {
        {ReplyFormat::sign, 1}, {ReplyFormat::ternary, 2}, {ReplyFormat::count, 3}, {ReplyFormat::own, 1}};
    for (const auto& [format, n_planes] : formats) {
        for (const bool rounds : {false, true}) {
            const Words reply = draws.words(kBlocks * kBlockWords * n_planes);
            Bytes x = param;
            Bytes m = exp_avg;
            segment.param = x.data();
            segment.exp_avg = m.data();
            commit(loops, &segment, 1, {true, format, reply.data(), n_planes, rounds, {9, false}}, 1);
            std::printf("commit %d %d %d: %016llx %016llx\n", number, static_cast<int>(format), rounds,
                        hash(x), hash(m));
        }
    }
}

void print_segments(const Loops& loops) {
    int number = 0;
    for (const DType param_type : {DType::float32, DType::bfloat16, DType::float16}) {
        for (const DType exp_avg_type : {DType::float32, DType::bfloat16}) {
            Draws draws(++number);
            const Bytes grad = draws.numbers(param_type);
            Bytes param = draws.numbers(param_type);
            Bytes exp_avg = draws.numbers(exp_avg_type);
            const Segment segment{
                .grad = grad.data(), .exp_avg = exp_avg.data(), .param = param.data(),
                .n_elements = kElements, .first_word = 77, .bucket_word = kFirstWord,
                .param_type = param_type, .exp_avg_type = exp_avg_type,
                .beta1 = 0.9f, .one_minus_beta1 = 0.1f, .beta2 = 0.99f, .one_minus_beta2 = 0.01f,
                .decay = 0.999f, .step_width = 0.01f, .grad_scale = 0.3f,
                .is_cautious = number % 2 == 0, .n_present = 5,
                .first_bit = number % 2 ? 0u : 43u};
            print_encodings(loops, segment, number);
            print_feedback(loops, segment, draws, number);
            print_commits(loops, segment, param, exp_avg, draws, number);
        }
    }
}

void print_counts(const Loops& loops) {
    struct Case {
        Tally tally;
        std::size_t planes, out_planes;
    };
    const Case cases[] = {{Tally::signs, 1, 1}, {Tally::signs_or_zero, 1, 2}, {Tally::ternary, 2, 2},
                          {Tally::pairs, 2, 1}, {Tally::pairs_or_zero, 2, 2}, {Tally::ones, 1, 7},
                          {Tally::levels, 4, 1}, {Tally::levels, 8, 1}};
    for (const auto& [tally, planes, out_planes] : cases) {
        for (const std::uint32_t n_workers : {1, 2, 3, 5, 16, 33, 100}) {
            Draws draws(n_workers);
            const Words votes = draws.words(n_workers * kBlocks * planes * kBlockWords);
            std::vector<std::uint32_t> voters;
            for (std::uint32_t worker = 0; worker < n_workers; ++worker) {
                if (worker % 5 != 3) {
                    voters.push_back(worker);
                }
            }
            Words out(kBlocks * kBlockWords * out_planes);
            const Run run{voters.data(), voters.size(), kFirstWord, kFirstWord + kWords, kElements, 77,
                          n_workers % 2 ? 0u : 43u, 0};
            count(loops, &run, 1,
                  {tally, votes.data(), kBlocks * planes * kBlockWords, planes, out.data(), out_planes,
                   {3, true}, DType::float32},
                  kBlocks, 1);
            std::printf("count %d %zu %u: %016llx\n", static_cast<int>(tally), planes, n_workers, hash(out));
        }
    }
    Draws draws(1);
    std::vector<float> directions(3 * kBlocks * kBlockWords * kWordElements);
    for (float& direction : directions) {
        direction = draws.number();
    }
    const std::uint32_t voters[] = {0, 2};
    const Run run{voters, 2, kFirstWord, kFirstWord + kWords, kElements, 77, 0, 0};
    for (const DType type : {DType::float32, DType::bfloat16}) {
        const std::size_t planes = type == DType::float32 ? 32 : 16;
        Words out(kBlocks * kBlockWords * 2);
        const auto* votes = reinterpret_cast<const std::uint64_t*>(directions.data());
        count(loops, &run, 1,
              {Tally::directions, votes, kBlocks * planes * kBlockWords, planes, out.data(), 2, {}, type},
              kBlocks, 1);
        std::printf("sum %zu: %016llx\n", planes, hash(out));
    }
}

void print_square_sums(const Loops& loops) {
    for (const DType type : {DType::float32, DType::bfloat16, DType::float16}) {
        const Bytes numbers = Draws(static_cast<std::uint64_t>(type)).numbers(type);
        for (const std::size_t n_elements : {std::size_t{1}, kScaleBlockElements, kElements}) {
            std::vector<double> sums((n_elements + kScaleBlockElements - 1) / kScaleBlockElements);
            square_sums(loops, numbers.data(), type, n_elements, sums.data(), 1);
            Words bits(sums.size());
            std::memcpy(bits.data(), sums.data(), sums.size() * sizeof(double));
            std::printf("square sums %d %zu: %016llx\n", static_cast<int>(type), n_elements, hash(bits));
        }
    }
}

void print_checks(const Loops& loops) {
    const Words words = Draws(1).words(1251);
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(words.data());
    for (const std::size_t n_bytes : {0, 1, 63, 127, 128, 129, 1000, 10007}) {
        std::printf("checksum %zu: %08x\n", n_bytes, loops.checksum(bytes, n_bytes, 17));
    }
    for (const std::size_t element_bytes : {1, 2, 4}) {
        std::printf("digest %zu: %016llx\n", element_bytes,
                    static_cast<unsigned long long>(loops.digest(bytes, element_bytes, 3, 2001)));
    }
}

}  // namespace

int main() {
    InstructionSet found[kMaxInstructionSets];
    list_instruction_sets(found);
    print_segments(*found[0].loops);
    print_counts(*found[0].loops);
    print_square_sums(*found[0].loops);
    print_checks(*found[0].loops);
}
