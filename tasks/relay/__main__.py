"""The process `relay`: python -m tasks.relay."""

import signal
import threading

from slotkeeper.config import StorageSettings, exit_if_refused
from slotkeeper.db import Database
from slotkeeper.db.change_listener import ChangeListener
from slotkeeper.process import tune_garbage_collection
from tasks import startup
from tasks.config import EventSettings
from tasks.relay.relay import RelayThreads


def main() -> None:
    """Run the process until SIGTERM or SIGINT."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    with exit_if_refused():
        startup.prepare()
        database = Database(StorageSettings().sqlalchemy_url)
        relay_threads = RelayThreads(database, EventSettings(), ChangeListener(database))
    tune_garbage_collection()
    relay_threads.start()
    stopped.wait()
    relay_threads.end()


if __name__ == "__main__":
    main()
