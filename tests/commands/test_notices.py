"""What modules log is printed once, on the stream that it belongs to, whatever a library set up."""

from __future__ import annotations

import logging

import pytest

from dualenc.commands.notices import printed_notices


@pytest.mark.parametrize("has_root_handler", [False, True])
def test_warnings_of_all_modules_are_printed_once_without_a_prefix(
    has_root_handler: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """open_clip and others call `logging.basicConfig`, whose lines start with WARNING:dualenc…"""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    with printed_notices():
        if has_root_handler:
            logging.basicConfig()
        logging.getLogger("dualenc.data").warning("skipped\x1b %d rows", 2)
        logging.getLogger("dualenc.data").info("nobody needs this")
        logging.getLogger("dualenc.workflows").info("tested as a whole")
        logging.getLogger("dualenc.training").info("step 0")
        # A training prints its lines itself unless its own logger has a handler.
        assert logging.getLogger("dualenc.training").handlers
    printed = capsys.readouterr()
    assert printed.err.splitlines() == ["skipped\\x1b 2 rows", "step 0"]
    assert printed.out.splitlines() == ["tested as a whole"]


def test_loggers_are_left_as_they_were() -> None:
    names = ("dualenc", "dualenc.workflows", "dualenc.training")
    loggers = [logging.getLogger(name) for name in names]

    def state() -> list[tuple[int, bool, int]]:
        return [(each.level, each.propagate, len(each.handlers)) for each in loggers]

    before = state()
    with pytest.raises(KeyError), printed_notices():
        assert state() != before
        raise KeyError
    assert state() == before
