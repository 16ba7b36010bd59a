"""Which API the command line calls, and sends its key to, when the environment names none."""

from pathlib import Path

import click
import pytest

from app.cli.output import api_client


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which `slotkeeper up` writes its URL for commands of the same folder."""
    for name in ("SLOTKEEPER_URL", "SLOTKEEPER_PORT", "SLOTKEEPER_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "var"
    folder.mkdir(mode=0o700)
    (folder / "url").write_text("http://127.0.0.1:8123\n")
    return folder / "url"


def test_the_state_folder_of_the_present_folder_names_the_api(note: Path) -> None:
    assert api_client().url == "http://127.0.0.1:8123"


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_may_enter_names_none(note: Path, mode: int) -> None:
    note.parent.chmod(mode)
    with pytest.raises(click.ClickException, match="is not trusted"):
        api_client()


@pytest.mark.parametrize(
    "url", ["http://evil.example", "http://127.0.0.1.evil.example:80", "http://localhost@evil.example"]
)
def test_an_address_elsewhere_is_not_taken_from_a_file(note: Path, url: str) -> None:
    note.write_text(url)
    with pytest.raises(click.ClickException, match="is not trusted"):
        api_client()


def test_a_folder_that_the_operator_has_named_is_trusted(note: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note.parent.chmod(0o755)
    note.write_text("http://gpu-host:8000")
    monkeypatch.setenv("SLOTKEEPER_HOME", "var")
    assert api_client().url == "http://gpu-host:8000"


def test_the_settings_of_the_api_name_its_address(note: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTKEEPER_PORT", "8443")
    monkeypatch.setenv("SLOTKEEPER_HOST", "::")
    monkeypatch.setenv("SLOTKEEPER_TLS_CERTIFICATE", "certificate.pem")
    assert api_client().url == "https://[::1]:8443"
