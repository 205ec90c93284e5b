// How rows of bytes of Python are read: frames, and what goes into them.

#pragma once

#include <cstdint>
#include <string>

#include "core.hpp"
#include "python_tensors.hpp"

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

}  // namespace distlion
