// One worker's end of TCP connections to all others, free of Python: chunks are sent and received in
// both directions at the same time, and the memory of callers is read and written in place.
//
// Whoever waits for a transfer moves the bytes of all transfers. A thread moves them while nobody waits,
// and only where they are more than the system buffers, so that small messages never wake it.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace distlion {

// A message: marker (2 B), stream (2 B), number in its stream (4 B), bytes of the chunk (8 B), the chunk;
// little-endian.
constexpr std::size_t kHeadBytes = 16;
constexpr std::uint16_t kMarker = 0x6c64;
// Chunks of one stream come in the order in which they were sent; streams share one connection and
// its back-pressure, so all members begin transfers in one order.
constexpr std::size_t kStreams = 2;

// Memory of the caller, for or from one peer. It must stay until the transfer has ended.
struct Chunk {
    std::size_t peer;
    std::uint8_t* data;
    std::size_t n_bytes;
};

enum class Outcome { under_way, done, failed };

struct Transfer {
    std::size_t n_left = 0;  // chunks that are under way
    bool is_large = false;
    std::string failure;
};

class Endpoint {
public:
    // `sockets`: connected ones, by peer; -1 for this worker. They are the endpoint's from here on.
    // `most_early_bytes`: memory for chunks that come before somebody wants them; more of them have to
    // wait at their sender.
    Endpoint(std::size_t rank, const std::vector<int>& sockets, std::size_t most_early_bytes);
    ~Endpoint();
    Endpoint(const Endpoint&) = delete;
    Endpoint& operator=(const Endpoint&) = delete;

    // Begins to send and to receive; returns the transfer's number. A chunk for this worker itself is
    // copied. Chunks of no bytes do not travel.
    std::uint64_t begin(std::size_t stream, const std::vector<Chunk>& sends,
                        const std::vector<Chunk>& receives);
    // Waits for the end, but returns early after `limit`, or when a signal comes. A transfer that is done
    // is forgotten; one that failed says why, as often as it is asked.
    Outcome wait(std::uint64_t transfer, std::chrono::nanoseconds limit, std::string& failure);
    // Takes what has come, without a wait.
    Outcome look(std::uint64_t transfer);
    // The threads that are in ``wait`` now.
    std::size_t count_waiting();
    // Closes all connections; what is under way fails. No memory of callers is touched from here on.
    void cancel();
    // In a fork of the process, which must not keep connections open: closes its copies, and no more.
    void abandon();

private:
    using Lock = std::unique_lock<std::mutex>;
    using Shared = std::shared_ptr<Transfer>;

    struct Outgoing {
        std::array<std::uint8_t, kHeadBytes> head;
        const std::uint8_t* data;
        std::size_t n_bytes;
        std::size_t n_sent;  // of head and data
        Shared transfer;
    };
    struct Expected {
        std::uint8_t* data;
        std::size_t n_bytes;
        Shared transfer;
    };
    struct Early {
        std::vector<std::uint8_t> bytes;
        std::size_t n_came = 0;
    };
    struct Stream {
        std::uint32_t n_sent = 0, n_came = 0;
        std::deque<Expected> expected;
        std::deque<Early> early;  // only while nothing is expected
    };
    struct Peer {
        int socket = -1;
        bool is_lost = false;
        bool can_send = true;
        bool is_watched = false;
        std::uint32_t events = 0;
        std::string failure;
        std::deque<Outgoing> outgoing;
        std::array<Stream, kStreams> streams;
        // The message that is coming in: first its head, then the rest of its chunk.
        std::array<std::uint8_t, kHeadBytes> head;
        std::size_t head_bytes = 0;
        std::size_t stream = 0;
        bool is_early = false;
        bool is_held = false;  // its head has come, and there is no memory for its chunk
        std::uint8_t* into = nullptr;
        std::size_t left = 0;
        // What was read behind it, up to several messages.
        std::vector<std::uint8_t> staged;
        std::size_t staged_begin = 0, staged_end = 0;
    };

    void expect(Peer& peer, std::size_t stream, const Chunk& chunk, const Shared& transfer);
    void queue(Peer& peer, std::size_t stream, const Chunk& chunk, const Shared& transfer);
    void settle(const Shared& transfer);
    void fail(const Shared& transfer, const std::string& why);
    void end(const Shared& transfer);
    void write(std::size_t number);
    void read(std::size_t number);
    void take_staged(std::size_t number);
    bool take_head(std::size_t number);
    bool place(std::size_t number);
    void finish_chunk(Peer& peer);
    void lose(std::size_t number, const std::string& why);
    void fail_sends(Peer& peer, const std::string& why);
    void watch(std::size_t number);
    bool drive(Lock& lock, std::chrono::nanoseconds limit);
    void run();

    const std::size_t rank_, most_early_bytes_;
    int epoll_ = -1, wake_ = -1;
    std::mutex mutex_;
    std::condition_variable moved_, idle_;
    std::vector<Peer> peers_;
    std::unordered_map<std::uint64_t, Shared> transfers_;
    std::uint64_t n_begun_ = 0;
    std::size_t early_bytes_ = 0, n_large_ = 0, n_waiting_ = 0;
    bool is_driven_ = false, is_over_ = false;
    std::thread thread_;
};

}  // namespace distlion
