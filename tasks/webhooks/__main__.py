"""The process `webhooks`: python -m tasks.webhooks [--embedded-relay]."""

import signal
import sys

from slotkeeper.config import StorageSettings, exit_if_refused
from slotkeeper.db import Database
from slotkeeper.db.change_listener import ChangeListener
from slotkeeper.process import tune_garbage_collection
from tasks import liveness, startup
from tasks.config import EventSettings
from tasks.relay.relay import RelayThreads
from tasks.services import processes
from tasks.webhooks.delivery_loop import make_delivery_loop


def main() -> None:
    """Run the process until SIGTERM or SIGINT.

    `--embedded-relay` runs the relay in threads of this process, which saves the memory of a second process.
    """
    with exit_if_refused():
        startup.prepare()
        database = Database(StorageSettings().sqlalchemy_url)
        listener = ChangeListener(database)
        embeds_relay = "--embedded-relay" in sys.argv[1:]
        relay_threads = RelayThreads(database, EventSettings(), listener) if embeds_relay else None
    loop = make_delivery_loop(database, listener)

    def stop(*_: object) -> None:
        loop.stop()
        if relay_threads is not None:
            relay_threads.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    tune_garbage_collection()
    liveness.start_reporting("webhooks", processes())
    if relay_threads is not None:
        relay_threads.start()
    loop.run()
    if relay_threads is not None:
        relay_threads.end()


if __name__ == "__main__":
    main()
