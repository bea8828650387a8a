"""Published products as kernels: which are taken, and their table."""

from __future__ import annotations

import pytest

from entrain_bench.config.compose import Composer
from entrain_bench.lab.ledger.book import load_book
from entrain_bench.lab.ledger.kernels import KernelRow, Product, kernel_ratio, read_kernels
from entrain_bench.lab.ledger.products import kernel_table, read_products
from entrain_bench.specs.cluster import ClusterSpec

BOOK = load_book()


def test_products_in_16_bits_on_known_devices_are_taken() -> None:
    rows = read_products(BOOK.products)
    assert [row.device for row in rows].count("a40") == 1
    assert {row.device for row in rows} == {"a40", "a100", "h100"}
    (a40,) = (row for row in rows if row.device == "a40")
    assert a40.kernel == Product(8000, 8000, 8000, 40.0)


def test_a_kernel_of_two_tables_counts_once() -> None:
    composer, rows = Composer(), read_kernels()
    _, heading, lines = kernel_table([*rows, *rows, *read_products(BOOK.products)], composer)
    assert len(heading) == len(lines[0])
    # Of ND A100 v4's eight products five are in both tables.
    assert sum(int(line[1]) for line in lines) == len(rows) + len(read_products(BOOK.products)) - 5


def test_errors_are_of_the_device_alone() -> None:
    composer = Composer()
    cluster = ClusterSpec.from_config(composer.run(("cluster=a100x8",)).cluster)
    row = KernelRow("a100", Product(4096, 4096, 4096, 228.0), "somewhere, a table")
    _, _, ((name, number, ratio, error, largest),) = kernel_table([row], composer)
    assert (name, number) == ("A100, product, somewhere", "1")
    expected = kernel_ratio(row, cluster)
    assert float(ratio) == pytest.approx(expected, abs=1e-3)
    assert error == f"{abs(expected - 1):.1%}"
    assert largest == f"{abs(expected - 1):.0%}"
