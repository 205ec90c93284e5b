// The bytes of one connection of an endpoint: messages that are written, and read into their places.
#include "endpoint.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>

namespace distlion {

namespace {

constexpr int kMostParts = 64;
// Reads in a row from one connection, so that others have their turn.
constexpr int kMostReads = 8;

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
        try {
            stream.early.push_back({std::vector<std::uint8_t>(n_bytes), 0});
        } catch (const std::bad_alloc&) {
            lose(number, "sent more than there is memory for");
            return false;
        }
        early_bytes_ += n_bytes;
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
    if (!peer.is_watched && ::epoll_ctl(epoll_, EPOLL_CTL_ADD, peer.socket, &event) != 0) {
        lose(number, "cannot be watched: " + describe(errno));
        return;
    }
    if (peer.is_watched && event.events != peer.events) {
        ::epoll_ctl(epoll_, EPOLL_CTL_MOD, peer.socket, &event);
    }
    peer.is_watched = true;
    peer.events = event.events;
}

}  // namespace distlion
