// How rows of bytes of Python are read: frames, and what goes into them.

#pragma once

#include <cstdint>
#include <string>

#include "core.hpp"
#include "python_votes.hpp"

namespace distlion {

inline MutableByteRows read_byte_rows(const TensorReader& tensors, nb::handle rows, const char* what) {
    const TensorView view = tensors.read(rows, what, {}, Wants::rows);
    if (!is_type(view.dtype, kUInt, 8)) {
        refuse(std::string(what) + ": expected uint8");
    }
    return {static_cast<std::uint8_t*>(view.data), static_cast<std::size_t>(view.shape[0]),
            static_cast<std::size_t>(view.shape[1]), view.row_stride};
}

inline std::string describe_rows(const MutableByteRows& rows) {
    return std::to_string(rows.n_rows) + " rows of " + std::to_string(rows.n_bytes) + " bytes";
}

inline void check_front(std::size_t n_bytes, std::size_t checksum_at) {
    if (n_bytes < checksum_at + kChecksumBytes) {
        refuse("checksum_at: given " + std::to_string(checksum_at) + ", expected 4 bytes within the " +
               std::to_string(n_bytes) + " of the front");
    }
}

// Numbers of votes: 16 bits each, or one; little-endian.
inline void read_presence(const std::uint8_t* from, std::size_t n_params, bool has_counts, std::int64_t* out) {
    for (std::size_t param = 0; param < n_params; ++param) {
        out[param] = has_counts ? from[2 * param] | from[2 * param + 1] << 8 : from[param / 8] >> (param % 8) & 1;
    }
}

struct FramePlaces {
    std::size_t checksum_at, presence_at;
    bool has_counts;  // or a bit for each parameter
};

inline void write_rows(const TensorReader& tensors, const Loops& loops, nb::handle out, nb::bytes front,
                       nb::handle payloads, std::size_t checksum_at, int threads) {
    const MutableByteRows rows = read_byte_rows(tensors, out, "out");
    const MutableByteRows read = read_byte_rows(tensors, payloads, "payloads");
    check_front(front.size(), checksum_at);
    if (rows.n_rows != read.n_rows || rows.n_bytes != front.size() + read.n_bytes) {
        refuse("out: given " + describe_rows(rows) + ", expected the front's " +
               std::to_string(front.size()) + " bytes and payloads: " + describe_rows(read));
    }
    const auto* const begin = static_cast<const std::uint8_t*>(front.data());
    const nb::gil_scoped_release released;
    write_frames(loops, rows, begin, front.size(), checksum_at,
                           {read.data, read.n_rows, read.n_bytes, read.stride}, threads);
}

// Returns whether all rows are intact, and their heads equal `heads` in the bits of `mask`.
inline bool read_rows(const TensorReader& tensors, const Loops& loops, nb::handle rows, nb::bytes heads,
                      nb::bytes mask, FramePlaces places, nb::handle intact, nb::handle present,
                      int threads) {
    const MutableByteRows read = read_byte_rows(tensors, rows, "rows");
    bool* const flags = read_flags(tensors, intact, read.n_rows);
    const TensorView numbers = tensors.read(present, "present", {});
    const std::size_t n_params = read.n_rows > 0 ? numbers.n_elements / read.n_rows : 0;
    const std::size_t presence_bytes = places.has_counts ? 2 * n_params : (n_params + 7) / 8;
    check_front(mask.size(), places.checksum_at);
    if (!is_type(numbers.dtype, kInt, 64) || numbers.n_elements != n_params * read.n_rows) {
        refuse("present: expected int64, as many for each row");
    }
    if (heads.size() != read.n_rows * mask.size() || read.n_bytes < mask.size() ||
        read.n_bytes < places.presence_at + presence_bytes) {
        refuse("rows: given " + describe_rows(read) + ", too few for the heads or the presence, or " +
               std::to_string(heads.size()) + " bytes of heads, expected " +
               std::to_string(mask.size()) + " each");
    }
    const auto* const wanted = static_cast<const std::uint8_t*>(heads.data());
    const auto* const bits = static_cast<const std::uint8_t*>(mask.data());
    auto* const out = static_cast<std::int64_t*>(numbers.data);
    const nb::gil_scoped_release released;
    const ByteRows frames{read.data, read.n_rows, read.n_bytes, read.stride};
    check_frames(loops, frames, places.checksum_at, flags, threads);
    bool is_expected = true;
    for (std::size_t row = 0; row < frames.n_rows; ++row) {
        const std::uint8_t* const frame = frames.data + static_cast<std::ptrdiff_t>(row) * frames.stride;
        is_expected &= flags[row];
        for (std::size_t byte = 0; byte < mask.size(); ++byte) {
            is_expected &= ((frame[byte] ^ wanted[row * mask.size() + byte]) & bits[byte]) == 0;
        }
        read_presence(frame + places.presence_at, n_params, places.has_counts, out + row * n_params);
    }
    return is_expected;
}

}  // namespace distlion
