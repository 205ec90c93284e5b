import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

import distlion
from distlion.errors import CorruptFrameError
from distlion_lab.planning.bench import KernelRates
from distlion_lab.planning.machine import CPU
from distlion_lab.planning.report_record import RECORD_BYTES, decode_report, encode_report
from distlion_lab.planning.worker_report import WorkerReport

REPORT = WorkerReport(
    host="host-1",
    cpu="a processor",
    cores=2,
    threads=1,
    interface="",
    loopback=False,
    denormals=True,
    debug=False,
    kernels=KernelRates("avx2", 1.25e10, CPU),
)


def test_report_comes_back_as_it_was():
    assert decode_report(encode_report(REPORT), rank=0) == REPORT


@pytest.mark.parametrize("name", ["n" * 10_000, "\N{GRINNING FACE}" * 10_000, "\0" * 300])
def test_record_has_one_size_whatever_the_names(name):
    report = replace(REPORT, host=name, cpu=name)
    record = encode_report(report)
    assert len(record) == RECORD_BYTES
    assert decode_report(record, rank=0).host == name[:256]


def forge(**fields):
    content = json.loads(encode_report(REPORT).rstrip(b"\0")) | fields
    return json.dumps(content).encode().ljust(RECORD_BYTES, b"\0")


@pytest.mark.parametrize(
    "record",
    [
        b"\0" * RECORD_BYTES,
        b"[" * RECORD_BYTES,
        b"\x80\x04\x95" + b"\0" * (RECORD_BYTES - 3),
        b"[1]".ljust(RECORD_BYTES, b"\0"),
        forge(cores="2"),
        forge(debug=1),
        forge(kernels=None),
        forge(kernels={"machine": {}}),
        forge(surprise=1),
    ],
)
def test_what_is_no_report_is_refused_and_names_the_rank(record):
    with pytest.raises(CorruptFrameError, match="rank 3 sent no report") as raised:
        decode_report(record, rank=3)
    assert raised.value.culprits == (3,)


def test_random_damage_is_refused_or_gives_a_report():
    chance = random.Random(0)
    refused = 0
    for _ in range(500):
        record = bytearray(encode_report(REPORT))
        for _ in range(3):
            record[chance.randrange(400)] = chance.randrange(256)
        try:
            assert isinstance(decode_report(bytes(record), rank=1), WorkerReport)
        except CorruptFrameError:
            refused += 1
    assert refused > 250


def test_no_collective_of_the_package_unpickles():
    pattern = re.compile(r"\w*_object_list|(all_)?gather_object|(send|recv)_object")
    sources = Path(distlion.__file__).parent.rglob("*.py")
    found = {path.name: pattern.findall(path.read_text()) for path in sources}
    assert len(found) > 100
    assert not {name: calls for name, calls in found.items() if calls}
