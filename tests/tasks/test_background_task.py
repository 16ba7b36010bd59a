"""Work that is done aside."""

import threading

from tasks.threads import BackgroundTask
from tests.support.threads import no_thread_left


def test_work_for_which_no_thread_could_be_had_is_done_when_it_is_asked_for_again() -> None:
    done = threading.Event()
    work = BackgroundTask("work", done.set)
    with no_thread_left():
        work.request()  # Nothing is raised: it is the heartbeat that asks.
    assert not done.is_set()
    work.request()
    assert done.wait(10)
