"""A background task whose thread cannot be started."""

import threading

from tasks.threads import BackgroundTask
from tests.support.threads import no_thread_left


def test_a_background_task_whose_thread_could_not_start_runs_at_the_next_request() -> None:
    done = threading.Event()
    task = BackgroundTask("work", done.set)
    with no_thread_left():
        task.request()  # It raises no error, because the heartbeat calls it.
    assert not done.is_set()
    task.request()
    assert done.wait(10)
