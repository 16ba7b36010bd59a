"""Responses as tables for spreadsheets, to requests with `Accept: text/csv`."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flask import Response, request

_CSV = "text/csv"


def wants_csv() -> bool:
    """Return whether the client of this request prefers a table to JSON."""
    return request.accept_mimetypes.best_match(["application/json", _CSV]) == _CSV


def csv_response(
    names: Sequence[str], rows: Iterable[Mapping[str, Any]], headers: Mapping[str, str] | None = None
) -> Response:
    """Return the rows as a table with a line of names."""
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return Response(text.getvalue(), content_type=f"{_CSV}; charset=utf-8", headers=headers)
