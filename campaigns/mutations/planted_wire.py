"""Bugs of sockets of distlion's own: what is sent, what is received, and who may connect."""

from __future__ import annotations

from planted import Mutation

ENDPOINT = ("wire/test_endpoint.py",)
TRANSFERS, CONNECTION = "csrc/endpoint.cpp", "csrc/connection.cpp"
SOCKETS = ("wire/test_sockets.py",)
PATTERNS = ("wire/test_pattern_contract.py",)
MEETINGS, MEETING = ("wire/test_meetings.py",), "wire/rendezvous.py"

WIRE = (
    Mutation(
        "wire: a reply that comes twice, or is missing, is taken for the next one",
        CONNECTION,
        " ||\n        get(peer.head.data() + 4, 4) != peer.streams[stream].n_came",
        "",
        ENDPOINT,
    ),
    Mutation(
        "wire: a chunk of another size is received",
        CONNECTION,
        "if (stream.expected.front().n_bytes != n_bytes) {",
        "if (false) {",
        ENDPOINT,
    ),
    Mutation(
        "wire: a swap is received for a vote",
        CONNECTION,
        "    peer.stream = static_cast<std::size_t>(stream);\n",
        "    peer.stream = 0;\n",
        ENDPOINT,
    ),
    Mutation(
        "wire: a chunk that came early goes to the last one who asks",
        CONNECTION,
        "    Early& early = stream.early.front();\n",
        "    Early& early = stream.early.back();\n",
        ENDPOINT,
    ),
    Mutation(
        "wire: a chunk that comes goes to the last one who asks",
        CONNECTION,
        "        peer.into = stream.expected.front().data;\n",
        "        peer.into = stream.expected.back().data;\n",
        ENDPOINT,
    ),
    Mutation(
        "wire: bytes of another bucket pass for those of this one",
        "wire/frame.py",
        "_FREE = (*range(HEADER_BYTES)[_GRADIENTS], ",
        "_FREE = (*range(40, 44), *range(HEADER_BYTES)[_GRADIENTS], ",
        PATTERNS,
    ),
    Mutation(
        "wire: a closer look takes bytes of another bucket for those of this one",
        "wire/frame.py",
        '        ("bucket", like.bucket),\n',
        "",
        PATTERNS,
    ),
    Mutation(
        "wire: of a chunk that is coming, what came early is lost",
        CONNECTION,
        "    std::memcpy(chunk.data, early.bytes.data(), early.n_came);\n",
        "    if (!is_coming) std::memcpy(chunk.data, early.bytes.data(), early.n_came);\n",
        ENDPOINT,
    ),
    Mutation(
        "wire: memory for what comes early has no limit",
        CONNECTION,
        "n_bytes <= most_early_bytes_ && early_bytes_ <= most_early_bytes_ - n_bytes",
        "true",
        ENDPOINT,
    ),
    Mutation(
        "wire: a transfer ends while its bytes still wait, and its memory is used again",
        CONNECTION,
        "    ++transfer->n_left;\n"
        "    Outgoing message{{}, chunk.data, chunk.n_bytes, 0, transfer};\n",
        "    Outgoing message{{}, chunk.data, chunk.n_bytes, 0,"
        " std::make_shared<Transfer>(Transfer{2, false, {}})};\n",
        ENDPOINT,
    ),
    Mutation(
        "wire: the rest of a message is not sent",
        CONNECTION,
        "(peer.outgoing.empty() ? 0u : static_cast<std::uint32_t>(EPOLLOUT))",
        "0u",
        ENDPOINT,
    ),
    Mutation(
        "wire: who waits is not woken",
        TRANSFERS,
        "    // Whoever waits may be done, or has to drive in place of this thread.\n"
        "    moved_.notify_all();\n",
        "",
        ENDPOINT,
    ),
    Mutation(
        "wire: large chunks stay where they are while nobody waits",
        TRANSFERS,
        "            thread_ = std::thread(&Endpoint::run, this);\n",
        "",
        ENDPOINT,
    ),
    Mutation(
        "wire: a receive from a peer that left never ends",
        CONNECTION,
        "            fail(expected.transfer, peer.failure);\n",
        "",
        ENDPOINT,
    ),
    Mutation(
        "wire: a look at a transfer does not look at the sockets",
        TRANSFERS,
        "        drive(lock, std::chrono::nanoseconds(0));\n",
        "",
        ENDPOINT,
    ),
    Mutation(
        "wire: a fork keeps connections open",
        TRANSFERS,
        "        shut(peer.socket);\n",
        "",
        ENDPOINT,
    ),
    Mutation(
        "wire: a fork of a fork closes what is not its own",
        TRANSFERS,
        "    descriptor = -1;\n",
        "",
        ENDPOINT,
    ),
    Mutation(
        "wire: a tensor that only a transfer needs is freed",
        "wire/sockets.py",
        "        self._held[serial] = tensors  # an interrupt may come as soon as it has begun\n",
        "",
        SOCKETS,
    ),
    Mutation(
        "wire: swaps have the order of collectives",
        "wire/sockets.py",
        "[_piece(peer, out)], out, chunk, stream=_SWAPS)",
        "[_piece(peer, out)], out, chunk)",
        SOCKETS,
    ),
    Mutation(
        "wire: whoever knows the number of a meeting gets in",
        MEETING,
        '        if not hmac.compare_digest(proof, self._prove(peer, b"dials", said)):\n',
        "        if False:\n",
        MEETINGS,
    ),
    Mutation(
        "wire: whoever listens at an address is believed",
        MEETING,
        "        if heard and not hmac.compare_digest(heard, answer):\n",
        "        if False:\n",
        MEETINGS,
    ),
    Mutation(
        "wire: a fork keeps its parent's port open",
        MEETING,
        "    for each in list(_open):\n",
        "    for each in []:\n",
        MEETINGS,
    ),
    Mutation(
        "wire: it listens on all interfaces",
        "wire/addresses.py",
        "socket.create_server((host, port), family",
        'socket.create_server(("", port), family',
        MEETINGS,
    ),
    Mutation(
        "wire: a host whose name has another one's address listens nowhere",
        "wire/addresses.py",
        "                absent = error\n                continue\n",
        "                raise\n",
        MEETINGS,
    ),
    Mutation(
        "wire: strangers that say nothing keep members out",
        MEETING,
        "            if len(self._guests) == _MOST_GUESTS:\n",
        "            if len(self._guests) == _MOST_GUESTS:\n                connection.close()\n"
        "                continue\n            if False:\n",
        MEETINGS,
    ),
    Mutation(
        "wire: of too many strangers the newest is closed",
        MEETING,
        "                self._end(next(iter(self._guests)))\n            guest",
        "                self._end(next(reversed(self._guests)))\n            guest",
        MEETINGS,
    ),
    Mutation(
        "wire: a member that is closed unheard does not dial again",
        MEETING,
        "time.monotonic() + pause_s > until_s",
        "True",
        MEETINGS,
    ),
    Mutation(
        "wire: a member is taken twice",
        MEETING,
        "            if not _has_ended(self.sockets[peer]):\n",
        "            if False:\n",
        MEETINGS,
    ),
    Mutation(
        "wire: a member that dials again is refused",
        MEETING,
        "            if not _has_ended(self.sockets[peer]):\n",
        "            if True:\n",
        MEETINGS,
    ),
    Mutation(
        "wire: the port stays open behind a meeting",
        MEETING,
        "        for server in servers:\n            server.close()\n",
        "",
        MEETINGS,
    ),
    Mutation(
        "wire: workers do not compare their transports",
        "peers/session.py",
        '            f"wire: {self.connections.wire}",\n',
        "",
        ("distributed/test_wires.py::test_workers_that_chose_different_transports_hear_of_it",),
    ),
    Mutation(
        "wire: workers that chose different transports are not told what to set",
        "peers/meetings.py",
        "    elif what.startswith(_WIRE):\n",
        "    elif False:\n",
        ("distributed/test_wires.py::test_workers_that_chose_different_transports_hear_of_it",),
    ),
    Mutation(
        "wire: Linux sends over Gloo by default",
        "wire/tcp.py",
        '("tcp" if sys.platform == "linux" else "gloo")',
        '"gloo"',
        ("distributed/test_wires.py::test_only_linux_has_own_sockets_and_takes_them_by_default",),
    ),
    Mutation(
        "wire: sockets that were not built are found out where others already wait",
        "wire/tcp.py",
        "        load_endpoint()\n",
        "",
        (
            "distributed/test_wires.py::"
            "test_sockets_that_were_not_built_are_an_error_that_says_what_to_do",
        ),
    ),
)
