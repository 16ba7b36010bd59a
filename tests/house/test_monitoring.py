"""The examples of docs/monitoring: each is well formed, and names figures that there are."""

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from app.api.figures import ModelStats

REPO = Path(__file__).resolve().parents[2]
FOLDER = REPO / "docs" / "monitoring"
_PARTS = re.compile(r"_(bucket|sum|count|total)$")
_NAME = re.compile(r"\bslotkeeper_[a-z_]+\b")


def _told() -> set[str]:
    """The names of all figures, as app/metrics.py makes them."""
    tree = ast.parse((REPO / "app" / "metrics.py").read_text())
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {word for word in words if _NAME.fullmatch(word) and word != "slotkeeper_metrics"}


def _named(text: str) -> set[str]:
    return {_PARTS.sub("", name) for name in _NAME.findall(text)}


@pytest.mark.parametrize("name", ["alerts.yml", "alerts.test.yml", "dashboard.json", "hpa.yaml"])
def test_every_figure_that_an_example_names_is_told(name: str) -> None:
    named = _named((FOLDER / name).read_text())
    assert named and sorted(named - _told()) == []


def test_the_page_explains_every_figure_and_no_other() -> None:
    page = (REPO / "docs" / "monitoring.md").read_text()
    assert {_PARTS.sub("", name) for name in re.findall(r"`(slotkeeper_[a-z_]+)`", page)} == _told()


def test_the_page_names_every_example() -> None:
    page = (REPO / "docs" / "monitoring.md").read_text()
    assert sorted(it.name for it in FOLDER.iterdir() if f"(monitoring/{it.name})" not in page) == []


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    board = json.loads((FOLDER / "dashboard.json").read_text())
    assert board["title"] and board["schemaVersion"] >= 36
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert panel["targets"] and all(it["expr"] and it["refId"] for it in panel["targets"]), panel["title"]


def test_keda_reads_a_number_that_a_models_load_has() -> None:
    text = (FOLDER / "keda.yaml").read_text()
    (field,) = re.findall(r"valueLocation: (\w+)", text)
    assert ModelStats.model_fields[field].annotation is int
    assert re.search(r"url: \S+/models/zimg/stats", text)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_the_dashboards_questions_are_ones_that_prometheus_understands(tmp_path: Path) -> None:
    board = json.loads((FOLDER / "dashboard.json").read_text())
    asked = [it["expr"].replace("$model", "zimg") for panel in board["panels"] for it in panel["targets"]]
    rules = [{"record": f"asked:{n}", "expr": expr} for n, expr in enumerate(asked)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "asked", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", "rules.yml"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    "words",
    [
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts.test.yml"),
        ("check", "config", "--syntax-only", "prometheus.yml"),
    ],
)
def test_prometheus_takes_the_rules_and_they_say_what_they_shall(words: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *words], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
