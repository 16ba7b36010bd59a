"""A sink that publishes to a NATS JetStream stream, under the subjects `<stream>.<type>`."""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import nats
from nats.aio.client import Client
from nats.errors import Error
from nats.js.api import DiscardPolicy, RetentionPolicy, StreamConfig
from nats.js.client import JetStreamContext
from nats.js.errors import NotFoundError

from tasks.relay import cloudevents
from tasks.relay.sinks.sink import PublishedEvent, SinkUnavailable

T = TypeVar("T")

_TIMEOUT_S = 4.0
_CONNECT_S = 2
_MAX_CONCURRENT_KEYS = 64  # keys whose events are published concurrently


class NatsSink:
    """A Sink.  The event's number is the message id, so NATS drops duplicates within its deduplication window."""

    retention = None

    def __init__(self, url: str, stream: str) -> None:
        self._url, self._stream = url, stream
        self._loop = asyncio.new_event_loop()
        self._client: Client | None = None
        self._context: JetStreamContext | None = None

    def resume_after(self, position: int) -> int:
        return position

    def publish(self, batch: Sequence[PublishedEvent]) -> None:
        by_key: dict[str, list[PublishedEvent]] = {}
        for event in batch:
            by_key.setdefault(event.key, []).append(event)
        try:
            self._run(self._send_all(list(by_key.values())))
        except (Error, OSError, TimeoutError) as error:
            self._disconnect()
            raise SinkUnavailable(str(error) or type(error).__name__) from error

    async def _send_all(self, groups: Sequence[Sequence[PublishedEvent]]) -> None:
        context, permits = await self._connect(), asyncio.Semaphore(_MAX_CONCURRENT_KEYS)
        async with asyncio.TaskGroup() as group:
            for events in groups:
                group.create_task(self._send(context, permits, events))

    async def _send(
        self, context: JetStreamContext, permits: asyncio.Semaphore, events: Sequence[PublishedEvent]
    ) -> None:
        """Publish the events of one key in order, each after NATS has stored the one before."""
        async with permits:
            for event in events:
                headers = {"Nats-Msg-Id": str(event.number), "Content-Type": cloudevents.CONTENT_TYPE}
                await context.publish(
                    f"{self._stream}.{event.type}", event.body.encode(), timeout=_TIMEOUT_S, headers=headers
                )

    async def _connect(self) -> JetStreamContext:
        if self._context is None:
            client = await nats.connect(self._url, connect_timeout=_CONNECT_S, allow_reconnect=False)
            self._client, context = client, client.jetstream(timeout=_TIMEOUT_S)
            try:
                await context.stream_info(self._stream)
            except NotFoundError:
                await context.add_stream(
                    StreamConfig(
                        name=self._stream,
                        subjects=[f"{self._stream}.>"],
                        retention=RetentionPolicy.LIMITS,
                        discard=DiscardPolicy.OLD,
                    )
                )
            self._context = context
        return self._context

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, and return its result.  Raises its exception; of an exception group, the first one."""
        try:
            return self._loop.run_until_complete(asyncio.wait_for(coroutine, _TIMEOUT_S))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group

    def _disconnect(self) -> None:
        client, self._client, self._context = self._client, None, None
        if client is not None:
            with suppress(Error, OSError, TimeoutError):
                self._run(client.close())

    def close(self) -> None:
        self._disconnect()
        self._loop.close()
