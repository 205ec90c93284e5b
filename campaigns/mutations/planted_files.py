"""Bugs in what reads files that may come from elsewhere."""

from __future__ import annotations

from planted import Mutation

PICKLE = ("lab/tasks/test_plain_pickle.py",)
JSON = ("lab/test_json_file.py",)

FILES = (
    Mutation(
        "a pickle may name anything",
        "lab/tasks/plain_pickle.py",
        "if found not in _KNOWN:",
        "if not found.name:",
        PICKLE,
    ),
    Mutation(
        "a pickle may not have a tuple for each of 10,000 names",
        "lab/tasks/plain_pickle.py",
        "_MOST_TUPLES = 1 << 14",
        "_MOST_TUPLES = 1 << 13",
        PICKLE,
    ),
    Mutation(
        "an array of a data set is of any dtype",
        "lab/tasks/plain_pickle.py",
        "if not _is_uint8(dtype) or",
        "if",
        PICKLE,
    ),
    Mutation(
        "an array of a data set may have sizes below 0",
        "lab/tasks/plain_pickle.py",
        "0 <= size <= len(data)",
        "size <= len(data)",
        PICKLE,
    ),
    Mutation(
        "a pickle may make more bytes than its file has",
        "lab/tasks/plain_pickle.py",
        "if self.left_bytes < 0:",
        "if False:",
        PICKLE,
    ),
    Mutation(
        "JSON may be nested as deeply as Python goes",
        "lab/json_file.py",
        'raise DataError("it is nested too deeply")\n\n\ndef _check_text',
        "return\n\n\ndef _check_text",
        JSON,
    ),
    Mutation(
        "JSON may hold halves of characters",
        "lab/json_file.py",
        "below += value\n                below += value.values()",
        "below += value.values()",
        JSON,
    ),
    Mutation(
        "an array of a checkpoint may be of any dtype",
        "checkpoint/tree.py",
        "if type(text) is not str or not _DTYPE.fullmatch(text):",
        "if type(text) is not str:",
        ("checkpoint/test_hostile.py",),
    ),
    Mutation(
        "a checkpoint may replace a scheduler's optimizer",
        "checkpoint/reader.py",
        '    if wrong:\n        raise CheckpointError(\n            f"{folder} would',
        '    if False:\n        raise CheckpointError(\n            f"{folder} would',
        ("checkpoint/test_hostile.py",),
    ),
    Mutation(
        "a model config may name kernels of the hub",
        "lab/tasks/models.py",
        "if fields.get(name) not in _LOCAL_ATTENTION:",
        "if False:",
        ("lab/tasks/test_models.py",),
    ),
    Mutation(
        "the index of a comparison may name files outside of its folder",
        "lab/report/comparison_files.py",
        "            runs=row(_name),",
        "            runs=row(text),",
        ("lab/report/test_comparison.py",),
    ),
)
