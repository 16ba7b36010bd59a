import requests

from tools.cluster.tcp_proxy import Proxy
from tools.drill.webhook_receiver import Receiver


def test_a_receiver_notes_what_it_is_told(proxy: Proxy) -> None:
    with Receiver() as receiver:
        door = proxy.open("receivers", ("127.0.0.1", receiver.port))
        answer = requests.post(
            f"http://127.0.0.1:{door.port}/7",
            json={"job_id": "j", "status": "completed"},
            headers={"webhook-id": "w"},
            timeout=5,
        )
        assert answer.status_code == 204
        assert [(it.id, it.job_id, it.status) for it in receiver.deliveries] == [("w", "j", "completed")]
