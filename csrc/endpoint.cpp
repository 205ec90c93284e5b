#include "endpoint.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace distlion {

namespace {

constexpr std::size_t kStagedBytes = 32 * 1024;
// Of a transfer, less fits into the system's buffers before anybody reads it.
constexpr std::size_t kLargeBytes = 32 * 1024;
constexpr int kMostParts = 64;
// Reads in a row from one connection, so that others have their turn.
constexpr int kMostReads = 8;
constexpr auto kThreadSlice = std::chrono::milliseconds(500);
constexpr std::uint64_t kWake = ~std::uint64_t{0};

void put(std::uint8_t* out, std::uint64_t value, std::size_t n_bytes) {
    for (std::size_t k = 0; k < n_bytes; ++k) {
        out[k] = static_cast<std::uint8_t>(value >> (8 * k));
    }
}

std::uint64_t get(const std::uint8_t* from, std::size_t n_bytes) {
    std::uint64_t value = 0;
    for (std::size_t k = 0; k < n_bytes; ++k) {
        value |= std::uint64_t{from[k]} << (8 * k);
    }
    return value;
}

std::string describe(int error) { return std::system_category().message(error); }

}  // namespace

Endpoint::Endpoint(std::size_t rank, const std::vector<int>& sockets, std::size_t most_early_bytes)
    : rank_(rank), most_early_bytes_(most_early_bytes), peers_(sockets.size()) {
    epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
    wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (epoll_ < 0 || wake_ < 0) {
        throw std::system_error(errno, std::system_category(), "a wait for sockets cannot be set up");
    }
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = kWake;
    ::epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event);
    for (std::size_t number = 0; number < peers_.size(); ++number) {
        peers_[number].socket = sockets[number];
        if (number != rank_) {
            peers_[number].staged.resize(kStagedBytes);
            watch(number);
        }
    }
}

Endpoint::~Endpoint() {
    cancel();
    if (thread_.joinable()) {
        thread_.join();
    }
    ::close(epoll_);
    ::close(wake_);
}

std::uint64_t Endpoint::begin(std::size_t stream, const std::vector<Chunk>& sends,
                              const std::vector<Chunk>& receives) {
    const Lock lock(mutex_);
    const auto transfer = std::make_shared<Transfer>();
    const std::uint64_t number = n_begun_++;
    transfers_.emplace(number, transfer);
    transfer->n_left = 1;  // until all of it has begun
    std::size_t n_bytes = 0;
    const std::uint8_t* own = nullptr;
    for (const Chunk& chunk : sends) {
        own = chunk.peer == rank_ ? chunk.data : own;
    }
    for (const Chunk& chunk : receives) {
        if (chunk.peer != rank_) {
            n_bytes += chunk.n_bytes;
            expect(peers_[chunk.peer], stream, chunk, transfer);
            if (peers_[chunk.peer].is_held && place(chunk.peer)) {
                take_staged(chunk.peer);
                watch(chunk.peer);
            }
        } else if (own && chunk.n_bytes > 0 && own != chunk.data) {
            std::memmove(chunk.data, own, chunk.n_bytes);
        }
    }
    for (const Chunk& chunk : sends) {
        if (chunk.peer != rank_ && chunk.n_bytes > 0) {
            queue(peers_[chunk.peer], stream, chunk, transfer);
        }
    }
    bool has_rest = false;
    for (const Chunk& chunk : sends) {
        if (chunk.peer != rank_ && !peers_[chunk.peer].is_lost) {
            write(chunk.peer);
            watch(chunk.peer);
            has_rest |= !peers_[chunk.peer].outgoing.empty();
        }
    }
    transfer->is_large = transfer->n_left > 1 && transfer->failure.empty() && (has_rest || n_bytes > kLargeBytes);
    n_large_ += transfer->is_large;
    settle(transfer);
    if (transfer->is_large && n_waiting_ == 0 && !is_over_) {
        if (!thread_.joinable()) {
            thread_ = std::thread(&Endpoint::run, this);
        }
        idle_.notify_one();
    }
    return number;
}

Outcome Endpoint::look(std::uint64_t number) {
    Lock lock(mutex_);
    const auto found = transfers_.find(number);
    if (found == transfers_.end()) {
        return Outcome::done;
    }
    const Shared transfer = found->second;
    if (transfer->n_left > 0 && transfer->failure.empty() && !is_driven_) {
        drive(lock, std::chrono::nanoseconds(0));
    }
    if (!transfer->failure.empty()) {
        return Outcome::failed;
    }
    return transfer->n_left == 0 ? Outcome::done : Outcome::under_way;
}

Outcome Endpoint::wait(std::uint64_t number, std::chrono::nanoseconds limit, std::string& failure) {
    Lock lock(mutex_);
    const auto found = transfers_.find(number);
    if (found == transfers_.end()) {
        return Outcome::done;
    }
    const Shared transfer = found->second;
    const auto end = std::chrono::steady_clock::now() + limit;
    ++n_waiting_;
    // At least one look at the sockets, however late this thread comes to it.
    bool goes_on = true;
    while (transfer->n_left > 0 && transfer->failure.empty() && goes_on) {
        const auto left = std::max(end - std::chrono::steady_clock::now(), std::chrono::nanoseconds(0));
        if (is_driven_) {
            moved_.wait_for(lock, left);
            goes_on = left.count() > 0;
        } else {
            goes_on = drive(lock, left) && left.count() > 0;
        }
    }
    --n_waiting_;
    if (n_waiting_ == 0 && n_large_ > 0) {
        idle_.notify_one();
    }
    if (!transfer->failure.empty()) {
        failure = transfer->failure;
        return Outcome::failed;
    }
    if (transfer->n_left > 0) {
        return Outcome::under_way;
    }
    transfers_.erase(number);
    return Outcome::done;
}

std::vector<std::size_t> Endpoint::list_lost() {
    const Lock lock(mutex_);
    std::vector<std::size_t> lost;
    for (std::size_t number = 0; number < peers_.size(); ++number) {
        if (peers_[number].is_lost && !is_over_) {
            lost.push_back(number);
        }
    }
    return lost;
}

void Endpoint::cancel() {
    const Lock lock(mutex_);
    for (std::size_t number = 0; number < peers_.size(); ++number) {
        if (number != rank_ && !peers_[number].is_lost) {
            lose(number, "this worker has given up its connections");
        }
    }
    is_over_ = true;
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto n_written = ::write(wake_, &one, sizeof one);
    moved_.notify_all();
    idle_.notify_all();
}

void Endpoint::abandon() {
    // Another thread may have held the lock when the process forked.
    for (Peer& peer : peers_) {
        if (peer.socket >= 0) {
            ::close(peer.socket);
        }
    }
    ::close(epoll_);
    ::close(wake_);
}

// A chunk that is wanted: it may have come already, or be coming.
void Endpoint::expect(Peer& peer, std::size_t number, const Chunk& chunk, const Shared& transfer) {
    if (chunk.n_bytes == 0) {
        return;
    }
    Stream& stream = peer.streams[number];
    if (stream.early.empty()) {
        if (peer.is_lost) {
            fail(transfer, peer.failure);
            return;
        }
        ++transfer->n_left;
        stream.expected.push_back({chunk.data, chunk.n_bytes, transfer});
        return;
    }
    Early& early = stream.early.front();
    const bool is_coming = early.n_came < early.bytes.size();
    if (early.bytes.size() != chunk.n_bytes) {
        const std::size_t place = static_cast<std::size_t>(&peer - peers_.data());
        const std::string why = "sent " + std::to_string(early.bytes.size()) + " bytes where " +
                                std::to_string(chunk.n_bytes) + " were expected";
        fail(transfer, "peer " + std::to_string(place) + " " + why);
        lose(place, why);
        return;
    }
    std::memcpy(chunk.data, early.bytes.data(), early.n_came);
    if (is_coming) {
        ++transfer->n_left;
        peer.is_early = false;
        peer.into = chunk.data + early.n_came;
        stream.expected.push_back({chunk.data, chunk.n_bytes, transfer});
    }
    early_bytes_ -= early.bytes.size();
    stream.early.pop_front();
}

void Endpoint::queue(Peer& peer, std::size_t number, const Chunk& chunk, const Shared& transfer) {
    if (peer.is_lost || !peer.can_send) {
        fail(transfer, peer.failure);
        return;
    }
    ++transfer->n_left;
    Outgoing message{{}, chunk.data, chunk.n_bytes, 0, transfer};
    put(message.head.data(), kMarker, 2);
    put(message.head.data() + 2, number, 2);
    put(message.head.data() + 4, peer.streams[number].n_sent++, 4);
    put(message.head.data() + 8, chunk.n_bytes, 8);
    peer.outgoing.push_back(std::move(message));
}

// One chunk of a transfer has ended.
void Endpoint::settle(const Shared& transfer) {
    if (--transfer->n_left == 0 && transfer->failure.empty()) {
        end(transfer);
    }
}

void Endpoint::fail(const Shared& transfer, const std::string& why) {
    if (transfer->failure.empty()) {
        transfer->failure = why;
        end(transfer);
    }
}

void Endpoint::end(const Shared& transfer) {
    n_large_ -= transfer->is_large;
    transfer->is_large = false;
}

void Endpoint::write(std::size_t number) {
    Peer& peer = peers_[number];
    while (!peer.is_lost && !peer.outgoing.empty()) {
        std::array<iovec, kMostParts> parts;
        std::size_t n_parts = 0, n_asked = 0;
        for (const Outgoing& message : peer.outgoing) {
            if (n_parts + 2 > parts.size()) {
                break;
            }
            const std::size_t of_head = std::min(message.n_sent, kHeadBytes);
            const std::size_t of_data = message.n_sent - of_head;
            if (of_head < kHeadBytes) {
                parts[n_parts++] = {const_cast<std::uint8_t*>(message.head.data()) + of_head, kHeadBytes - of_head};
            }
            parts[n_parts++] = {const_cast<std::uint8_t*>(message.data) + of_data, message.n_bytes - of_data};
            n_asked += kHeadBytes + message.n_bytes - message.n_sent;
        }
        msghdr what{};
        what.msg_iov = parts.data();
        what.msg_iovlen = n_parts;
        const ssize_t n_sent = ::sendmsg(peer.socket, &what, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n_sent < 0) {
            if (errno == EINTR) {
                continue;
            }
            if (errno != EAGAIN && errno != EWOULDBLOCK) {
                // What the peer sent before it left is still to be read.
                peer.can_send = false;
                peer.failure = "peer " + std::to_string(number) + ": " + describe(errno);
                fail_sends(peer, peer.failure);
            }
            return;
        }
        auto rest = static_cast<std::size_t>(n_sent);
        const bool is_full = rest < n_asked;
        while (rest > 0) {
            Outgoing& message = peer.outgoing.front();
            const std::size_t step = std::min(rest, kHeadBytes + message.n_bytes - message.n_sent);
            message.n_sent += step;
            rest -= step;
            if (message.n_sent == kHeadBytes + message.n_bytes) {
                const Shared transfer = message.transfer;
                peer.outgoing.pop_front();
                settle(transfer);
            }
        }
        if (is_full) {
            return;
        }
    }
}

void Endpoint::read(std::size_t number) {
    Peer& peer = peers_[number];
    for (int turn = 0; turn < kMostReads && !peer.is_lost && !peer.is_held; ++turn) {
        std::array<iovec, 2> parts;
        int n_parts = 0;
        if (peer.left > 0) {
            parts[n_parts++] = {peer.into, peer.left};
        }
        parts[n_parts++] = {peer.staged.data(), peer.staged.size()};
        const std::size_t n_asked = peer.left + peer.staged.size();
        const ssize_t got = ::readv(peer.socket, parts.data(), n_parts);
        if (got < 0) {
            if (errno == EINTR) {
                continue;
            }
            if (errno != EAGAIN && errno != EWOULDBLOCK) {
                lose(number, describe(errno));
            }
            return;
        }
        if (got == 0) {
            lose(number, "closed its connection");
            return;
        }
        const auto n_got = static_cast<std::size_t>(got);
        const std::size_t direct = std::min(n_got, peer.left);
        peer.into += direct;
        peer.left -= direct;
        if (direct > 0 && peer.is_early) {
            peer.streams[peer.stream].early.back().n_came += direct;
        }
        if (direct > 0 && peer.left == 0) {
            finish_chunk(peer);
        }
        peer.staged_begin = 0;
        peer.staged_end = n_got - direct;
        take_staged(number);
        if (n_got < n_asked) {
            return;
        }
    }
}

// Puts what was read where it belongs: until nothing is left, or a chunk has no place.
void Endpoint::take_staged(std::size_t number) {
    Peer& peer = peers_[number];
    while (peer.staged_begin < peer.staged_end && !peer.is_lost && !peer.is_held) {
        const std::uint8_t* const from = peer.staged.data() + peer.staged_begin;
        const std::size_t n_staged = peer.staged_end - peer.staged_begin;
        if (peer.left > 0) {
            const std::size_t step = std::min(peer.left, n_staged);
            std::memcpy(peer.into, from, step);
            peer.into += step;
            peer.left -= step;
            peer.staged_begin += step;
            if (peer.is_early) {
                peer.streams[peer.stream].early.back().n_came += step;
            }
            if (peer.left == 0) {
                finish_chunk(peer);
            }
            continue;
        }
        const std::size_t step = std::min(kHeadBytes - peer.head_bytes, n_staged);
        std::memcpy(peer.head.data() + peer.head_bytes, from, step);
        peer.head_bytes += step;
        peer.staged_begin += step;
        if (peer.head_bytes == kHeadBytes && (!take_head(number) || !place(number))) {
            return;
        }
    }
}

// Returns whether it is the head of a message.
bool Endpoint::take_head(std::size_t number) {
    Peer& peer = peers_[number];
    const std::uint64_t stream = get(peer.head.data() + 2, 2);
    if (get(peer.head.data(), 2) != kMarker || stream >= kStreams || get(peer.head.data() + 8, 8) == 0 ||
        get(peer.head.data() + 4, 4) != peer.streams[stream].n_came) {
        lose(number, "sent what is no message, or not the next one");
        return false;
    }
    peer.stream = static_cast<std::size_t>(stream);
    ++peer.streams[stream].n_came;
    return true;
}

// Finds the place of the chunk whose head has come; returns whether there is one.
bool Endpoint::place(std::size_t number) {
    Peer& peer = peers_[number];
    Stream& stream = peer.streams[peer.stream];
    const auto n_bytes = static_cast<std::size_t>(get(peer.head.data() + 8, 8));
    if (!stream.expected.empty()) {
        if (stream.expected.front().n_bytes != n_bytes) {
            lose(number, "sent " + std::to_string(n_bytes) + " bytes where " +
                             std::to_string(stream.expected.front().n_bytes) + " were expected");
            return false;
        }
        peer.into = stream.expected.front().data;
        peer.is_early = false;
    } else if (n_bytes <= most_early_bytes_ && early_bytes_ <= most_early_bytes_ - n_bytes) {
        early_bytes_ += n_bytes;
        stream.early.emplace_back();
        stream.early.back().bytes.resize(n_bytes);
        peer.into = stream.early.back().bytes.data();
        peer.is_early = true;
    } else {
        peer.is_held = true;
        return false;
    }
    peer.is_held = false;
    peer.head_bytes = 0;
    peer.left = n_bytes;
    return true;
}

void Endpoint::finish_chunk(Peer& peer) {
    if (peer.is_early) {
        return;
    }
    Stream& stream = peer.streams[peer.stream];
    const Shared transfer = stream.expected.front().transfer;
    stream.expected.pop_front();
    settle(transfer);
}

void Endpoint::lose(std::size_t number, const std::string& why) {
    Peer& peer = peers_[number];
    peer.is_lost = true;
    peer.failure = "peer " + std::to_string(number) + " " + why;
    if (peer.is_watched) {
        ::epoll_ctl(epoll_, EPOLL_CTL_DEL, peer.socket, nullptr);
        peer.is_watched = false;
    }
    ::close(peer.socket);
    peer.socket = -1;
    fail_sends(peer, peer.failure);
    for (Stream& stream : peer.streams) {
        for (const Expected& expected : stream.expected) {
            fail(expected.transfer, peer.failure);
        }
        stream.expected.clear();
        // What has come in full can still be had.
        if (!stream.early.empty() && stream.early.back().n_came < stream.early.back().bytes.size()) {
            early_bytes_ -= stream.early.back().bytes.size();
            stream.early.pop_back();
        }
    }
    peer.left = 0;
    peer.is_held = false;
    moved_.notify_all();
}

void Endpoint::fail_sends(Peer& peer, const std::string& why) {
    for (const Outgoing& message : peer.outgoing) {
        fail(message.transfer, why);
    }
    peer.outgoing.clear();
}

// Asks for the events of a connection that matter now.
void Endpoint::watch(std::size_t number) {
    Peer& peer = peers_[number];
    if (peer.is_lost) {
        return;
    }
    epoll_event event{};
    event.events = (peer.is_held ? 0u : static_cast<std::uint32_t>(EPOLLIN)) |
                   (peer.outgoing.empty() ? 0u : static_cast<std::uint32_t>(EPOLLOUT));
    event.data.u64 = number;
    if (!peer.is_watched) {
        ::epoll_ctl(epoll_, EPOLL_CTL_ADD, peer.socket, &event);
    } else if (event.events != peer.events) {
        ::epoll_ctl(epoll_, EPOLL_CTL_MOD, peer.socket, &event);
    }
    peer.is_watched = true;
    peer.events = event.events;
}

// Moves bytes of all transfers, once some can move; returns False where a signal came.
bool Endpoint::drive(Lock& lock, std::chrono::nanoseconds limit) {
    std::array<epoll_event, 64> events;
    const auto limit_ms = std::chrono::ceil<std::chrono::milliseconds>(limit).count();
    is_driven_ = true;
    lock.unlock();
    const int n_events = ::epoll_wait(epoll_, events.data(), static_cast<int>(events.size()),
                                      static_cast<int>(std::min<std::int64_t>(limit_ms, 60'000)));
    const int error = errno;
    lock.lock();
    is_driven_ = false;
    for (int k = 0; k < n_events; ++k) {
        if (events[static_cast<std::size_t>(k)].data.u64 == kWake) {
            continue;  // it has been cancelled, for good
        }
        const auto number = static_cast<std::size_t>(events[static_cast<std::size_t>(k)].data.u64);
        const std::uint32_t what = events[static_cast<std::size_t>(k)].events;
        Peer& peer = peers_[number];
        if (peer.is_held && (what & (EPOLLHUP | EPOLLERR)) && peer.is_watched) {
            // It has nothing to say until somebody wants its chunk.
            ::epoll_ctl(epoll_, EPOLL_CTL_DEL, peer.socket, nullptr);
            peer.is_watched = false;
            continue;
        }
        if (!peer.is_lost && (what & (EPOLLIN | EPOLLHUP | EPOLLERR))) {
            read(number);
        }
        if (!peer.is_lost && (what & EPOLLOUT)) {
            write(number);
        }
        watch(number);
    }
    // Whoever waits may be done, or has to drive in place of this thread.
    moved_.notify_all();
    return n_events >= 0 || error != EINTR;
}

void Endpoint::run() {
    Lock lock(mutex_);
    while (!is_over_) {
        if (n_large_ == 0 || n_waiting_ > 0 || is_driven_) {
            idle_.wait(lock);
        } else {
            drive(lock, kThreadSlice);
        }
    }
}

}  // namespace distlion
