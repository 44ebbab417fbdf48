"""Columns of any table of texts and vectors: found by their types, or named by the user."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from dualenc.errors import DualencError, nearest
from dualenc.search.engines.column_names import TableColumnNames
from dualenc.search.engines.postgres_names import check_name
from dualenc.search.engines.postgres_table import PostgresTable, parse_comment
from dualenc.search.where import Kind

TEXT_TYPES = ("text", "varchar", "bpchar")
ID_TYPES = ("int2", "int4", "int8", "uuid", "text", "varchar")
VECTOR_TYPES = ("vector", "halfvec")
KINDS: dict[str, Kind] = {
    **dict.fromkeys(TEXT_TYPES, "text"),
    **dict.fromkeys(("int2", "int4", "int8"), "integer"),
    **dict.fromkeys(("float4", "float8"), "number"),
    "bool": "truth",
}
"""Kind of the columns that conditions may name, by type."""


class Column(NamedTuple):
    """A column of a table in the database.

    Attributes:
        name: its name.
        number: its number in the table, which stays when it is renamed.
        type: name of its type without modifiers, such as "text" or "vector".
        dim: dimension of a column of vectors; −1 if it has none.
        is_required: whether it is NOT NULL.
        is_unique: whether a unique index covers this column alone.
        is_key: whether it is the primary key.
    """

    name: str
    number: int
    type: str
    dim: int
    is_required: bool
    is_unique: bool
    is_key: bool


class TableColumns(NamedTuple):
    """The columns of a table.

        columns = find_columns(table, TableColumnNames(vector="embedding"), own=[])
        print(columns.text.name)

    Attributes:
        id: unique and never NULL.
        text: the texts.
        vector: vectors, of type `vector` or `halfvec`.
        kinds: kinds of the columns that conditions may name.
    """

    id: Column
    text: Column
    vector: Column
    kinds: dict[str, Kind]


def read_columns(table: PostgresTable) -> list[Column]:
    """Return the columns of a table in their order."""
    query = """
        SELECT attname, attnum, typname, atttypmod, attnotnull,
        EXISTS (
            SELECT FROM pg_index WHERE indrelid = attrelid AND indisunique AND indisvalid
            AND indnkeyatts = 1 AND indkey[0] = attnum AND indpred IS NULL
        ),
        EXISTS (
            SELECT FROM pg_index WHERE indrelid = attrelid AND indisprimary
            AND indnkeyatts = 1 AND indkey[0] = attnum
        )
        FROM pg_attribute JOIN pg_type t ON t.oid = atttypid
        WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum
    """
    return [Column(*row) for row in table.database.run(query, values=[table.quoted])]


def find_columns(
    table: PostgresTable,
    names: TableColumnNames,
    own: Sequence[str],
    *,
    needs_text: bool = True,
    filtered: Collection[str] = (),
) -> TableColumns:
    """Find the columns of ids, texts and vectors.

    Args:
        table: any table.
        names: names of the columns. Without a name the id is the primary key, or the only unique
            column, and the others are the only ones of their types.
        own: columns that an earlier migration has added.
        needs_text: whether a table without texts is refused; else its ids stand for them.
        filtered: columns that conditions name, which hold the texts only if `names` says so.

    Raises:
        DualencError: a column is missing, of another type, or one of several that would fit.
    """
    columns = [column for column in read_columns(table) if column.name not in own]
    vectors = [c for c in columns if c.type in VECTOR_TYPES]
    ids = [c for c in columns if c.is_unique and c.is_required and c.type in ID_TYPES]
    keys = [c for c in ids if c.is_key]
    found_id = _choose(table, "--id", names.id, ids, columns, preferred=keys)
    texts = [c for c in columns if c.type in TEXT_TYPES]
    if not names.text:
        texts = [c for c in texts if c != found_id and c.name not in filtered]
    if not texts and not needs_text and names.text in (None, found_id.name):
        texts = [found_id]
    found = TableColumns(
        found_id,
        _choose(table, "--text", names.text, texts, columns),
        _choose(table, "--vector", names.vector, vectors, columns),
        {c.name: KINDS[c.type] for c in columns if c.type in KINDS},
    )
    for column in found[:3]:
        check_name(column.name)
    return found


_NEEDED = {
    "--id": "a unique column that is never NULL, of integers, uuids or texts",
    "--text": "a column of texts",
    "--vector": "a column of type vector or halfvec",
}


def _choose(
    table: PostgresTable,
    option: str,
    name: str | None,
    candidates: Sequence[Column],
    columns: Sequence[Column],
    preferred: Sequence[Column] = (),
) -> Column:
    """Return the named candidate, or the only one."""
    where = table.database.location
    if name is not None:
        for column in candidates:
            if column.name == name:
                return column
        names = [column.name for column in columns]
        problem = f"{name!r} is not {_NEEDED[option]}"
        if name not in names:
            problem = f"there is no column {name!r}{nearest(name, names)}"
        fitting = ", ".join(column.name for column in candidates) or "none"
        raise DualencError(problem, fix=f"{option} can be: {fitting}", where=where)
    chosen = preferred or candidates
    if len(chosen) == 1:
        return chosen[0]
    if not chosen:
        raise DualencError(f"has not {_NEEDED[option]}", fix=f"add it ({option})", where=where)
    names = [column.name for column in chosen]
    raise DualencError(
        f"{' and '.join(names)} could be {option}", fix=f"name it: {option} {names[0]}", where=where
    )


def check_table(table: PostgresTable, *, is_pushed: bool) -> None:
    """Raise unless the user can add columns to a table and sees all its rows.

    Args:
        table: any table.
        is_pushed: whether it must have been pushed by dualenc; other tables must not.

    Raises:
        DualencError: it is not a plain table, is filtered by row security, or belongs to another
            role.
    """
    query = """
        SELECT relkind, row_security_active(oid), pg_has_role(relowner, 'USAGE'),
        has_schema_privilege(relnamespace, 'CREATE'),
        EXISTS (SELECT FROM pg_inherits WHERE oid IN (inhparent, inhrelid)),
        obj_description(oid, 'pg_class')
        FROM pg_class WHERE oid = %s::regclass
    """
    [row] = table.database.run(query, values=[table.quoted])
    kind, is_filtered, is_owned, may_create, is_part, comment = row
    problems = {
        "is not a plain table": (kind != "r" or is_part, "migrate a table without partitions"),
        "belongs to another role": (not is_owned, "connect as its owner"),
        "its schema takes no new table of this user": (
            not may_create,
            f"GRANT CREATE ON SCHEMA {table.schema}",
        ),
        "row security hides rows from this user": (
            is_filtered,
            "connect as a role that bypasses it",
        ),
        # Its texts are cut, and its folder records the model.
        "was filled by `dualenc push`": (
            parse_comment(comment) is not None and not is_pushed,
            "name the folder that it wrote: dualenc migrate FOLDER NEW_MODEL",
        ),
        "was not filled by `dualenc push`": (
            parse_comment(comment) is None and is_pushed,
            "name the database and --table",
        ),
    }
    for problem, (is_true, remedy) in problems.items():
        if is_true:
            raise DualencError(problem, fix=remedy, where=table.database.location)


def check_unread(table: PostgresTable, column: Column) -> None:
    """Raise if views, generated columns or constraints read a column."""
    # They refer to the column by its number, and would follow it when it is renamed.
    query = """
        SELECT DISTINCT pg_describe_object(d.classid, d.objid, d.objsubid) FROM pg_depend d
        LEFT JOIN pg_class c ON d.classid = 'pg_class'::regclass AND c.oid = d.objid
        LEFT JOIN pg_constraint n ON d.classid = 'pg_constraint'::regclass AND n.oid = d.objid
        WHERE d.refclassid = 'pg_class'::regclass AND d.refobjid = %s::regclass
        AND d.refobjsubid = %s AND coalesce(c.relkind, '') <> 'i' AND coalesce(n.contype, '') <> 'n'
        ORDER BY 1
    """
    rows = table.database.run(query, values=[table.quoted, column.number]).fetchall()
    if others := ", ".join(description for (description,) in rows):
        raise DualencError(
            f"{others[:200]} would keep the old vectors",
            fix="drop it, and create it again after the migration",
            where=table.database.location,
        )


def row_triggers(table: PostgresTable) -> list[str]:
    """Return the names of triggers that run whenever any column of a row is updated."""
    # Bit 4 of tgtype is UPDATE.
    query = """
        SELECT tgname FROM pg_trigger WHERE tgrelid = %s::regclass AND NOT tgisinternal
        AND tgenabled <> 'D' AND tgtype & 16 <> 0 AND cardinality(tgattr::int2[]) = 0 ORDER BY 1
    """
    return [name for (name,) in table.database.run(query, values=[table.quoted])]
