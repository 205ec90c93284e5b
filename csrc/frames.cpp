// Frames on the wire: written with their checksums, and checked.

#include <algorithm>
#include <cstring>

#include "core.hpp"
#include "parts.hpp"

namespace distlion {
namespace {

// Checksums go through up to 10 bytes a nanosecond: 400 microseconds of work or more, since they wait
// for memory rather than compute, so that a second thread brings less.
constexpr std::size_t kLeastBytes = std::size_t{4} << 20;

// Bytes that are copied and then read again out of the cache.
constexpr std::size_t kCachedBytes = std::size_t{64} << 10;

// Rows of so many bytes that a thread is worth starting for.
std::size_t worthy_rows(std::size_t n_bytes) { return (kLeastBytes + n_bytes - 1) / n_bytes; }

// Little-endian.
void store_checksum(std::uint8_t* out, std::uint32_t sum) {
    for (std::size_t byte = 0; byte < kChecksumBytes; ++byte) {
        out[byte] = static_cast<std::uint8_t>(sum >> (8 * byte));
    }
}

}  // namespace

void write_frames(const Loops& loops, const MutableByteRows& out, const std::uint8_t* front,
                  std::size_t front_bytes, std::size_t checksum_at, const ByteRows& payloads, int threads) {
    const std::size_t rest = checksum_at + kChecksumBytes;
    const std::uint32_t start =
        loops.checksum(front + rest, front_bytes - rest, loops.checksum(front, checksum_at, 0));
    in_parts(out.n_rows, 1, worthy_rows(out.n_bytes), threads, [=, &loops](std::size_t begin, std::size_t end) {
        for (std::size_t row = begin; row < end; ++row) {
            std::uint8_t* const frame = out.data + static_cast<std::ptrdiff_t>(row) * out.stride;
            std::memcpy(frame, front, front_bytes);
            std::uint32_t sum = start;
            for (std::size_t at = 0; at < payloads.n_bytes; at += kCachedBytes) {
                const std::size_t n = std::min(kCachedBytes, payloads.n_bytes - at);
                std::uint8_t* const copy = frame + front_bytes + at;
                std::memcpy(copy, payloads.data + static_cast<std::ptrdiff_t>(row) * payloads.stride + at, n);
                sum = loops.checksum(copy, n, sum);
            }
            store_checksum(frame + checksum_at, sum);
        }
    });
}

void check_frames(const Loops& loops, const ByteRows& rows, std::size_t checksum_at, bool* intact,
                  int threads) {
    const std::size_t rest = checksum_at + kChecksumBytes;
    in_parts(rows.n_rows, 1, worthy_rows(rows.n_bytes), threads, [=, &loops](std::size_t begin, std::size_t end) {
        for (std::size_t row = begin; row < end; ++row) {
            const std::uint8_t* const frame = rows.data + static_cast<std::ptrdiff_t>(row) * rows.stride;
            const std::uint32_t sum =
                loops.checksum(frame + rest, rows.n_bytes - rest, loops.checksum(frame, checksum_at, 0));
            std::uint8_t expected[kChecksumBytes];
            store_checksum(expected, sum);
            intact[row] = std::memcmp(frame + checksum_at, expected, kChecksumBytes) == 0;
        }
    });
}

}  // namespace distlion
