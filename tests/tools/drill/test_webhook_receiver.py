import requests

from tools.cluster.tcp_proxy import Proxy
from tools.drill.webhook_receiver import Receiver


def test_a_receiver_keeps_its_deliveries(proxy: Proxy) -> None:
    with Receiver() as receiver:
        proxy_port = proxy.open("receivers", ("127.0.0.1", receiver.port))
        answer = requests.post(
            f"http://127.0.0.1:{proxy_port.port}/7",
            json={"job_id": "j", "status": "completed"},
            headers={"webhook-id": "w"},
            timeout=5,
        )
        assert answer.status_code == 204
        assert [(delivery.id, delivery.job_id, delivery.status) for delivery in receiver.deliveries] == [
            ("w", "j", "completed")
        ]


def test_the_same_share_of_the_messages_is_refused_until_that_ends() -> None:
    names = [f"w{n}" for n in range(200)]
    with Receiver() as receiver, requests.Session() as session:

        def send(name: str) -> int:
            body, head = {"job_id": "j", "status": "completed"}, {"webhook-id": name}
            return session.post(f"http://127.0.0.1:{receiver.port}/7", json=body, headers=head, timeout=5).status_code

        receiver.refuse(0.2)
        first = {name: send(name) for name in names}
        refused = [name for name, status in first.items() if status == 500]
        assert 20 <= len(refused) <= 60
        assert {send(name) for name in refused} == {500}
        receiver.refuse(0.0)
        assert {send(name) for name in refused} == {204}
        assert sorted(delivery.id for delivery in receiver.deliveries) == sorted(names)
