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
from distlion_lab.planning.worker_report import WorkerReport, decode_report, encode_report

REPORT = WorkerReport(
    host="host-1",
    cpu="a processor",
    cores=2,
    affinity="c",
    threads=1,
    interface="",
    loopback=False,
    congestion_control="cubic",
    slow_after_pause=True,
    denormals=True,
    debug=False,
    kernels=KernelRates("avx2", 1.25e10, CPU),
)


def test_report_comes_back_as_it_was():
    assert decode_report(encode_report(REPORT), rank=0) == REPORT


@pytest.mark.parametrize("name", ["n" * 10_000, "\N{GRINNING FACE}" * 10_000, "\0\udc80"])
def test_names_come_back_whatever_they_are(name):
    report = replace(REPORT, host=name, cpu=name)
    assert decode_report(encode_report(report), rank=0) == report


def forge(**fields):
    content = json.loads(encode_report(REPORT)) | fields
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"[" * 100_000,
        b"\x80\x04\x95" + b"\0" * 100,
        b"[1]",
        forge(cores="2"),
        forge(affinity="no mask"),
        forge(affinity=3),
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
            record[chance.randrange(len(record))] = chance.randrange(256)
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
