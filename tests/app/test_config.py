import pytest

from app.config import AppSettings, is_loopback
from slotkeeper.errors import InvalidSetting


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "LocalHost", "::1", "[::1]"])
def test_names_that_can_only_mean_this_machine(host):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["", "0.0.0.0", "::", "10.0.0.1", "gpu1", "localhost.evil.example", "127.0.0.1.x", "2130706433"]
)
def test_names_that_can_mean_another(host):
    assert not is_loopback(host)


def test_the_network_is_served_with_keys_only():
    AppSettings(host="127.0.0.1").check_exposure()
    AppSettings(host="0.0.0.0", require_keys=True).check_exposure()
    with pytest.raises(InvalidSetting, match=r"SLOTKEEPER_HOST=0.0.0.0 .* SLOTKEEPER_REQUIRE_KEYS=true"):
        AppSettings(host="0.0.0.0").check_exposure()
