// Parts of equal length for threads. Threads are started for each call: that costs 10 to 20 microseconds
// each, so every part is worth more, and there is no pool to keep, to tear down or to lose in a fork.

#pragma once

#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace distlion {

// Call `work(part, begin, end)` for [0, n) cut at multiples of `grain`, each part on its thread.
template <class Work>
void in_parts(std::size_t n, std::size_t grain, std::size_t least, int threads, Work work) {
    const std::size_t n_grains = (n + grain - 1) / grain;
    const std::size_t most = threads < 1 ? 1 : static_cast<std::size_t>(threads);
    const std::size_t worth = n / least;
    const std::size_t n_parts = worth < 1 ? 1 : worth < most ? worth : most;
    const auto cut = [&](std::size_t part) {
        const std::size_t at = n_grains * part / n_parts * grain;
        return at < n ? at : n;
    };
    std::vector<std::thread> others;
    others.reserve(n_parts);
    std::size_t n_started = 1;
    try {
        for (; n_started < n_parts; ++n_started) {
            others.emplace_back([=] { work(cut(n_started), cut(n_started + 1)); });
        }
    } catch (const std::system_error&) {
        // No more threads may be had: their parts are done here, since a step must not stop halfway.
    }
    work(cut(0), cut(1));
    for (std::size_t part = n_started; part < n_parts; ++part) {
        work(cut(part), cut(part + 1));
    }
    for (std::thread& other : others) {
        other.join();
    }
}

}  // namespace distlion
