"""Pickles are read as plain data: the arrays that were written, and no call of theirs is made."""

import os
import pickle

import numpy as np
import pytest

from distlion_lab.errors import DataError
from distlion_lab.tasks.plain_pickle import Call, build_bytes_array, read_plain_pickle

PIXELS = np.arange(256, dtype=np.uint8).reshape(8, 32)
PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def read_array(data):
    return build_bytes_array(read_plain_pickle(data)[b"data"])


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("pixels", [PIXELS, PIXELS.T, PIXELS[0], PIXELS[:, ::2]])
def test_an_array_of_each_protocol_and_order_is_read_as_it_was_written(protocol, pixels):
    array = read_array(pickle.dumps({b"data": pixels}, protocol=protocol))
    assert array.dtype == np.uint8
    assert np.array_equal(array, pixels)
    assert array.flags.writeable


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_data_of_each_protocol_is_read_as_it_was_written(protocol):
    value = {
        b"bytes": b"a\xff\n",
        "text": "caf\xe9 \u2192",
        b"list": [0, 1, 255, 256, -1, 70_000, 1 << 40, -(1 << 40), True, False, None],
        b"nested": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], [[2]], {}, {b"a": {b"b": [3]}}],
    }
    value[b"again"] = value[b"list"]
    found = read_plain_pickle(pickle.dumps(value, protocol=protocol))
    assert found == value
    assert found[b"again"] is found[b"list"]


def write_as_python_2(pixels, labels):
    """Write what cPickle of Python 2 with an early numpy did, as in the files of CIFAR-10."""
    raw = pixels.tobytes()
    shape = b"".join(b"M" + size.to_bytes(2, "little") for size in pixels.shape)
    return (
        b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03"
        b"U\x06labelsq\x04]q\x05("
        + b"".join(b"K" + bytes([label]) for label in labels)
        + b"eU\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07"
        b"cnumpy\nndarray\nq\x08K\x00\x85"
        b"U\x01b\x87Rq\x09(K\x01" + shape + b"\x86cnumpy\ndtype\nq\x0aU\x02u1K\x00K\x01\x87Rq\x0b"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + len(raw).to_bytes(4, "little")
        + raw
        + b"tbU\tfilenamesq\x0c]q\x0d(U\x05a.pngq\x0eU\x05b.pngq\x0feu."
    )


def test_a_batch_that_python_2_wrote_is_read_as_the_standard_library_reads_it():
    data = write_as_python_2(PIXELS, [3, 9])
    expected = pickle.loads(data, encoding="bytes")
    found = read_plain_pickle(data)
    assert np.array_equal(build_bytes_array(found.pop(b"data")), expected.pop(b"data"))
    assert found == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"numpy.core.multiarray", b"numpy._core.multiarray"),
        (b"numpy._core.multiarray", b"numpy.core.multiarray"),
    ],
)
def test_arrays_of_older_and_newer_numpy_are_read(old, new):
    data = pickle.dumps({b"data": PIXELS}, protocol=2)
    assert np.array_equal(read_array(data.replace(old, new)), PIXELS)


class Calls:
    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("function", "name"), [(os.system, "system"), (eval, "eval")])
def test_a_name_that_no_array_needs_is_refused(protocol, function, name):
    with pytest.raises(DataError, match=name):
        read_plain_pickle(pickle.dumps({b"data": Calls(function, "1")}, protocol=protocol))


def test_names_of_numpy_are_records_that_nothing_calls():
    found = read_plain_pickle(pickle.dumps({b"data": Calls(np.ndarray, 3)}))
    assert isinstance(found[b"data"], Call)
    assert found[b"data"].args == (3,)
    assert build_bytes_array(found[b"data"]) is None


@pytest.mark.parametrize("dtype", ["O", "S1", "i1", "u2", "b1", "V1", "u1,u1"])
def test_an_array_of_another_dtype_is_not_built(dtype):
    pixels = np.zeros(4, dtype=dtype)
    for protocol in PROTOCOLS:
        assert read_array_or_refuse(pickle.dumps({b"data": pixels}, protocol=protocol)) is None


def read_array_or_refuse(data):
    try:
        return read_array(data)
    except DataError:
        return None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"M\x08\x00M\x20\x00\x86", b"M\x08\x00M\x21\x00\x86"),
        (b"M\x08\x00M\x20\x00\x86", b"M\x01\x00M\xff\x00\x86"),
        (b"M\x08\x00M\x20\x00\x86", b"J\xf8\xff\xff\xffJ\xe0\xff\xff\xff\x86"),
        (b"M\x08\x00M\x20\x00\x86", b"]M\x00\x01a"),
        (b"U\x02u1", b"U\x01O"),
        (b"U\x01|NNN", b"U\x01|N}N"),
        (b"cnumpy\nndarray\n", b"cnumpy\ndtype\n"),
        (b"(K\x01M", b"(K\x02M"),
    ],
)
def test_an_array_whose_size_or_kind_does_not_fit_is_not_built(old, new):
    data = write_as_python_2(PIXELS, [])
    assert data.count(old) == 1
    assert read_array(data) is not None
    assert read_array(data.replace(old, new)) is None


DEEP = 200_000
HOSTILE = {
    "empty": b"",
    "no pickle": b"no pickle",
    "bytes of an exabyte": b"\x8e" + (1 << 60).to_bytes(8, "little") + b"x.",
    "an array of bytes of an exabyte": b"\x96" + (1 << 60).to_bytes(8, "little") + b"x.",
    "a text of an exabyte": b"\x8d" + (1 << 60).to_bytes(8, "little") + b"x.",
    "a number of 2 GiB": b"\x8b\xff\xff\xff\x7f1.",
    "a number of a million digits": b"L" + b"9" * 1_000_000 + b"L\n.",
    "a key of deep tuples": b"}" + b")" + b"\x85" * DEEP + b"Ns.",
    "a pickle of nothing but marks": b"(" * DEEP,
    "more opcodes than any batch": b"N" * (1 << 19) + b".",
    "bytes that are written again and again": (
        b"c_codecs\nencode\np0\nX\x00\x10\x00\x00"
        + b"x" * 4096
        + b"X\x06\x00\x00\x00latin1\x86p1\n"
        + b"("
        + b"g0\ng1\nR" * 100_000
        + b"l."
    ),
    "another encoding": b"c_codecs\nencode\n(X\x01\x00\x00\x00xX\x05\x00\x00\x00rot13tR.",
    "bytes beyond latin1": b"c_codecs\nencode\n(V\\u2192\nX\x06\x00\x00\x00latin1tR.",
    "a text that is no UTF-8": b"\x8c\x01\xff.",
    "a lost mark": b"]t.",
    "an empty stack": b".",
    "an empty stack at a put": b"p0\n.",
    "an item that was never put": b"h\x05.",
    "an item appended to a number": b"K\x01K\x01a.",
    "an item set in a list": b"]K\x00Ns.",
    "a dict with a key alone": b"(U\x01ad.",
    "a state of plain data": b"]}b.",
    "a state set twice": b"cnumpy\ndtype\n)R}b}b.",
    "a call of plain data": b"U\x04eval)R.",
    "a name of plain data": b"K\x01K\x02\x93.",
    "a persistent id": b"P1\n.",
    "an extension": b"\x82\x01.",
    "an object of a class": b"cnumpy\ndtype\n)\x81.",
    "a buffer from elsewhere": b"\x97.",
    "a high place in the memo": b"]" + b"r\xff\xff\xff\x7f" + b".",
    "a state of a name": b"cnumpy\ndtype\n}U\x01aK\x01sb.",
    "a state of the encoder": b"c_codecs\nencode\n}U\x0aleft_bytesK\x01sb.",
    "attributes of a name": b"cnumpy\ndtype\nN}U\x08__call__K\x01s\x86b.",
    "a float, which no batch has": b"G\x00\x00\x00\x00\x00\x00\x00\x00.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_plain_pickle_is_refused(name):
    with pytest.raises(DataError, match="its pickle"):
        read_plain_pickle(HOSTILE[name])


def test_keys_as_deep_as_tuples_are_allowed_are_hashed():
    (key,) = read_plain_pickle(b"}" + b")" + b"\x85" * (1 << 14) + b"Ns.")
    assert type(key) is tuple


def test_deep_lists_are_only_data():
    found = read_plain_pickle(b"]" * DEEP + b"a" * (DEEP - 1) + b".")
    depth = 1
    while found:
        (found,) = found
        depth += 1
    assert depth == DEEP
