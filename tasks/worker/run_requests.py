"""The details of one run: what its requests are made of, and how long they may take."""

import time
from typing import Any

import orjson

from routing.queries.trace_spans import ATTEMPT
from slotkeeper import json_text
from slotkeeper.clock import now_ms
from slotkeeper.jobs.terms import decode_terms
from slotkeeper.jobs.values import Run
from slotkeeper.registry.model_config import ModelConfig
from tasks import server_push, tracing
from tasks.servers import RunDetails
from tasks.servers.description import Description

_LISTEN_S = 600.0  # For so long, at most, the end of a request that was given up is observed.
_POLL_DEADLINE_S = 30.0  # of each question about the run and of its cancel, whatever is left of the run's own time


class RunRequests:
    """Makes the details of a run that its requests contain, and counts its longest time.

    model_version: as the server was registered for it.  changes_model: the server's last job was of another model.
    """

    def __init__(
        self,
        run: Run,
        config: ModelConfig,
        description: Description,
        model_version: str = "",
        changes_model: bool = True,
    ) -> None:
        self.run, self.config, self._description = run, config, description
        self._model_version, self._changes_model = model_version, changes_model
        self._poll_details: RunDetails | None = None
        self._ends_s, self._ends_by_deadline = 0.0, False  # monotonic; whether that is the job's own deadline
        self.count_time_from(run.sent_ms or run.started_ms)

    def count_time_from(self, began_ms: int) -> None:
        """Count the run's longest time from this moment, up to the job's own deadline."""
        longest_ms = began_ms + self.config.max_poll_time * 1000
        deadline_ms = longest_ms if self.run.deadline_ms is None else self.run.deadline_ms
        self._ends_by_deadline = deadline_ms < longest_ms
        self._ends_s = time.monotonic() + max(min(longest_ms, deadline_ms) - now_ms(), 0) / 1000

    @property
    def left_s(self) -> float:
        """What is left of the run's longest time; negative: it is over."""
        return self._ends_s - time.monotonic()

    @property
    def is_overdue(self) -> bool:
        """Whether the job's own deadline has passed.

        By the clock, or by the time that was left when it was last counted: the clock is an estimate, which may have
        moved back a little since, and it says nothing of a run under which it was set.
        """
        return self.run.is_overdue(now_ms()) or (self._ends_by_deadline and self.left_s <= 0)

    @property
    def poll_details(self) -> RunDetails:
        """The details for all questions about the run, and for its cancel.  Most runs need none."""
        if self._poll_details is None:
            payload = self.payload if self._description.asks_by_payload else None
            self._poll_details = self._make_details(payload, _POLL_DEADLINE_S)
        return self._poll_details

    def make_submit_details(self) -> RunDetails:
        """Make the details for the submit.  A run that is polled for hours does not keep its payload."""
        payload = orjson.Fragment(self.run.payload) if self._description.sends_payload_alone else self.payload
        return self._make_details(payload, max(self.left_s, 0.001), min(self.config.max_poll_time, _LISTEN_S))

    @property
    def payload(self) -> Any:
        return json_text.loads(self.run.payload)

    @property
    def ends_on_disconnect(self) -> bool:
        """Whether the server ends the run when its connection closes."""
        return self._description.ends_on_disconnect(self.payload)

    def _make_details(self, payload: Any, deadline_s: float, listen_s: float = 0.0) -> RunDetails:
        run = self.run
        return RunDetails(
            job_id=run.job.id,
            attempt=run.attempt,
            payload=payload,
            callback_url=server_push.push_url(run.job.id),
            callback_token=server_push.push_token(run.job.id, run.attempt),
            deadline_s=deadline_s,
            listen_s=listen_s,
            model=run.job.model,
            model_version=self._model_version,
            swap=self._changes_model,
            expected_output=decode_terms(run.terms).expected_output,
            traceparent=tracing.outgoing_traceparent(run.job.id, run.traceparent, ATTEMPT, run.attempt),
        )
