"""An address on which the API cannot listen is refused in one sentence."""

import pytest

from app.listening import listen
from slotkeeper.errors import InvalidSetting


@pytest.mark.parametrize(
    ("host", "reason"), [("no.such.host.invalid", "[Nn]ame|[Tt]emporary"), ("192.0.2.1", "assign")]
)
def test_the_refusal_names_the_address_the_reason_and_the_setting(host: str, reason: str) -> None:
    with pytest.raises(InvalidSetting, match=rf"cannot listen on {host}, port 8000: .*({reason}).*SLOTKEEPER_HOST"):
        listen(host, 8000, "The API", "Set SLOTKEEPER_HOST.")
