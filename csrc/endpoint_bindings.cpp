// Makes the Python module of endpoint.hpp. Memory is given by its address: src/distlion/wire/sockets.py
// checks and keeps it.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "endpoint.hpp"

namespace nb = nanobind;

namespace {

using namespace distlion;

using Pieces = std::vector<std::tuple<std::size_t, std::uintptr_t, std::size_t>>;

std::vector<Chunk> read_chunks(const Pieces& pieces) {
    std::vector<Chunk> chunks;
    chunks.reserve(pieces.size());
    for (const auto& [peer, address, n_bytes] : pieces) {
        chunks.push_back({peer, reinterpret_cast<std::uint8_t*>(address), n_bytes});
    }
    return chunks;
}

std::uint64_t begin(Endpoint& endpoint, std::size_t stream, const Pieces& sends, const Pieces& receives) {
    const std::vector<Chunk> out = read_chunks(sends), in = read_chunks(receives);
    const nb::gil_scoped_release released;
    return endpoint.begin(stream, out, in);
}

// Returns whether it has ended.
bool wait(Endpoint& endpoint, std::uint64_t transfer, double limit_s) {
    std::string failure;
    Outcome outcome;
    {
        const nb::gil_scoped_release released;
        outcome = endpoint.wait(transfer, std::chrono::nanoseconds(static_cast<std::int64_t>(limit_s * 1e9)), failure);
    }
    if (outcome == Outcome::failed) {
        throw std::runtime_error(failure);
    }
    return outcome == Outcome::done;
}

bool is_under_way(Endpoint& endpoint, std::uint64_t transfer) {
    return endpoint.look(transfer) == Outcome::under_way;
}

}  // namespace

NB_MODULE(_endpoint, m) {
    using namespace nb::literals;
    // Endpoints may live as long as the process.
    nb::set_leak_warnings(false);
    m.doc() = "One worker's end of TCP connections. Use distlion.wire.sockets.";
    nb::class_<Endpoint>(m, "Endpoint", "Connections to all other workers, and transfers over them.")
        .def(nb::init<std::size_t, const std::vector<int>&, std::size_t>(), "rank"_a, "sockets"_a,
             "most_early_bytes"_a)
        .def("begin", &begin, "stream"_a, "sends"_a, "receives"_a,
             "Begin to send and receive (peer, address, bytes); return the transfer's number.")
        .def("wait", &wait, "transfer"_a, "limit_s"_a, "Wait; return whether the transfer has ended.")
        .def("is_under_way", &is_under_way, "transfer"_a)
        .def("count_waiting", &Endpoint::count_waiting, "Threads that wait now.")
        .def("cancel", &Endpoint::cancel, nb::call_guard<nb::gil_scoped_release>(),
             "Close all connections; what is under way fails.")
        .def("abandon", &Endpoint::abandon, "Close a fork's copies of the connections.");
}
