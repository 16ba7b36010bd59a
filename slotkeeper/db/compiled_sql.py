"""SQL that runs often: compiled once by SQLAlchemy, executed by the driver.

A job takes some six statements and two to three transactions.  One guarded UPDATE … RETURNING takes 27.8 µs by
`connection.execute(statement)`, 25.7 µs by `exec_driver_sql(text)`, and 8.8 µs here; together that is more than 10 %
of a job.  SQLAlchemy's statements stay the only source of tables, transitions and guards.  Errors are SQLAlchemy's, a
lost connection is invalidated, and listeners of the engine's events see these statements, too.
"""

from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, NoReturn, TypeAlias

from sqlalchemy import ColumnElement, Connection, Dialect, Table, bindparam, func
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.base import ReadOnlyColumnCollection
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import ClauseElement, ReturnsRows

Row: TypeAlias = Any  # a named tuple of the statement's columns
Values: TypeAlias = Mapping[str, Any]

_FEW_ROWS = 8
_MAX_ROWS = 64  # of one INSERT, whose text and parameters grow with them


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A statement in the SQL of one database."""

    text: str
    bind: Callable[[Values], Any]
    """Returns the parameters in the form that the driver takes."""
    make_row: Callable[[Sequence[Any]], Row]


class CompiledStatement:
    """One statement whose text never changes.  Its parameters are given by name; further names are ignored.

    All methods raise SQLAlchemy's errors.
    """

    def __init__(self, statement: ClauseElement, columns: Sequence[str] | None = None) -> None:
        """columns: of an INSERT, those that are given a value."""
        self._statement = statement
        self._columns = columns
        self._compiled: dict[str, _Compiled] = {}

    def fetch_all(self, connection: Connection, values: Values) -> list[Row]:
        """Execute it, and return all rows."""
        compiled = self._compile(connection.dialect)
        rows = execute_raw(connection, compiled.text, compiled.bind(values), _fetch_all)
        return [compiled.make_row(row) for row in rows]

    def fetch_first(self, connection: Connection, values: Values) -> Row | None:
        """Execute it, and return the first row."""
        rows = self.fetch_all(connection, values)
        return rows[0] if rows else None

    def fetch_value(self, connection: Connection, values: Values) -> Any:
        """Execute it, and return the first value of the first row; None if there is no row."""
        row = self.fetch_first(connection, values)
        return None if row is None else row[0]

    def execute(self, connection: Connection, values: Values) -> int:
        """Execute it, and return how many rows it changed."""
        compiled = self._compile(connection.dialect)
        return int(execute_raw(connection, compiled.text, compiled.bind(values), _row_count))

    def _compile(self, dialect: Dialect) -> _Compiled:
        found = self._compiled.get(dialect.name)
        if found is None:
            compiled = _compile(self._statement, dialect, self._columns)
            row: Any = namedtuple("Row", _columns_of(self._statement).keys(), rename=True)  # type: ignore[misc]
            found = self._compiled[dialect.name] = _Compiled(compiled.string, _make_binder(compiled), row._make)
        return found


class BulkInsert:
    """An INSERT of any number of rows, in their order, in few statements."""

    def __init__(
        self,
        table: Table,
        *,
        unique: Sequence[str] = (),
        returning: Sequence[ColumnElement[Any]] = (),
        is_witness: bool = False,
    ) -> None:
        """unique: a row whose values of these columns are in the table already is left out.

        returning: columns of each inserted row.
        is_witness: only one transaction writes such a row, so that it proves the commit (commit_outcome.py).
        """
        self.table = table
        self.is_witness = is_witness
        self._unique = unique
        self._returning = returning
        self._statements: dict[tuple[str, tuple[str, ...], int], tuple[CompiledStatement, list[str]]] = {}

    def execute(self, connection: Connection, rows: Sequence[Values]) -> list[Row]:
        """Insert rows that all have the same columns, and return `returning` of those that were inserted.

        A witness returns the transaction's number instead (PostgreSQL).
        """
        names = tuple(rows[0])
        pick = itemgetter(*names) if len(names) > 1 else lambda row: (row[names[0]],)
        found: list[Row] = []
        for part in _portions(rows):
            statement, parameters = self._statement(connection.dialect.name, names, len(part))
            values = dict(zip(parameters, chain.from_iterable(map(pick, part)), strict=True))
            if self._returns(connection.dialect.name):
                found += statement.fetch_all(connection, values)
            else:
                statement.execute(connection, values)
        return found

    def _returns(self, dialect: str) -> Sequence[ColumnElement[Any]]:
        return [func.txid_current()] if self.is_witness and dialect == "postgresql" else self._returning

    def _statement(self, dialect: str, names: tuple[str, ...], number: int) -> tuple[CompiledStatement, list[str]]:
        """Return the statement for `number` rows, and the names of its parameters, row by row."""
        key = dialect, names, number
        found = self._statements.get(key)
        if found is None:
            insert: Any = (sqlite if dialect == "sqlite" else postgresql).insert(self.table).inline()
            rows = [
                {name: bindparam(f"{name}_{n}", type_=self.table.c[name].type) for name in names} for n in range(number)
            ]
            insert = insert.values(rows)
            if self._unique:
                insert = insert.on_conflict_do_nothing(index_elements=self._unique)
            if returning := self._returns(dialect):
                insert = insert.returning(*returning)
            parameters = [f"{name}_{n}" for n in range(number) for name in names]
            found = self._statements[key] = (CompiledStatement(insert), parameters)
        return found


def _portions(rows: Sequence[Values]) -> Iterator[Sequence[Values]]:
    """All rows at once if they are few, else in powers of two, so that few statements are enough for any number."""
    done = 0
    while left := len(rows) - done:
        size = left if left <= _FEW_ROWS else min(_MAX_ROWS, 1 << (left.bit_length() - 1))
        yield rows[done : done + size]
        done += size


def commit(connection: Connection) -> None:
    """Commit what was begun on a connection.  If it raises, the outcome is not known."""
    if connection.in_transaction():  # SQLAlchemy executed a statement, too, and keeps a transaction.
        connection.commit()
        return
    for listener in connection.engine.dispatch.commit:
        listener(connection)
    connection.dialect.do_commit(connection.connection.dbapi_connection)  # type: ignore[arg-type]


def roll_back(connection: Connection) -> None:
    """Roll back what was begun on a connection, unless the connection is lost."""
    if not connection.invalidated:
        if not connection.in_transaction():
            connection.begin()  # SQLAlchemy's own, so that it rolls it back.
        connection.rollback()


def execute_text(connection: Connection, text: str) -> None:
    """Execute a statement without parameters and without a result."""
    execute_raw(connection, text, (), _nothing)


def execute_raw(connection: Connection, text: str, parameters: Any, read: Callable[[Any], Any]) -> Any:
    """Have the driver execute a statement, and return what `read` makes of its cursor.  Raises SQLAlchemy's errors."""
    raw = connection.connection.dbapi_connection
    assert raw is not None
    for listener in connection.engine.dispatch.before_cursor_execute:
        listener(connection, None, text, parameters, None, False)
    cursor = None
    try:
        cursor = raw.cursor()
        cursor.execute(text, parameters)
        return read(cursor)
    except BaseException as error:
        if cursor is not None:
            # Otherwise SQLite's transaction would last as long as the error, whose traceback holds the cursor.
            cursor.close()
        _raise_as_sqlalchemy(connection, text, error)


def _raise_as_sqlalchemy(connection: Connection, text: str, error: BaseException) -> NoReturn:
    """Raise an error as SQLAlchemy does.  A connection that cannot be used any more is invalidated."""
    dialect = connection.dialect
    driver_error = dialect.loaded_dbapi.Error
    lost = not isinstance(error, Exception)  # Ctrl-C came between the statement and its result.
    if isinstance(error, driver_error):
        lost = dialect.is_disconnect(error, connection.connection.dbapi_connection, None)
    if lost:
        connection.invalidate(error)
    if not isinstance(error, driver_error):
        raise error
    hidden = connection.engine.hide_parameters
    raise DBAPIError.instance(
        text, None, error, driver_error, hide_parameters=hidden, connection_invalidated=lost, dialect=dialect
    ) from error


def _compile(statement: ClauseElement, dialect: Dialect, columns: Sequence[str] | None) -> SQLCompiler:
    """Raises TypeError if SQLAlchemy would have to convert a parameter or a result."""
    compiled = statement.compile(dialect=dialect, column_keys=None if columns is None else list(columns))
    assert isinstance(compiled, SQLCompiler)
    binds = (bind.type.dialect_impl(dialect).bind_processor(dialect) for bind in compiled.binds.values())
    results = (column.type.dialect_impl(dialect).result_processor(dialect, None) for column in _columns_of(statement))
    if any(binds) or any(results) or compiled.post_compile_params:
        raise TypeError(f"it cannot be compiled once: {compiled.string}")
    return compiled


def _columns_of(statement: ClauseElement) -> ReadOnlyColumnCollection[str, Any]:
    """Return the columns of the rows that a statement returns."""
    assert isinstance(statement, ReturnsRows)
    return statement.exported_columns


def _make_binder(compiled: SQLCompiler) -> Callable[[Values], Any]:
    """Return a function that makes the driver's parameters of given values and of those that the statement holds."""
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


def _nothing(_: Any) -> None:
    return None
