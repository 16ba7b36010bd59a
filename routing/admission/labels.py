"""Labels: names and texts that a client gives its jobs, to find them again.

They are stored as text, `\\n<name>=<value>\\n…\\n`, sorted by name.  Triggers of the database store each line as a
row of `job_labels`, which lists of jobs with a label read.
"""

import re
from collections.abc import Mapping
from typing import Any

from slotkeeper.errors import InvalidJob

LABEL_PATTERN = "[A-Za-z0-9][A-Za-z0-9_./-]{0,62}"
_NAME = re.compile(LABEL_PATTERN)
MAX_LABELS, MAX_LABEL_LENGTH = 20, 128


def encode_labels(labels: Mapping[str, Any] | None) -> str:
    """Return labels as text; "" for none.  Raises InvalidJob."""
    if not labels:
        if labels is None or isinstance(labels, Mapping):
            return ""
        raise InvalidJob("labels", "labels must be an object of names and texts")
    if not isinstance(labels, Mapping) or len(labels) > MAX_LABELS:
        raise InvalidJob("labels", f"labels must be an object of at most {MAX_LABELS} names")
    return "\n" + "".join(f"{label_text(name, labels[name])}\n" for name in sorted(labels))


def decode_labels(text: str) -> dict[str, str]:
    """Return the labels of a text."""
    return dict(line.split("=", 1) for line in text.strip("\n").split("\n") if line)


def label_text(name: Any, value: Any) -> str:
    """Return a label as it is stored, `<name>=<value>`.  Raises InvalidJob."""
    return f"{check_label_name(name)}={_value(name, value)}"


def check_label_name(name: Any) -> str:
    """Return the name.  Raises InvalidJob unless it can be the name of a label."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidJob(
            "labels", "labels: a name is 1 to 63 letters, digits or _ . / - and begins with a letter or digit"
        )
    return name


def _value(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_LABEL_LENGTH or not (value == "" or value.isprintable()):
        raise InvalidJob(
            "labels", f"labels.{name}: a value is a text of at most {MAX_LABEL_LENGTH} printable characters"
        )
    return value
