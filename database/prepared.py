"""Statements that are said again and again: compiled once, and run by the database's driver.

SQLAlchemy's statements stay the only source, of tables, transitions and guards; what it does at each execution is
spared.  Errors are SQLAlchemy's all the same, a connection that was lost is known to be lost, and whoever listens to
the engine's statements hears these, too.
"""

from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NoReturn, TypeAlias

from sqlalchemy import Connection, Dialect, Table
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import ClauseElement

Row: TypeAlias = Any  # a named tuple of the statement's columns
Values: TypeAlias = Mapping[str, Any]

_MOST_ROWS = 64  # in one statement of SQLite's, whose text and parameters grow with them


@dataclass(frozen=True, slots=True)
class _Said:
    """A statement in the words of one database."""

    text: str
    bound: Callable[[Values], Any]
    """Its parameters as the driver takes them."""
    row: Callable[[Sequence[Any]], Row]


class Prepared:
    """One statement whose text never changes; its parameters are given by their names."""

    def __init__(self, statement: ClauseElement, columns: Sequence[str] | None = None) -> None:
        """`columns`: of an INSERT, those that are given a value."""
        self._statement = statement
        self._columns = columns
        self._said: dict[str, _Said] = {}

    def all(self, connection: Connection, values: Values) -> list[Row]:
        """The rows that it answers.  Raises what SQLAlchemy raises, as the others do."""
        said = self._said_on(connection.dialect)
        return [said.row(it) for it in run(connection, said.text, said.bound(values), _fetch_all)]

    def first(self, connection: Connection, values: Values) -> Row | None:
        """The first of them."""
        rows = self.all(connection, values)
        return rows[0] if rows else None

    def scalar(self, connection: Connection, values: Values) -> Any:
        """The first value of the first row; None: there is none."""
        row = self.first(connection, values)
        return None if row is None else row[0]

    def count(self, connection: Connection, values: Values) -> int:
        """How many rows it has changed."""
        said = self._said_on(connection.dialect)
        return int(run(connection, said.text, said.bound(values), _row_count))

    def _said_on(self, dialect: Dialect) -> _Said:
        said = self._said.get(dialect.name)
        if said is None:
            compiled = _compiled(self._statement, dialect, self._columns)
            columns = [str(column.keyname) for column in compiled._result_columns]
            row: Any = namedtuple("Row", columns, rename=True)  # type: ignore[misc]
            said = _Said(compiled.string, _binder(compiled), row._make)
            self._said[dialect.name] = said
        return said


class Rows:
    """An INSERT of any number of rows, in their order, by few statements."""

    def __init__(
        self, table: Table, *, is_witness: bool = False, unless: str = "false", once: str = "", answers: str = ""
    ) -> None:
        """`is_witness`: nobody else writes such a row, so its transaction can be known by it (database/fate.py).

        `unless`: the condition, of a row called `given`, under which it is left out.  `once`: the column of which no
        value is written that is there already.  `answers`: the columns that are answered of each row that was written.
        """
        self.table = table
        self.is_witness = is_witness
        self._unless = unless
        self._once = f" ON CONFLICT ({once}) DO NOTHING" if once else ""
        self._answers = answers
        self._texts: dict[tuple[str, tuple[str, ...], int], str] = {}

    def write(self, connection: Connection, rows: Sequence[Values]) -> list[Any]:
        """Insert rows that all name the same columns.  Of a witness PostgreSQL answers the transaction's number."""
        dialect, names = connection.dialect, tuple(rows[0])
        if dialect.name != "sqlite":  # where one statement takes any number
            columns = {name: [row[name] for row in rows] for name in names}
            return run(connection, self._said(dialect, names, 0), columns, _fetch_any)
        answers: list[Any] = []
        for part in _portions(rows) if len(rows) > 1 else (rows,):
            values = [row[name] for row in part for name in names]
            answers += run(connection, self._said(dialect, names, len(part)), values, _fetch_any)
        return answers

    def _said(self, dialect: Dialect, names: tuple[str, ...], number: int) -> str:
        key = dialect.name, names, number
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = self._text(dialect, names, number)
        return text

    def _text(self, dialect: Dialect, names: Sequence[str], number: int) -> str:
        columns = [self.table.c[name].name for name in names]  # as the database names them
        named, answers, order = ", ".join(columns), self._answers, ""
        if dialect.name == "sqlite":
            first, others = ", ".join(f"? AS {name}" for name in columns), ", ".join("?" * len(columns))
            given = "(" + " UNION ALL SELECT ".join([f"SELECT {first}", *[others] * (number - 1)]) + ") AS given"
        else:
            arrays = ", ".join(f"%({name})s::{self.table.c[name].type.compile(dialect)}[]" for name in names)
            given, order = f"unnest({arrays}) WITH ORDINALITY AS given ({named}, nth)", " ORDER BY nth"
            answers = answers or ("txid_current()" if self.is_witness else "")
        return (
            f"INSERT INTO {self.table.name} ({named}) SELECT {named} FROM {given} WHERE NOT {self._unless}"
            f"{order}{self._once}{' RETURNING ' + answers if answers else ''}"
        )


def _portions(rows: Sequence[Values]) -> Iterator[Sequence[Values]]:
    """In powers of two, so that few statements are enough for any number."""
    done = 0
    while left := len(rows) - done:
        size = min(_MOST_ROWS, 1 << (left.bit_length() - 1))
        yield rows[done : done + size]
        done += size


def say(connection: Connection, text: str) -> None:
    """Run a statement without parameters or answer."""
    run(connection, text, (), _nothing)


def run(connection: Connection, text: str, values: Any, answer: Callable[[Any], Any]) -> Any:
    """Have the driver run a statement; answers what `answer` makes of its cursor.  Raises what SQLAlchemy raises."""
    raw = connection.connection.dbapi_connection
    assert raw is not None
    for listener in connection.engine.dispatch.before_cursor_execute:
        listener(connection, None, text, values, None, False)
    try:
        cursor = raw.cursor()
        cursor.execute(text, values)
        return answer(cursor)
    except BaseException as error:
        _fail(connection, text, error)


def _fail(connection: Connection, text: str, error: BaseException) -> NoReturn:
    """Raise it as SQLAlchemy does.  A connection that is of no use any more is given up."""
    dialect = connection.dialect
    ours = dialect.loaded_dbapi.Error
    lost = not isinstance(error, Exception)  # Ctrl-C or the like came in between
    if isinstance(error, ours):
        lost = dialect.is_disconnect(error, connection.connection.dbapi_connection, None)
    if lost:
        connection.invalidate(error)
    if not isinstance(error, ours):
        raise error
    hidden = connection.engine.hide_parameters
    raise DBAPIError.instance(
        text, None, error, ours, hide_parameters=hidden, connection_invalidated=lost, dialect=dialect
    ) from error


def _compiled(statement: ClauseElement, dialect: Dialect, columns: Sequence[str] | None) -> SQLCompiler:
    """Raises TypeError for values that SQLAlchemy would have to convert on their way in or out."""
    compiled = statement.compile(dialect=dialect, column_keys=None if columns is None else list(columns))
    assert isinstance(compiled, SQLCompiler)
    out = (column.type._cached_result_processor(dialect, None) for column in compiled._result_columns)
    if compiled._bind_processors or any(out) or compiled.post_compile_params:
        raise TypeError(f"it cannot be prepared: {compiled.string}")
    return compiled


def _binder(compiled: SQLCompiler) -> Callable[[Values], Any]:
    """Makes the driver's parameters of those that are given, and of those that stand in the statement."""
    binds = {compiled.bind_names[bind]: bind for bind in compiled.bind_names}
    fixed = {name: bind.effective_value for name, bind in binds.items() if not bind.required}
    if compiled.positiontup is None:
        wanted = [name for name in binds if name not in fixed]
        return lambda values: fixed | {name: values[name] for name in wanted}
    if len(compiled.positiontup) == 1:
        (only,) = compiled.positiontup
        return lambda values: (fixed[only] if only in fixed else values[only],)
    pick = itemgetter(*compiled.positiontup) if compiled.positiontup else lambda _: ()
    return (lambda values: pick({**fixed, **values})) if fixed else pick


def _fetch_all(cursor: Any) -> Any:
    return cursor.fetchall()


def _row_count(cursor: Any) -> Any:
    return cursor.rowcount


def _fetch_any(cursor: Any) -> Any:
    return cursor.fetchall() if cursor.description else []


def _nothing(_: Any) -> None:
    return None
