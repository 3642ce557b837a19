"""Small blocks of the matrix of scores, so that a small batch needs several of them."""

from contextlib import contextmanager

from weince.engines import chunked, dense


@contextmanager
def small_bands():
    """Make bands and tiles so small that each batch needs several of each, the last one smaller."""
    before = chunked.CPU_BAND, chunked.BLOCK, dense.BLOCK
    chunked.CPU_BAND, chunked.BLOCK, dense.BLOCK = 160, 50, 70
    try:
        yield
    finally:
        chunked.CPU_BAND, chunked.BLOCK, dense.BLOCK = before
