"""Provenance: what meta.json records, read with its types and written again as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dualenc.errors import DualencError
from dualenc.io.provenance import Provenance

ENTRIES = {
    "model": "m",
    "autocast": None,
    "later": {"nested": [1, 2]},
    "dim": 4,
    "files": {"a": "0f"},
    "order": "by year",
    "format": "a format",
    "version": 1,
    "side": "left",
    "other": 7,
}


def read(folder: Path) -> Provenance:
    return Provenance.from_folder(
        folder, "a format", 1, required=["dim"], other="is of another format", remedy="repair it"
    )


def test_entries_of_a_later_version_are_written_again_in_their_places(tmp_path: Path) -> None:
    Provenance.from_entries(ENTRIES).write(tmp_path)
    before = (tmp_path / "meta.json").read_bytes()
    provenance = read(tmp_path)
    provenance.write(tmp_path)
    assert (tmp_path / "meta.json").read_bytes() == before
    assert json.loads(before) == ENTRIES
    assert (provenance.model, provenance.dim, provenance.side) == ("m", 4, "left")
    changed = provenance.updated(dim=5, count=2, new=1).entries()
    assert list(changed) == [*ENTRIES, "count", "new"]
    assert (changed["dim"], changed["later"]) == (5, {"nested": [1, 2]})
    assert (
        list(provenance.without(["model", "later"]).entries())
        == list(ENTRIES)[1:2] + list(ENTRIES)[3:]
    )
    assert provenance.only(["side", "skipped", "model"]).entries() == {"side": "left", "model": "m"}


def test_given_attributes_are_recorded() -> None:
    assert Provenance().entries() == {}
    given = Provenance(normalized=True, model="m", other={"later": 1})
    assert given.entries() == {"model": "m", "normalized": True, "later": 1}
    assert given == Provenance.from_entries({"later": 1, "normalized": True, "model": "m"})
    assert given.difference({"model": "m", "side": "left"}) == ("side", None, "left")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"dim": True}, "'dim' is true or false, not an integer; repair it"),
        ({"dim": None}, "'dim' is null, not an integer"),
        ({"model": ["m"]}, "'model' is a list, not a string"),
        ({"side": "up"}, "'side' is 'up', not left or right"),
        ({"metric": {}}, "'metric' is '{}', not cosine or ip"),
        ({"sizes": {"a": "7"}}, "'value of sizes' is a string, not an integer"),
        ({"shard_rows": [1, 2.5]}, "'value of shard_rows' is a number, not an integer"),
        ({"first_skipped": [{"id": 3}]}, "'value of value of first_skipped' is an integer"),
        ({"format": "another"}, "is of another format"),
        ({"version": 2}, "has format 2 of another dualenc; this one reads format 1; make"),
    ],
)
def test_entries_of_other_types_are_refused(
    tmp_path: Path, entries: dict[str, Any], message: str
) -> None:
    Provenance.from_entries({**ENTRIES, **entries}).write(tmp_path)
    with pytest.raises(DualencError) as caught:
        read(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_entry_is_refused_and_an_integer_is_a_number(tmp_path: Path) -> None:
    Provenance.from_entries({**ENTRIES, "target_recall": 1}).write(tmp_path)
    assert read(tmp_path).target_recall == 1
    Provenance.from_entries(ENTRIES).without(["dim"]).write(tmp_path)
    with pytest.raises(DualencError, match="lacks 'dim'; repair it"):
        read(tmp_path)
