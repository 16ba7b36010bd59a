"""The Valkey that tests and drills start and kill."""

import os
from pathlib import Path

from tools.cluster.valkey_process import Valkey


def test_a_start_waits_until_the_data_is_loaded(tmp_path: Path) -> None:
    slowly = {"key-load-delay": "5000", "loading-process-events-interval-bytes": "1024"}
    with Valkey(tmp_path, settings=slowly) as valkey, valkey.client() as client:
        client.mset({f"key:{number}": os.urandom(2_000) for number in range(100)})
        client.save()
        valkey.kill()

        valkey.start()

        assert client.dbsize() == 100
