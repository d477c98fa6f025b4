import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.profiling.load.client import Dechunker, WireError
from tests.profiling.load.servers import chunk


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=20), st.lists(st.integers(0, 2000), max_size=20))
def test_chunks_are_taken_apart_however_the_bytes_are_cut(parts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(map(chunk, parts)) + b"0\r\nTrailer: x\r\n\r\n"
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    dechunker = Dechunker()
    pieces = [data[low:high] for low, high in itertools.pairwise(edges)]
    got = []
    for number, piece in enumerate(pieces):
        got.append(dechunker.feed(piece))
        assert dechunker.done == (number == len(pieces) - 1)
    assert b"".join(got) == b"".join(parts)


def test_extensions_of_a_chunk_are_left_alone() -> None:
    dechunker = Dechunker()
    assert dechunker.feed(b"3;a=b\r\nabc\r\nA ;c\r\n0123456789\r\n0\r\n\r\n") == b"abc0123456789"
    assert dechunker.done


@pytest.mark.parametrize(
    "data",
    [b"xyz\r\n", b"a" * 2000, b"-5\r\nabc\r\n", b"+5\r\n", b"0x5\r\n", b"1_0\r\n", b"f" * 40 + b"\r\n"],
)
def test_what_is_no_chunk_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        Dechunker().feed(data)
