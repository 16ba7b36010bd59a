"""A run's task, as tests look at its end."""

from typing import Any

from tasks.shown import Shown


class Noted(Shown):
    """Notes with what it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[Any] = []

    def ended(self, with_: Any) -> None:
        self.ends.append(with_)
