"""URLs of PostgreSQL databases, in libpq's form to connect and without secrets for messages.

URLs in the form of SQLAlchemy or Django (`postgresql+psycopg://`, `postgres://`) are accepted. The
last @ before the path ends the credentials, as in other URLs; libpq would end them at the first one
and read the rest of the password as the host.
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
# libpq marks passwords and debug options by a nonempty `dispchar`. It also understands `ssl=true`
# as JDBC writes it, which it does not list.
_OPTIONS = Conninfo.get_defaults()
_KNOWN = {option.keyword.decode() for option in _OPTIONS} | {"ssl"}
_PLAIN = {option.keyword.decode() for option in _OPTIONS if not option.dispchar} | {"ssl"}


class _Url(NamedTuple):
    """The parts of a URL, still percent-encoded; `parameters` are those of the query."""

    scheme: str
    user: str
    password: str | None
    hosts: str
    path: str
    parameters: list[str]

    def written(self, scheme: str) -> str:
        """Return the URL with the given scheme."""
        password = "" if self.password is None else f":{self.password}"
        user = f"{self.user}{password}@" if self.user or password else ""
        query = f"?{'&'.join(self.parameters)}" if self.parameters else ""
        return f"{scheme}://{user}{self.hosts}{self.path}{query}"


def libpq_url(target: str) -> str:
    """Return the URL with its password, in a form that libpq parses as intended.

    Args:
        target: URL as typed.

    Raises:
        DualencError: it is not a URL of PostgreSQL, or has unknown parameters.
    """
    url = _parse(target).written("postgresql")
    try:
        conninfo_to_dict(url)
    except psycopg.Error:
        # Do not chain: libpq's message may contain a part of the password.
        raise _unreadable() from None
    return url


def without_secrets(target: str) -> str:
    """Return the URL as typed, without the password and other secret parameters."""
    url = _parse(target)
    plain = [part for part in url.parameters if _name(part) in _PLAIN]
    return url._replace(password=None, parameters=plain).written(url.scheme)


def connection_of(target: str) -> dict[str, Any]:
    """Return the connection parameters, which are equal for two spellings of the same URL."""
    return dict(conninfo_to_dict(libpq_url(without_secrets(target))))


def _parse(target: str) -> _Url:
    parts = _PARTS.fullmatch(target)
    if parts is None:
        raise _unreadable()
    credentials, _, hosts = parts["authority"].rpartition("@")
    # An @ after the host means an unescaped password with a slash, so the host is ambiguous.
    if not _HOSTS.fullmatch(hosts) or "@" in parts["path"]:
        raise _unreadable()
    user, colon, password = credentials.replace("@", "%40").partition(":")
    parameters = [part for part in (parts["query"] or "").split("&") if part]
    unknown = [_name(part) for part in parameters if _name(part) not in _KNOWN]
    # Only name parameters in the error if they cannot be a part of an unescaped password.
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
