"""A pytest plugin: `--slow-sample N` runs a part of each slow test's cases, the same in each run.

A test with many slow cases (model families, formats, sizes) shows much the same with each of them.
Of a test marked `slow(is_sampled=False)`, which only confirms what cheaper tests show, none is run.
"""

from __future__ import annotations

from zlib import crc32

import pytest

from .slow_files import MARK


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-sample",
        type=int,
        default=1,
        metavar="N",
        help="of each slow test's cases, run the first and about one in N of the others; no test "
        "that is marked slow(is_sampled=False), if N is above 1",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the slow cases that are not of the sample."""
    one_in = config.getoption("--slow-sample")
    tests: set[str] = set()
    kept, left_out = [], []
    for item in items:
        test = item.nodeid.partition("[")[0]
        is_first = test not in tests
        if mark := item.get_closest_marker(MARK):
            tests.add(test)
            # By name, not by place: every third case of two parameters may be one value of one.
            is_left_out = not is_first and crc32(item.nodeid.encode()) % one_in
            if is_left_out or (one_in > 1 and not mark.kwargs.get("is_sampled", True)):
                left_out.append(item)
                continue
        kept.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
