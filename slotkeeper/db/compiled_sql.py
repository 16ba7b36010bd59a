"""Statements that are said again and again: compiled once, and run by the database's driver.

SQLAlchemy's statements stay the only source, of tables, transitions and guards; what it does at each execution is
spared.  Errors are SQLAlchemy's all the same, a connection that was lost is known to be lost, and whoever listens to
the engine's statements hears these, too.
"""

from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, NoReturn, TypeAlias

from sqlalchemy import BindParameter, Connection, Dialect, Table, column, table
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.base import ReadOnlyColumnCollection
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.dml import ReturningUpdate
from sqlalchemy.sql.expression import ClauseElement, ReturnsRows
from sqlalchemy.sql.visitors import replacement_traverse

Row: TypeAlias = Any  # a named tuple of the statement's columns
Values: TypeAlias = Mapping[str, Any]

_FEW_ROWS = 8
_MOST_ROWS = 64  # in one statement of SQLite's, whose text and parameters grow with them


@dataclass(frozen=True, slots=True)
class _Said:
    """A statement in the words of one database."""

    text: str
    bound: Callable[[Values], Any]
    """Its parameters as the driver takes them."""
    row: Callable[[Sequence[Any]], Row]


class CompiledStatement:
    """One statement whose text never changes; its parameters are given by their names."""

    def __init__(self, statement: ClauseElement, columns: Sequence[str] | None = None) -> None:
        """`columns`: of an INSERT, those that are given a value."""
        self._statement = statement
        self._columns = columns
        self._said: dict[str, _Said] = {}

    def fetch_all(self, connection: Connection, values: Values) -> list[Row]:
        """The rows that it answers.  Raises what SQLAlchemy raises, as the others do."""
        said = self._said_on(connection.dialect)
        return [said.row(it) for it in run(connection, said.text, said.bound(values), _fetch_all)]

    def rows(self, dialect: Dialect, answered: Sequence[Any]) -> list[Row]:
        """What the driver has answered to a statement of the same columns."""
        return [self._said_on(dialect).row(it) for it in answered]

    def fetch_first(self, connection: Connection, values: Values) -> Row | None:
        """The first of them."""
        rows = self.fetch_all(connection, values)
        return rows[0] if rows else None

    def fetch_value(self, connection: Connection, values: Values) -> Any:
        """The first value of the first row; None: there is none."""
        row = self.fetch_first(connection, values)
        return None if row is None else row[0]

    def execute(self, connection: Connection, values: Values) -> int:
        """How many rows it has changed."""
        said = self._said_on(connection.dialect)
        return int(run(connection, said.text, said.bound(values), _row_count))

    def _said_on(self, dialect: Dialect) -> _Said:
        said = self._said.get(dialect.name)
        if said is None:
            compiled = _compiled(self._statement, dialect, self._columns)
            row: Any = namedtuple("Row", _columns_of(self._statement).keys(), rename=True)  # type: ignore[misc]
            said = _Said(compiled.string, _binder(compiled), row._make)
            self._said[dialect.name] = said
        return said


class BulkInsert:
    """An INSERT of any number of rows, in their order, by few statements."""

    def __init__(
        self, table: Table, *, is_witness: bool = False, unless: str = "false", once: str = "", answers: str = ""
    ) -> None:
        """`is_witness`: only this transaction writes such a row, which proves its commit (commit_outcome.py).

        `unless`: the condition, of a row called `given`, under which it is left out.  `once`: the column of which no
        value is written that is there already.  `answers`: the columns that are answered of each row that was written.
        """
        self.table = table
        self.is_witness = is_witness
        self._unless = unless
        self._once = f" ON CONFLICT ({once}) DO NOTHING" if once else ""
        self._answers = answers
        self._texts = _Texts(self._text)

    def execute(self, connection: Connection, rows: Sequence[Values]) -> list[Any]:
        """Insert rows that all name the same columns.  Of a witness PostgreSQL answers the transaction's number."""
        names = tuple(rows[0])
        return self._texts.run(connection, names, rows)

    def _text(self, dialect: Dialect, names: Sequence[str], number: int) -> str:
        named, answers = ", ".join(names), self._answers
        if dialect.name != "sqlite" and self.is_witness:
            answers = answers or "txid_current()"
        if dialect.name == "sqlite" and self._unless == "false":  # A table of rows to look through takes longer.
            row = f"({', '.join('?' * len(names))})"
            source = f"VALUES {', '.join([row] * number)}"
        else:
            given = {name: self.table.c[name].type for name in names}
            order = "" if dialect.name == "sqlite" else " ORDER BY nth"
            source = f"SELECT {named} FROM {_given(dialect, given, number)} WHERE NOT {self._unless}{order}"
        told = f" RETURNING {answers}" if answers else ""
        return f"INSERT INTO {self.table.name} ({named}) {source}{self._once}{told}"


class Each:
    """An UPDATE of one row, done to any number of rows by few statements, to each by parameters of its own."""

    def __init__(self, statement: ReturningUpdate[Any]) -> None:
        self._one = CompiledStatement(statement)
        self._statement = statement
        self._texts = _Texts(self._text)
        self._given: dict[str, dict[str, Any]] = {}

    def all(self, connection: Connection, values: Sequence[Values]) -> list[Row]:
        """The rows that it answers, in any order.  No two of `values` may find the same row."""
        if len(values) == 1:
            return self._one.fetch_all(connection, values[0])
        answers = self._texts.run(connection, tuple(self._given_on(connection.dialect)), values)
        return self._one.rows(connection.dialect, answers)

    def _text(self, dialect: Dialect, _: Sequence[str], number: int) -> str:
        given = self._given_on(dialect)
        rows = table("given", *[column(name, type_) for name, type_ in given.items()])

        def as_column(element: Any, **_: Any) -> Any:
            """Stands for a parameter where many rows have one of its name each."""
            is_given = isinstance(element, BindParameter) and element.required
            return rows.c[element.key] if is_given else None

        each: ClauseElement = replacement_traverse(self._statement, {}, as_column)  # type: ignore[assignment]
        update = each.compile(dialect=dialect, compile_kwargs={"literal_binds": True})
        return f"WITH given AS (SELECT * FROM {_given(dialect, given, number)}) {update}"

    def _given_on(self, dialect: Dialect) -> dict[str, Any]:
        """The types of the parameters by their names."""
        given = self._given.get(dialect.name)
        if given is None:
            binds = _compiled(self._statement, dialect, None).binds
            given = {name: bind.type for name, bind in binds.items() if bind.required}
            self._given[dialect.name] = given
        return given


def _given(dialect: Dialect, columns: Mapping[str, Any], number: int) -> str:
    """A table called `given` of `number` rows, in their order; 0: of any number, whose columns come as arrays.

    `columns`: their types by their names, which are also those of the parameters.
    """
    if dialect.name == "sqlite":
        first, others = ", ".join(f"? AS {name}" for name in columns), ", ".join("?" * len(columns))
        return "(" + " UNION ALL SELECT ".join([f"SELECT {first}", *[others] * (number - 1)]) + ") AS given"
    arrays = ", ".join(f"%({name})s::{type_.compile(dialect)}[]" for name, type_ in columns.items())
    return f"unnest({arrays}) WITH ORDINALITY AS given ({', '.join(columns)}, nth)"


class _Texts:
    """The texts of a statement for rows of values, each made once.

    `make`: makes it for a database, for values of these names, and for a number of rows, 0: for any.
    """

    def __init__(self, make: Callable[[Dialect, Sequence[str], int], str]) -> None:
        self._make = make
        self._made: dict[tuple[str, tuple[str, ...], int], str] = {}

    def run(self, connection: Connection, names: tuple[str, ...], rows: Sequence[Values]) -> list[Any]:
        """Run it for these rows, in few statements; answers what they answer."""
        dialect = connection.dialect
        if dialect.name != "sqlite":  # where one statement takes any number
            columns = {name: [row[name] for row in rows] for name in names}
            return run(connection, self._said(dialect, names, 0), columns, _fetch_any)
        pick = itemgetter(*names) if len(names) > 1 else lambda row: (row[names[0]],)
        answers: list[Any] = []
        if len(rows) == 1:
            answers += run(connection, self._said(dialect, names, 1), pick(rows[0]), _fetch_any)
            return answers
        for part in _portions(rows):
            values = tuple(chain.from_iterable(map(pick, part)))
            answers += run(connection, self._said(dialect, names, len(part)), values, _fetch_any)
        return answers

    def _said(self, dialect: Dialect, names: tuple[str, ...], number: int) -> str:
        key = dialect.name, names, number
        text = self._made.get(key)
        if text is None:
            text = self._made[key] = self._make(dialect, names, number)
        return text


def _portions(rows: Sequence[Values]) -> Iterator[Sequence[Values]]:
    """All at once where they are few, else in powers of two, so that few statements are enough for any number."""
    done = 0
    while left := len(rows) - done:
        size = left if left <= _FEW_ROWS else min(_MOST_ROWS, 1 << (left.bit_length() - 1))
        yield rows[done : done + size]
        done += size


def commit(connection: Connection) -> None:
    """Commit what was begun on a connection.  Raises: what came of it is not known."""
    if connection.in_transaction():  # SQLAlchemy has said something, too, and keeps a transaction of its own.
        connection.commit()
        return
    for listener in connection.engine.dispatch.commit:
        listener(connection)
    connection.dialect.do_commit(connection.connection.dbapi_connection)  # type: ignore[arg-type]


def undo(connection: Connection) -> None:
    """Undo what was begun on a connection, if that is not lost."""
    if not connection.invalidated:
        if not connection.in_transaction():
            connection.begin()  # SQLAlchemy's own, so that it undoes it.
        connection.rollback()


def say(connection: Connection, text: str) -> None:
    """Run a statement without parameters or answer."""
    run(connection, text, (), _nothing)


def run(connection: Connection, text: str, values: Any, answer: Callable[[Any], Any]) -> Any:
    """Have the driver run a statement; answers what `answer` makes of its cursor.  Raises what SQLAlchemy raises."""
    raw = connection.connection.dbapi_connection
    assert raw is not None
    for listener in connection.engine.dispatch.before_cursor_execute:
        listener(connection, None, text, values, None, False)
    cursor = None
    try:
        cursor = raw.cursor()
        cursor.execute(text, values)
        return answer(cursor)
    except BaseException as error:
        if cursor is not None:
            cursor.close()  # Or SQLite's transaction would last as long as the error, which has it in its traceback.
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
    given = (bind.type.dialect_impl(dialect).bind_processor(dialect) for bind in compiled.binds.values())
    out = (column.type.dialect_impl(dialect).result_processor(dialect, None) for column in _columns_of(statement))
    if any(given) or any(out) or compiled.post_compile_params:
        raise TypeError(f"it cannot be prepared: {compiled.string}")
    return compiled


def _columns_of(statement: ClauseElement) -> ReadOnlyColumnCollection[str, Any]:
    """Return the columns of the rows that a statement returns."""
    assert isinstance(statement, ReturnsRows)
    return statement.exported_columns


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
