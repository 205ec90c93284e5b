// Transfers of an endpoint: how they begin and end, and who moves their bytes.
#include "endpoint.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <system_error>

namespace distlion {

namespace {

constexpr std::size_t kStagedBytes = 32 * 1024;
// Of a transfer, less fits into the system's buffers before anybody reads it.
constexpr std::size_t kLargeBytes = 32 * 1024;
constexpr auto kThreadSlice = std::chrono::milliseconds(500);
constexpr std::uint64_t kWake = ~std::uint64_t{0};

// Its number may belong to somebody else from here on.
void shut(int& descriptor) {
    if (descriptor >= 0) {
        ::close(descriptor);
    }
    descriptor = -1;
}

}  // namespace

Endpoint::Endpoint(std::size_t rank, const std::vector<int>& sockets, std::size_t most_early_bytes)
    : rank_(rank), most_early_bytes_(most_early_bytes), peers_(sockets.size()) {
    epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
    wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = kWake;
    if (epoll_ < 0 || wake_ < 0 || ::epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event) != 0) {
        const int error = errno;
        shut(epoll_);
        shut(wake_);
        throw std::system_error(error, std::system_category(), "a wait for sockets cannot be set up");
    }
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
    shut(epoll_);
    shut(wake_);
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
            try {
                thread_ = std::thread(&Endpoint::run, this);
            } catch (const std::system_error&) {
                // The process may start no more threads: whoever waits drives.
            }
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
        if (n_large_ > 0 && n_waiting_ == 0) {
            idle_.notify_one();  // the thread may have found this one at the sockets
        }
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
    // Also where there is no memory to go on.
    struct Waiting {
        Endpoint& end;
        explicit Waiting(Endpoint& where) : end(where) { ++end.n_waiting_; }
        ~Waiting() {
            if (--end.n_waiting_ == 0 && end.n_large_ > 0) {
                end.idle_.notify_one();
            }
        }
    };
    const Waiting waiting(*this);
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

std::size_t Endpoint::count_waiting() {
    const Lock lock(mutex_);
    return n_waiting_;
}

void Endpoint::cancel() {
    if (epoll_ < 0) {
        return;  // abandoned: the lock may be held for ever
    }
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
        shut(peer.socket);
    }
    shut(epoll_);
    shut(wake_);
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
            // It has nothing to say until somebody wants its chunk; what it is sent fails now.
            write(number);
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
            continue;
        }
        try {
            drive(lock, kThreadSlice);
        } catch (const std::exception& error) {
            for (std::size_t number = 0; number < peers_.size(); ++number) {
                if (number != rank_ && !peers_[number].is_lost) {
                    lose(number, error.what());
                }
            }
        }
    }
}

}  // namespace distlion
