"""A link whose time is computed: TCP begins slowly, and goes on at the link's rate."""

import types

from distlion.wire import ByteCount


class SlowStart:
    """A link of two whose TCP begins with a window of 14,600 bytes and doubles it in each round."""

    n_members, rank, ranks = 2, 0, (0, 1)
    ring_above_bytes = None

    def __init__(self, latency_ns, rate_bit_per_s):
        self.latency_ns, self.rate_bit_per_s = latency_ns, rate_bit_per_s
        self.window_bytes, self.now_ns = 14_600, 0
        self.counted = ByteCount(0, 0, 0)
        self.sizes = []

    def all_to_all(self, out, chunks, *, step):
        self.sizes.append(chunks[0].nbytes)
        return self.send(chunks[0].nbytes)

    def send(self, left):
        self.now_ns += self.latency_ns
        while left > 0:
            sent = min(left, self.window_bytes)
            left -= sent
            sending_ns = int(8e9 * sent / self.rate_bit_per_s)
            if sending_ns < self.latency_ns and left:  # it waits for acknowledgements
                self.window_bytes *= 2
                sending_ns = self.latency_ns
            self.now_ns += sending_ns
        return types.SimpleNamespace(wait=lambda: None)

    def all_gather(self, out, row, *, step):
        out[:] = row
        return types.SimpleNamespace(wait=lambda: None)
