"""The examples of deploy/: each is well formed, and names metrics that exist."""

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from app.schemas.operation_schemas import ModelStats
from routing.admission.submit_limits import LIMITS

REPO = Path(__file__).resolve().parents[2]
MONITORING, KUBERNETES = REPO / "deploy" / "monitoring", REPO / "deploy" / "kubernetes"
PAGE = REPO / "docs" / "how-to" / "monitoring.md"
_PARTS = re.compile(r"_(bucket|sum|count|total)$")
_NAME = re.compile(r"\bslotkeeper_[a-z_]+\b")


def _metrics() -> set[str]:
    """Return the names of all metrics in app/metrics.py."""
    tree = ast.parse((REPO / "app" / "metrics.py").read_text())
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {word for word in words if _NAME.fullmatch(word) and word != "slotkeeper_metrics"}


def _named(text: str) -> set[str]:
    return {_PARTS.sub("", name) for name in _NAME.findall(text)}


@pytest.mark.parametrize(
    "path",
    [MONITORING / "alerts.yml", MONITORING / "alerts.test.yml", MONITORING / "dashboard.json", KUBERNETES / "hpa.yaml"],
)
def test_every_metric_that_an_example_names_exists(path: Path) -> None:
    named = _named(path.read_text())
    assert named and sorted(named - _metrics()) == []


def test_the_page_explains_every_figure_and_no_other() -> None:
    page = PAGE.read_text()
    assert {_PARTS.sub("", name) for name in re.findall(r"`(slotkeeper_[a-z_]+)`", page)} == _metrics()


def test_the_page_names_every_limit_that_refuses_jobs() -> None:
    (named,) = re.findall(r"refused jobs by limit: ([a-z, ]+) \|", PAGE.read_text())
    assert set(named.split(", ")) == {limit.name for limit in LIMITS}


def test_the_pages_name_every_example() -> None:
    pages = PAGE.read_text() + PAGE.with_name("several-machines.md").read_text()
    examples = [*MONITORING.iterdir(), *KUBERNETES.iterdir()]
    assert [path.name for path in examples if f"deploy/{path.parent.name}/{path.name})" not in pages] == []


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    board = json.loads((MONITORING / "dashboard.json").read_text())
    assert board["title"] and board["schemaVersion"] >= 36
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert panel["targets"] and all(target["expr"] and target["refId"] for target in panel["targets"]), panel[
            "title"
        ]


def test_keda_reads_a_number_that_a_models_load_has() -> None:
    text = (KUBERNETES / "keda.yaml").read_text()
    (field,) = re.findall(r"valueLocation: (\w+)", text)
    assert ModelStats.model_fields[field].annotation is int
    assert re.search(r"url: \S+/models/zimg/stats", text)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_expressions_of_the_dashboard(tmp_path: Path) -> None:
    board = json.loads((MONITORING / "dashboard.json").read_text())
    asked = [target["expr"].replace("$model", "zimg") for panel in board["panels"] for target in panel["targets"]]
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
def test_prometheus_accepts_the_rules_and_their_tests_pass(words: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *words], cwd=MONITORING, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
