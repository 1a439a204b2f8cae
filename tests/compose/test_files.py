"""The files of deploy/ are valid and consistent, and every alert has a test and a section in the docs."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.prometheus_operator.v1 import ServiceMonitor

from support.auth import Authority, write_tokens
from support.command import kvpool
from support.compose import DEPLOY, docker, prometheus_image
from support.paths import ROOT

KUBERNETES_VERSION = "1.32"
RULES = DEPLOY / "prometheus" / "rules.yml"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboards" / "kvpool.json").read_text())
FILES = {path.name: [*yaml.safe_load_all(path.read_text())] for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))}
SHARD: list[dict[str, Any]] = FILES.pop("shard.yaml")
"""In place of server.yaml, with the same names."""
KINDS_OF_A_SHARD = ("Service", "PodDisruptionBudget", "StatefulSet")
MANIFESTS: list[dict[str, Any]] = [manifest for manifests in FILES.values() for manifest in manifests]


def keys_that_stand_twice(node: Any) -> list[str]:
    """Duplicate keys of all mappings in a YAML node, with their lines; a loader silently takes the last one."""
    if isinstance(node, yaml.ScalarNode):
        return []
    if isinstance(node, yaml.SequenceNode):
        return [key for item in node.value for key in keys_that_stand_twice(item)]
    keys = [key.value for key, _ in node.value]
    twice = [f"{key.value}:{key.start_mark.line + 1}" for key, _ in node.value if keys.count(key.value) > 1]
    return twice + [key for _, value in node.value for key in keys_that_stand_twice(value)]


def promtool(*arguments: str) -> str:
    mount = f"{DEPLOY / 'prometheus'}:/rules:ro"
    return docker(
        "run", "--rm", "-v", mount, "-w", "/rules", "--entrypoint", "promtool", prometheus_image(), *arguments
    )


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def manifest(kind: str, name: str, among: list[dict[str, Any]] = MANIFESTS) -> dict[str, Any]:
    return next(m for m in among if (m["kind"], m["metadata"]["name"]) == (kind, name))


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.y*ml")), ids=lambda path: str(path.relative_to(DEPLOY)))
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
            assert "pool=~" in target["expr"] or not re.search(r"kvpool_(?!rpc|journal|shard)|kvpool:", target["expr"])


def test_each_image_is_built_by_one_service() -> None:
    services = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"].values()
    built = [service["image"] for service in services if "build" in service]
    names = ("etcd", "server", "vllm", "worker")
    assert sorted(built) == [f"${{KVPOOL_{name.upper()}_IMAGE:-kvpool-{name}}}" for name in names]


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


@pytest.mark.parametrize("checked", [*MANIFESTS, *SHARD], ids=lambda m: f"{m['kind']}-{m['metadata']['name']}")
def test_manifests_match_their_schemas(checked: dict[str, Any]) -> None:
    misspelt = copy.deepcopy(checked)
    part, key = (misspelt["spec"], next(iter(misspelt["spec"]))) if "spec" in misspelt else (misspelt, "data")
    part[f"{key}x"] = part.pop(key)
    if checked["kind"] == "ServiceMonitor":
        assert_service_monitor(checked)
        with pytest.raises((ValueError, AssertionError)):
            assert_service_monitor(misspelt)
        return
    kubernetes_validate.validate(checked, KUBERNETES_VERSION, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(misspelt, KUBERNETES_VERSION, strict=True)


def assert_service_monitor(checked: dict[str, Any]) -> None:
    """Types and required fields follow the custom resource definition, which drops unknown fields."""
    read = ServiceMonitor.model_validate(checked)
    kept = read.model_dump(by_alias=True, exclude_none=True, mode="json")
    assert kept["spec"] == checked["spec"]


def test_manifests_agree_with_each_other_and_with_the_rules() -> None:
    jobs = set(re.findall(r'job="([\w-]+)"', RULES.read_text()))
    monitored = manifest("ServiceMonitor", "kvpool")["spec"]
    for name, among in (("kvpool-server", MANIFESTS), ("kvpool-worker", MANIFESTS), ("kvpool-server", SHARD)):
        service, pods = manifest("Service", name, among), manifest("StatefulSet", name, among)["spec"]
        assert name in jobs, "a job is named as its service"
        assert monitored["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert pods["serviceName"] == name
        assert service["spec"]["selector"] == pods["selector"]["matchLabels"] == pods["template"]["metadata"]["labels"]
        container = pods["template"]["spec"]["containers"][0]
        ports = {port["name"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
        assert monitored["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
        assert pods["template"]["spec"]["enableServiceLinks"] is False
    worker = manifest("StatefulSet", "kvpool-worker")["spec"]
    settings = {entry["name"]: entry.get("value") for entry in worker["template"]["spec"]["containers"][0]["env"]}
    assert settings["KVPOOL_WORKER_WORLD_SIZE"] == settings["KVPOOL_WORKER_TP"] == str(worker["replicas"])
    model = json.loads(manifest("ConfigMap", "kvpool-model")["data"]["config.json"])
    assert model == json.loads((DEPLOY / "model" / "config.json").read_text())


def test_no_probe_starts_a_process() -> None:
    everything = [*MANIFESTS, *SHARD]
    templates = [manifest["spec"]["template"] for manifest in everything if "template" in manifest.get("spec", {})]
    for container in (container for template in templates for container in template["spec"]["containers"]):
        ports = {port["name"] for port in container["ports"]}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container[kind]
            assert "exec" not in probe
            if "httpGet" in probe:
                assert probe["httpGet"]["path"] in ("/healthz", "/readyz")
                assert probe["httpGet"]["path"] == "/healthz" or kind == "readinessProbe"
                assert probe["httpGet"]["port"] in ports


def test_a_pair_survives_a_machine_and_an_update() -> None:
    service, budget, pods = (manifest(kind, "kvpool-server", SHARD)["spec"] for kind in KINDS_OF_A_SHARD)
    labels = pods["selector"]["matchLabels"]
    assert budget["selector"]["matchLabels"] == service["selector"] == labels
    assert pods["replicas"] - budget["maxUnavailable"] == 1
    (term,) = pods["template"]["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert (term["topologyKey"], term["labelSelector"]["matchLabels"]) == ("kubernetes.io/hostname", labels)
    (container,) = pods["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz", "an update waits for the new standby"
    assert service["publishNotReadyAddresses"] is True, "servers that are not ready find each other"


@pytest.mark.parametrize("manifests", [MANIFESTS, SHARD], ids=["server", "shard"])
def test_a_server_accepts_the_settings_of_its_manifest(manifests: list[dict[str, Any]], tmp_path: Path) -> None:
    pod = manifest("StatefulSet", "kvpool-server", manifests)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    authority = Authority(tmp_path, "ca")
    pair = authority.issue("kvpool-server-0.kvpool-server")
    write_tokens(tmp_path / "tokens", [{"name": "standby", "role": "standby", "pools": ["*"]}])
    (tmp_path / "token").write_text("kvp_secret")
    files = {
        "/etc/kvpool/tls/tls.crt": pair.cert,
        "/etc/kvpool/tls/tls.key": pair.key,
        "/etc/kvpool/tls/ca.crt": authority.path,
        "/etc/kvpool/tokens/tokens.toml": tmp_path / "tokens",
        "/etc/kvpool/standby/token": tmp_path / "token",
        "/var/lib/kvpool/journal": tmp_path / "journal",
    }
    values = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    mounts = [f"{mount['mountPath']}/" for mount in container["volumeMounts"]]
    assert all(value.startswith(tuple(mounts)) for value in values.values() if value.startswith("/"))
    settings = {name: str(files.get(value, value)) for name, value in values.items()}
    settings = {name: value.replace("$(POD_NAME)", "kvpool-server-0") for name, value in settings.items()}
    of_the_image = re.findall(r'(KVPOOL_SERVE_\w+)=(?:"([^"]*)"|(\S+))', (ROOT / "Dockerfile").read_text())
    settings |= {name: quoted or plain for name, quoted, plain in of_the_image if name.endswith("LISTEN")}
    done = kvpool("serve", "--check", **settings)
    assert (done.returncode, done.stdout) == (0, "the settings are valid\n"), done.stderr
