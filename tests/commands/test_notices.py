"""What modules log is printed once, on the stream that it belongs to, whatever a library set up."""

from __future__ import annotations

import logging

import pytest

from dualenc.commands.notices import printed_notices


def test_warnings_of_all_modules_are_printed_once_without_a_prefix(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with printed_notices():
        # As open_clip and others do: its lines would start with WARNING:dualenc.data.
        logging.basicConfig()
        logging.getLogger("dualenc.data").warning("skipped\x1b %d rows", 2)
        logging.getLogger("dualenc.data").info("nobody needs this")
        logging.getLogger("dualenc.workflows").info("tested as a whole")
        logging.getLogger("dualenc.training").info("step 0")
    printed = capsys.readouterr()
    assert printed.err.splitlines() == ["skipped\\x1b 2 rows", "step 0"]
    assert printed.out.splitlines() == ["tested as a whole"]


def test_loggers_are_left_as_they_were() -> None:
    names = ("", "dualenc.workflows", "dualenc.training")
    loggers = [logging.getLogger(name) for name in names]

    def state() -> list[tuple[int, bool, int]]:
        return [(each.level, each.propagate, len(each.handlers)) for each in loggers]

    before = state()
    with pytest.raises(KeyError), printed_notices():
        assert state() != before
        raise KeyError
    assert state() == before
