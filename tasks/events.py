"""What Celery tells Flower and others, task by task: events, which are many and shall cost little."""

import time
from collections.abc import Callable, Collection
from typing import Any

import orjson
from celery.app.events import Events as CelerysEvents
from celery.events.dispatcher import EventDispatcher
from celery.utils.time import utcoffset

_OFFSET_S = 1.0
_AS_CELERY = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_SUBCLASS


class Dispatcher(EventDispatcher):
    """Makes the events that are sent in bundles at once, and writes a bundle as JSON in a tenth of the time."""

    _group_buffer: dict[str, list[dict[str, Any]]]
    buffer_group: Collection[str]
    buffer_limit: int
    clock: Any
    on_send_buffered: Callable[[], object] | None
    pid: int
    serializer: str

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._offset, self._offset_until = 0.0, 0.0

    def send(self, type: str, blind: bool = False, **fields: Any) -> None:  # type: ignore[override]
        group = type.partition("-")[0]
        if group not in self.buffer_group or not self.enabled or (self.groups and group not in self.groups):
            super().send(type, blind=blind, **fields)
            return
        now = time.time()
        if not 0 <= self._offset_until - now <= _OFFSET_S:  # To ask for it costs as much as all the rest.
            self._offset, self._offset_until = utcoffset(), now + _OFFSET_S
        fields["type"], fields["timestamp"] = type, now
        fields["hostname"], fields["pid"] = self.hostname, self.pid
        fields["utcoffset"], fields["clock"] = self._offset, self.clock.forward()
        buffer = self._group_buffer[group]
        buffer.append(fields)
        if len(buffer) >= self.buffer_limit:
            self.flush()
        elif self.on_send_buffered:
            self.on_send_buffered()

    def _publish(self, event: Any, producer: Any, routing_key: str, **options: Any) -> Any:
        text = _written(event) if isinstance(event, list) and self.serializer == "json" else None
        through = producer if text is None or producer is None else _Written(producer, text)
        return super()._publish(event, through, routing_key, **options)  # type: ignore[misc]


class _Written:
    """A producer for what is written as JSON already."""

    def __init__(self, producer: Any, text: bytes) -> None:
        self._producer, self._text = producer, text

    def publish(self, _: Any, **options: Any) -> Any:
        return self._producer.publish(self._text, content_type="application/json", content_encoding="utf-8", **options)


def _written(events: list[Any]) -> bytes | None:
    """As JSON; None: there is something in it that only Celery's own way can write, as numbers of a hundred digits."""
    try:
        return orjson.dumps(events, option=_AS_CELERY)
    except TypeError:
        return None


class Events(CelerysEvents):
    dispatcher_cls = "tasks.events:Dispatcher"
