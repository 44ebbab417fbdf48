"""Ids and texts: each id once, each with a text, as many as vectors."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from dualenc.data.store.items import Ids, Texts
from dualenc.errors import DualencError
from dualenc.search.checks.findings import Finding, alarm, judged, ok, skipped
from dualenc.search.checks.stored import Stored
from dualenc.search.engines.engine import Engine
from dualenc.search.index.open import Index
from dualenc.search.lexical import Lexical, has_lexical

BLANK = r"^\s*$"


def check_items(stored: Stored) -> list[Finding]:
    """Return the findings "counts", "ids" and "texts".

    Args:
        stored: the vectors; all ids and texts are read.
    """
    findings = [_counts(stored)]
    if reason := stored.unlisted:
        return [*findings, skipped("ids", reason), skipped("texts", reason)]
    return [*findings, _ids(stored), _texts(stored)]


def _counts(stored: Stored) -> Finding:
    """Return an alarm if an engine has lost or gained rows; folders are compared when opened."""
    expected = len(stored.opened)
    if not isinstance(stored.opened, Engine):
        line = f"{expected:,} vectors, ids and recorded items"
        return ok("counts", line, vectors=expected, recorded=stored.provenance.count or expected)
    missing = stored.opened.count_missing()
    if stored.provenance.live:
        line = f"{expected:,} rows have a vector"
        if missing:
            line += f", and {missing:,} with a text have none"
        return judged("counts", missing > 0, line, vectors=expected, missing=missing)
    count = stored.opened.count_rows()
    line = f"{count:,} rows"
    if count != expected:
        line = f"{count:,} rows are stored, and {expected:,} were pushed"
    if missing:
        line += f"; {missing:,} with a text have no vector"
    is_alarm = count != expected or missing > 0
    return judged("counts", is_alarm, line, vectors=count, recorded=expected)


def _ids(stored: Stored) -> Finding:
    """Return an alarm if an id occurs twice."""
    ids = stored.ids.strings if isinstance(stored.ids, Ids) else pa.chunked_array([stored.ids])
    twice = len(ids) - pc.count_distinct(ids).as_py()
    if not twice:
        return ok("ids", f"{len(ids):,} different ids", ids=len(ids), repeated=0)
    counts = pc.value_counts(ids)
    repeated = counts.filter(pc.greater(counts.field("counts"), 1))
    name = repeated.field("values")[0].as_py()
    line = f"{twice:,} of {len(ids):,} ids are repeated, such as {name[:40]!r}"
    return alarm("ids", line, ids=len(ids), repeated=twice)


def _texts(stored: Stored) -> Finding:
    """Return an alarm if a text is missing, or the texts or words are those of other items."""
    if stored.text_problem:
        return alarm("texts", stored.text_problem)
    if isinstance(stored.opened, Index) and has_lexical(stored.folder):
        try:
            Lexical.open(stored.folder, stored.opened.items_checksum)
        except DualencError as error:
            return alarm("texts", str(error))
    if stored.texts is None:
        return skipped("texts", "no texts are stored (dualenc index INDEX --texts)")
    if len(stored.texts) != len(stored.ids):
        line = f"{len(stored.ids):,} ids, and {len(stored.texts):,} texts"
        return alarm("texts", line, ids=len(stored.ids), texts=len(stored.texts))
    own = stored.texts
    texts = own.strings if isinstance(own, Texts) else pa.chunked_array([own])
    blank = pc.match_substring_regex(texts, BLANK)
    count = pc.sum(blank).as_py() or 0
    if not count:
        return ok("texts", f"{len(texts):,} texts, none is blank", texts=len(texts), blank=0)
    first = stored.ids[pc.index(blank, True).as_py()]
    line = f"{count:,} of {len(texts):,} ids have no text, such as {first[:40]!r}"
    return alarm("texts", line, texts=len(texts), blank=count)
