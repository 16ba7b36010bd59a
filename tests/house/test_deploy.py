"""The examples of deploy/ start the processes of the Procfile, with settings that exist."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.config import SETTINGS, AppSettings
from app.up.plan import read_procfile
from slotkeeper.errors import InvalidSetting
from tests.house.tree import REPO

DEPLOY = REPO / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def words(command: str | list[str]) -> list[str]:
    """Return a command without the folder of its program, and with the default log level."""
    text = shlex.join(command) if isinstance(command, list) else command
    text = text.replace("%%h", "%h")
    parts = shlex.split(re.sub(r"\$\{SLOTKEEPER_LOG_LEVEL[^}]*\}", "WARNING", text))
    return [Path(parts[0]).name, *parts[1:]]


GATEWAY = {"gateway": ["python", "-P", "-m", "app.gateway"]}  # `slotkeeper up` starts it only with a port.
EXPECTED = {role: words(command) for role, command in read_procfile().items()} | GATEWAY


def composed() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"]
    return services


def manifests(*kinds: str) -> list[dict[str, Any]]:
    files = [(DEPLOY / f"kubernetes/{name}.yaml").read_text("utf-8") for name in ("slotkeeper", "gateway")]
    found = [manifest for file in files for manifest in yaml.safe_load_all(file)]
    return [manifest for manifest in found if manifest["kind"] in kinds]


def pods(*kinds: str) -> dict[str, Any]:
    """Return the pods of these kinds of manifests, by the name of their container."""
    made = [manifest["spec"]["template"]["spec"] for manifest in manifests(*kinds)]
    return {pod["containers"][0]["name"]: pod for pod in made}


def deployments() -> dict[str, Any]:
    return pods("Deployment")


PODS = pods("Deployment", "Job")


@pytest.mark.parametrize("name", sorted(PODS))
def test_a_pod_has_no_right_that_it_does_not_need(name: str) -> None:
    pod = PODS[name]
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"] and container["resources"]["requests"]["cpu"]
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/var/lib/slotkeeper", "/tmp"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_a_composed_process_has_no_right_that_it_does_not_need() -> None:
    for name, service in composed().items():
        if service.get("image") == "slotkeeper":
            assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges"], name
            assert service["read_only"] and service["mem_limit"], name


def test_no_command_contains_a_password() -> None:
    """Every user of the host can read the arguments of a process."""
    for name, service in composed().items():
        assert "${PASSWORD" not in str(service.get("command")), name


def test_the_image_runs_as_the_user_of_the_pods() -> None:
    """Kubernetes compares numbers: a name could be that of root."""
    lines = (DEPLOY / "Dockerfile").read_text("utf-8").splitlines()
    (user,) = (line.removeprefix("USER ") for line in lines if line.startswith("USER "))
    assert {str(pod["securityContext"]["runAsUser"]) for pod in PODS.values()} == {user}
    assert any(f"useradd --uid {user} " in line for line in lines)


def test_only_the_ports_of_the_api_and_of_agents_are_open_in_a_cluster() -> None:
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in manifests("NetworkPolicy")}
    assert policies["slotkeeper"] == {"podSelector": {"matchLabels": {"app": "slotkeeper"}}, "policyTypes": ["Ingress"]}
    assert policies["slotkeeper-web"]["ingress"] == [{"ports": [{"port": "http"}]}]
    assert policies["slotkeeper-web"]["podSelector"]["matchLabels"]["role"] == "web"
    agents, workers = policies["slotkeeper-gateway"]["ingress"]
    assert agents == {"ports": [{"port": "agents"}]}
    assert workers["from"] == [{"podSelector": {"matchLabels": {"app": "slotkeeper"}}}]
    labels = [workload["spec"]["template"]["metadata"]["labels"] for workload in manifests("Deployment", "Job")]
    assert {label["app"] for label in labels} == {"slotkeeper"}


def test_the_builder_of_the_image_gets_what_the_image_holds_and_no_state() -> None:
    lines = (DEPLOY / "Dockerfile").read_text("utf-8").splitlines()
    copied = {word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]}
    ignored = (REPO / ".dockerignore").read_text("utf-8").splitlines()
    assert ignored[0] == "*" and {line[1:] for line in ignored if line.startswith("!")} == copied


def test_a_database_across_a_network_is_checked() -> None:
    assert "sslmode=verify-full" in environments()["systemd"]["SLOTKEEPER_DATABASE_URL"]


def test_systemd_starts_what_the_procfile_starts() -> None:
    found = {}
    for unit in UNITS:
        parser = configparser.ConfigParser(interpolation=None)
        parser.read(unit)
        found[unit.stem.removeprefix("slotkeeper-")] = words(parser["Service"]["ExecStart"])
    assert found == EXPECTED


def test_compose_starts_what_the_procfile_starts() -> None:
    found = {name: words(service["command"]) for name, service in composed().items() if name in EXPECTED}
    assert found == EXPECTED


def test_kubernetes_starts_what_the_procfile_starts_but_for_flower() -> None:
    found = {role: words(pod["containers"][0]["command"]) for role, pod in deployments().items()}
    assert found == {role: command for role, command in EXPECTED.items() if role != "flower"}


def test_supervisors_wait_longer_than_a_worker_needs_to_hand_its_runs_over() -> None:
    default_s = next(
        kind.model_fields["grace_s"].default for kind in SETTINGS.values() if "grace_s" in kind.model_fields
    )
    common = (DEPLOY / "systemd/slotkeeper-.service.d/common.conf").read_text("utf-8")
    waits = [int(re.findall(r"^TimeoutStopSec=(\d+)$", common, re.MULTILINE)[0])]
    waits += [int(composed()["worker"]["stop_grace_period"].removesuffix("s"))]
    waits += [pod["terminationGracePeriodSeconds"] for pod in deployments().values()]
    assert min(waits) > default_s


def environments() -> dict[str, dict[str, str]]:
    """Return the settings of each example."""
    (config,) = manifests("ConfigMap")
    lines = (DEPLOY / "systemd/environment.example").read_text("utf-8").splitlines()
    return {
        "compose": composed()["web"]["environment"],
        "kubernetes": config["data"],
        "systemd": dict(line.split("=", 1) for line in lines if line.startswith("SLOTKEEPER_")),
    }


@pytest.mark.parametrize("name", ["compose", "kubernetes", "systemd"])
def test_the_api_starts_with_the_settings_of_an_example(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in environments()[name].items():
        monkeypatch.setenv(variable, value)
    AppSettings().check_exposure()
    monkeypatch.delenv("SLOTKEEPER_REQUIRE_KEYS")
    monkeypatch.setenv("SLOTKEEPER_HOST", "0.0.0.0")
    with pytest.raises(InvalidSetting, match="REQUIRE_KEYS"):
        AppSettings().check_exposure()


def test_every_setting_in_an_example_exists() -> None:
    known = {
        f"{kind.model_config['env_prefix']}{name}".upper() for kind in SETTINGS.values() for name in kind.model_fields
    }
    known |= {"SLOTKEEPER_KEY", "SLOTKEEPER_URL", "SLOTKEEPER_LOG_LEVEL"}
    for file in (path for path in DEPLOY.rglob("*") if path.is_file()):
        used = set(re.findall(r"\bSLOTKEEPER_[A-Z_]+(?=[=:])", file.read_text("utf-8")))
        assert used <= known, file


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """With this Python in place of that of /opt, since systemd looks whether a program is there."""
    shutil.copytree(DEPLOY / "systemd", tmp_path, dirs_exist_ok=True)
    for unit in tmp_path.glob("*.service"):
        text = unit.read_text("utf-8").replace("/opt/slotkeeper/.venv/bin", str(Path(sys.executable).parent))
        unit.write_text(text, "utf-8")
    agent = (DEPLOY / "agent/slotkeeper-agent.service").read_text("utf-8")
    (tmp_path / "agent.service").write_text(
        agent.replace("/opt/slotkeeper/.venv/bin", str(Path(sys.executable).parent))
    )
    units = [str(unit) for unit in (*tmp_path.glob("*.service"), *tmp_path.glob("*.target"))]
    done = subprocess.run(
        ["systemd-analyze", "verify", *units], env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
