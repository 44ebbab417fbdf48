"""URLs of PostgreSQL databases: as libpq reads them, and without secrets for messages and files.

A URL may be one of SQLAlchemy or Django (`postgresql+psycopg://`, `postgres://`). The last @ before
the path ends the credentials, as in other URLs; libpq takes the first one, and the rest of the
password for the host.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple
from urllib.parse import unquote

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo

from dualenc.errors import DualencError

_PARTS = re.compile(
    r"(?P<scheme>[^:/]+)://(?P<authority>[^/?]*)(?P<path>[^?]*)(?:\?(?P<query>.*))?", re.S
)
_HOST = r"(?:\[[^\[\]]*\]|[^:\[\],]*)(?::\d*)?"
_HOSTS = re.compile(rf"{_HOST}(?:,{_HOST})*")
# libpq's own parameters that hold no secret, and the `ssl=true` of JDBC, which it understands.
_OPTIONS = Conninfo.get_defaults()
_KNOWN = {option.keyword.decode() for option in _OPTIONS} | {"ssl"}
_PLAIN = {option.keyword.decode() for option in _OPTIONS if not option.dispchar} | {"ssl"}


class _Url(NamedTuple):
    """The parts of a URL as they are written; `parameters` are those of the query."""

    scheme: str
    user: str
    password: str | None
    hosts: str
    path: str
    parameters: list[str]

    def written(self, scheme: str) -> str:
        """The URL with a scheme."""
        password = "" if self.password is None else f":{self.password}"
        user = f"{self.user}{password}@" if self.user or password else ""
        query = f"?{'&'.join(self.parameters)}" if self.parameters else ""
        return f"{scheme}://{user}{self.hosts}{self.path}{query}"


def libpq_url(target: str) -> str:
    """Return a URL that libpq reads as it was meant, with the password."""
    url = _parse(target).written("postgresql")
    try:
        conninfo_to_dict(url)
    except psycopg.Error:
        # libpq's message may hold a part of the password.
        raise _unreadable() from None
    return url


def without_secrets(target: str) -> str:
    """Return the URL as it was typed, without passwords, which libpq marks in its parameters."""
    url = _parse(target)
    plain = [part for part in url.parameters if _name(part) in _PLAIN]
    return url._replace(password=None, parameters=plain).written(url.scheme)


def connection_of(target: str) -> dict[str, Any]:
    """Return the parameters of a connection, which two ways to write a URL have in common."""
    return dict(conninfo_to_dict(libpq_url(without_secrets(target))))


def _parse(target: str) -> _Url:
    parts = _PARTS.fullmatch(target)
    if parts is None:
        raise _unreadable()
    credentials, _, hosts = parts["authority"].rpartition("@")
    # With an @ further on, a password is not written as a URL wants it: what is the host?
    if not _HOSTS.fullmatch(hosts) or "@" in parts["path"]:
        raise _unreadable()
    user, colon, password = credentials.replace("@", "%40").partition(":")
    parameters = [part for part in (parts["query"] or "").split("&") if part]
    unknown = [_name(part) for part in parameters if _name(part) not in _KNOWN]
    if unknown and "@" not in (parts["query"] or "") and all("=" in part for part in parameters):
        raise DualencError(
            f"TARGET has parameters that PostgreSQL does not know: {', '.join(unknown)[:80]}",
            fix="leave them out (libpq's name for ssl is sslmode)",
        )
    return _Url(
        parts["scheme"], user, password if colon else None, hosts, parts["path"], parameters
    )


def _name(parameter: str) -> str:
    return unquote(parameter.partition("=")[0])


def _unreadable() -> DualencError:
    return DualencError(
        "TARGET is not the URL of a PostgreSQL database",
        fix=(
            "write postgresql://user@host:5432/database, with /, ?, @ and % of a "
            "password as %2F, %3F, %40 and %25"
        ),
    )
