"""What was done before an interruption is read back, whole lines only, and only if it was the same evaluation."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dualenc import distributed
from dualenc.evaluation.ledger import Ledger

SIGNATURE = {"model": "abc", "severity": 1, "corruptions": ("fog", "snow")}


def test_values_come_back_and_only_the_rest_is_missing(tmp_path: Path) -> None:
    first = Ledger(tmp_path, SIGNATURE)
    assert first.missing(range(4)) == [0, 1, 2, 3]
    first.add({2: [1, 0], 0: [0, 0]})
    first.add({1: [5, 5]})
    again = Ledger(tmp_path, SIGNATURE)
    assert again.missing(range(4)) == [3]
    assert again.all_values() == {0: [0, 0], 1: [5, 5], 2: [1, 0]}
    assert list(again.all_values()) == [0, 1, 2]


def test_a_line_cut_short_is_done_again_and_harms_no_other(tmp_path: Path) -> None:
    Ledger(tmp_path, SIGNATURE).add({0: 10, 1: 11})
    (part,) = tmp_path.iterdir()
    part.write_bytes(part.read_bytes().rstrip()[:-4])
    again = Ledger(tmp_path, SIGNATURE)
    assert again.missing(range(3)) == [1, 2]
    again.add({1: 11})
    assert Ledger(tmp_path, SIGNATURE).all_values() == {0: 10, 1: 11}


@pytest.mark.parametrize("keep", [0, 20])
def test_even_the_first_line_may_be_cut_short(tmp_path: Path, keep: int) -> None:
    Ledger(tmp_path, SIGNATURE).add({0: 10})
    (part,) = tmp_path.iterdir()
    part.write_bytes(part.read_bytes()[:keep])
    again = Ledger(tmp_path, SIGNATURE)
    again.add({0: 12})
    assert Ledger(tmp_path, SIGNATURE).all_values() == {0: 12}


def test_another_evaluation_starts_anew(tmp_path: Path) -> None:
    Ledger(tmp_path, SIGNATURE).add({0: 10})
    other = Ledger(tmp_path, SIGNATURE | {"severity": 2})
    assert other.missing(range(2)) == [0, 1]
    assert list(tmp_path.iterdir()) == []


def test_any_number_of_processes_shares_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Ledger(tmp_path, SIGNATURE).add({3: 0})
    shares = []
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        ledger = Ledger(tmp_path, SIGNATURE)
        shares.append(ledger.missing(range(6)))
        ledger.add({index: index for index in shares[-1]} if rank == 1 else {})
    assert shares == [[0, 1, 2], [4, 5]]
    assert Ledger(tmp_path, SIGNATURE).all_values() == {3: 0, 4: 4, 5: 5}


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.replace(b'"value": 11', b'"value": 12'),  # a flipped bit
        lambda content: content.replace(b'"item": 1', b'"item": 7'),
        lambda content: content.replace(b'"value": 11', b'"value": \xff\xfe'),
        lambda content: content.replace(b'{"item": 1', b'[3]\n3\nnull\n{}\n{"x": 1'),
        lambda content: content.replace(b'"item": 1', b'"item": [1]'),
        lambda content: content + b"[" * 200_000,
    ],
)  # fmt: skip
def test_a_damaged_line_is_done_again(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    Ledger(tmp_path, SIGNATURE).add({0: 10})
    Ledger(tmp_path, SIGNATURE).add({1: 11})
    (part,) = tmp_path.iterdir()
    part.write_bytes(damage(part.read_bytes()))
    again = Ledger(tmp_path, SIGNATURE)
    assert again.all_values() == {key: value for key, value in {0: 10, 1: 11}.items() if key not in again.missing([1])}
    again.add({1: 11})
    assert Ledger(tmp_path, SIGNATURE).all_values() == {0: 10, 1: 11}


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_replaced(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "part-00000.ndjson")
    Ledger(tmp_path, SIGNATURE).add({0: 10})
    assert Ledger(tmp_path, SIGNATURE).all_values() == {0: 10}
