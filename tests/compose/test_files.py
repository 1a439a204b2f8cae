"""The files of deploy/ are valid and consistent, and every alert has a test and a section in the docs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpool.cli.model import byte_size
from support.compose import DEPLOY, docker, prometheus_image
from support.paths import ROOT
from support.yaml_keys import keys_that_stand_twice

RULES = DEPLOY / "prometheus" / "rules.yml"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboards" / "kvpool.json").read_text())
OF_A_SERVER = "rpc|journal|shard|door|limit|credentials"
"""How the names of metrics without a pool continue."""
CONFIGURATIONS = [path for path in sorted(DEPLOY.rglob("*.y*ml")) if path.parent.name != "templates"]
"""YAML files. Those of the chart's templates are no YAML before they are rendered: see test_helm.py."""


def promtool(*arguments: str) -> str:
    mount = f"{DEPLOY / 'prometheus'}:/rules:ro"
    return docker(
        "run", "--rm", "-v", mount, "-w", "/rules", "--entrypoint", "promtool", prometheus_image(), *arguments
    )


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_yaml_keys_are_unique(path: Path) -> None:
    documents = list(yaml.compose_all(path.read_text()))
    assert documents
    assert [keys_that_stand_twice(document) for document in documents] == [[]] * len(documents)


def test_promtool_accepts_the_rules_and_their_tests() -> None:
    assert "SUCCESS" in promtool("check", "rules", "rules.yml")
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")
    assert "SUCCESS" in promtool("test", "rules", "rules_test.yml")


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_every_alert_has_a_description_and_a_runbook(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}
    summary = alert["annotations"]["summary"]
    assert "$labels.pool" not in summary or "$labels.instance" in summary, "pods of engines have pools of one name"
    path, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE)
    assert anchor in [heading.lower() for heading in headings]
    assert anchor == alert["alert"].lower()
    tests = yaml.safe_load((RULES.parent / "rules_test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", ()) if case["alertname"] == alert["alert"]]
    assert any(case["exp_alerts"] for case in cases), "no test of when it fires"


def test_the_dashboard_is_valid() -> None:
    panels = DASHBOARD["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    places = {(x, y) for p in panels for x in range(p["gridPos"]["x"], p["gridPos"]["x"] + p["gridPos"]["w"])
              for y in range(p["gridPos"]["y"], p["gridPos"]["y"] + p["gridPos"]["h"])}  # fmt: skip
    assert len(places) == sum(panel["gridPos"]["w"] * panel["gridPos"]["h"] for panel in panels), "panels overlap"
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    for panel in panels:
        assert panel["type"] == "row" or panel["targets"], panel["title"]
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= variables
            assert 'instance=~"$instance"' in target["expr"] or "kvpool_worker" in target["expr"]
            assert "pool=~" in target["expr"] or not re.search(rf"kvpool_(?!{OF_A_SERVER})|kvpool:", target["expr"])


def test_the_dashboard_tells_pools_of_one_name_apart() -> None:
    for target in (target for panel in DASHBOARD["panels"] for target in panel.get("targets", ())):
        assert ("{{pool}}" in target["legendFormat"]) == ("{{pool}} {{instance}}" in target["legendFormat"])
        assert not re.search(r"by \(pool(?!, instance)", target["expr"])


def test_engines_cannot_write_the_journal_of_their_server() -> None:
    services = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]
    for server, engine in (("lending-server", "engine-0"), ("vllm-server", "vllm-0")):
        (journal,) = {*services[server]["volumes"]} - {*services[engine]["volumes"]}
        assert journal.endswith(f":{services[server]['environment']['KVPOOL_SERVE_JOURNAL']}")


def test_the_memory_of_each_lender_fits_its_container() -> None:
    services = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]
    settings = {name: service.get("environment", {}) for name, service in services.items()}
    lenders = {name: each for name, each in settings.items() if "KVPOOL_WORKER_LEND" in each}
    assert lenders.keys() == {"lender", "vllm-lender"}
    for name, each in lenders.items():
        sizes = [each["KVPOOL_WORKER_MEMORY"], each.get("KVPOOL_WORKER_HOST_MEMORY", "0"), services[name]["shm_size"]]
        *tiers, shared = (byte_size(re.sub(r"\$\{\w+:-(\w+)\}", r"\1", size)) for size in sizes)
        assert sum(tiers) < shared
    assert lenders["vllm-lender"]["KVPOOL_WORKER_HOST_MEMORY"] == "${VLLM_HOST_MEMORY:-128MiB}"


def test_clients_on_this_machine_reach_the_port_of_steps() -> None:
    server = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]["server"]
    port = server["environment"]["KVPOOL_SERVE_STEPS_LISTEN"].removeprefix("0.0.0.0:")
    assert f"127.0.0.1:{port}:{port}" in server["ports"]


def test_each_image_is_built_by_one_service() -> None:
    services = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"].values()
    built = [service["image"] for service in services if "build" in service]
    names = ("etcd", "server", "vllm", "worker")
    assert sorted(built) == [f"${{KVPOOL_{name.upper()}_IMAGE:-kvpool-{name}}}" for name in names]


def test_images_that_are_not_built_here_are_named_by_their_digest() -> None:
    services = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"].values()
    foreign = {service["image"] for service in services if ":-kvpool-" not in service["image"]}
    assert len(foreign) == 2
    assert all(re.fullmatch(r"\$\{\w+:-[^@}]+:[^@}]+@sha256:[0-9a-f]{64}\}", image) for image in foreign)


def test_grafana_has_no_user_with_a_known_password() -> None:
    grafana = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]["grafana"]["environment"]
    assert grafana["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert grafana["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert not [name for name in grafana if "PASSWORD" in name]


def test_grafanas_files_are_mounted_where_it_looks() -> None:
    grafana = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]["grafana"]
    mounts = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/kvpool.yml").read_text())["providers"][0]
    assert provider["options"]["path"] == mounts["./grafana/dashboards"]
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (home.parent, home.name) == (Path(mounts["./grafana/dashboards"]), "kvpool.json")
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
