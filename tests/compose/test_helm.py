"""The Helm chart: its values are checked, and every object that it renders is valid and consistent."""

import copy
import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.prometheus_operator.v1 import ServiceMonitor

from support import processes
from support.auth import Authority, write_tokens
from support.command import kvpool
from support.compose import DEPLOY
from support.helm import CHART, helm, memory_limit_mib, name_of, render, server_container, variables
from support.logging_process import LoggingProcess
from support.paths import DOCS, ROOT
from support.server import CommandLineServer, free_port
from support.waiting import DEADLINE_SECONDS

Object = dict[str, Any]
KUBERNETES_VERSION: Final = "1.32"
NO_JOURNAL: Final = "KVPOOL_SERVE_NO_JOURNAL"
"""Which the tests set; not so the pods."""
RULES: Final = DEPLOY / "prometheus" / "rules.yml"
SECURED: Final = {
    "tls": {"secretName": "kvpool-tls"},
    "tokens": {"secretName": "kvpool-tokens"},
    "shard": {"standbyTokenSecret": "kvpool-standby"},
}
SHARD: Final = {"shard": {"enabled": True, "etcd": "etcd://etcd-0.etcd:2379,etcd-1.etcd:2379/prod"}}
ENGINES: Final = {"vllm": {"enabled": True, "model": "/models/m", "resourceClaimTemplate": "one-gpu"}}
ON_CPU: Final = {"vllm": {"enabled": True, "model": "/models/m", "device": "cpu", "lentMemoryMiB": 64}}


def both(one: Object, other: Object) -> Object:
    """Values of two sets, of which the second prevails."""
    return one | other | {key: one[key] | other[key] for key in one.keys() & other.keys()}


BOTH: Final = both(ENGINES, {"server": {"enabled": True}})
"""Engines, and a server for others."""
EVERYTHING: Final = both(
    both(SECURED, SHARD),
    both(
        ENGINES,
        {
            "image": {"registry": "registry.example.com/team", "pullSecrets": ["pull"]},
            "server": {
                "enabled": True,
                "settings": {
                    "log_level": "debug",
                    "max_sessions": 3000000,
                    "max_memory_bytes": 0,
                    "allow_plaintext": ["grpc", "metrics"],
                    "listen": "0.0.0.0:50051",
                },
                "journal": {"storageClassName": "fast"},
                "nodeSelector": {"disk": "local"},
                "tolerations": [{"key": "kv", "operator": "Exists"}],
            },
            "vllm": {
                "pods": 2,
                "engines": 3,
                "tensorParallelSize": 2,
                "hostMemoryMiB": 65536,
                "serverSettings": {"log_level": "warning", "listen": "0.0.0.0:1", "journal": "elsewhere"},
                "args": ["--max-model-len", "8192"],
                "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}],
                "modelVolume": {"persistentVolumeClaim": {"claimName": "models"}},
                "affinity": {"nodeAffinity": {}},
                "nodeSelector": {"gpu": "h100"},
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
            },
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        },
    ),
)
CASES: Final[dict[str, Object]] = {
    "default": {},
    "secured": SECURED,
    "shard": SHARD,
    "secured shard": both(SECURED, SHARD),
    "engines": ENGINES,
    "both": BOTH,
    "claims, no policies": both(BOTH, {"server": {"journal": {"claim": True}}, "networkPolicy": {"enabled": False}}),
    "engines on CPU": ON_CPU,
    "host memory on CPU": both(ON_CPU, {"vllm": {"hostMemoryMiB": 32}}),
    "everything": EVERYTHING,
}
RENDERED: Final = {name: render(values) for name, values in CASES.items()}


def find(kind: str, name: str, case: str) -> Object:
    return next(each for each in RENDERED[case] if (each["kind"], name_of(each)) == (kind, name))


def templates(case: str) -> list[Object]:
    return [each["spec"]["template"]["spec"] for each in RENDERED[case] if "template" in each.get("spec", {})]


def containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def env(container: Object) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container["env"]}


@pytest.mark.parametrize("case", CASES)
def test_helm_finds_nothing_to_warn_of(case: str) -> None:
    done = helm("lint", "--strict", CHART, values=CASES[case])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"serve": {}}, "'serve' not allowed"),
        ({"server": {"memoryMiB": 2047}}, "/server/memoryMiB"),
        ({"server": {"memoryMiB": "4Gi"}}, "/server/memoryMiB"),
        ({"vllm": {"device": "tpu"}}, "/vllm/device"),
        ({"shard": {"enabled": True, "etcd": "http://etcd:2379"}}, "/shard/etcd"),
        ({"shard": {"enabled": True}}, "shard.enabled needs shard.etcd"),
        (both({"tokens": {"secretName": "t"}}, SHARD), "needs shard.standbyTokenSecret"),
        ({"vllm": {"enabled": True}}, "vllm.enabled needs vllm.model"),
        ({"vllm": {"enabled": True, "model": "m"}}, "needs vllm.resourceClaimTemplate"),
        ({"server": {"enabled": False}}, "server.enabled false without vllm.enabled starts nothing"),
        (both(SHARD, ON_CPU), "shard.enabled needs server.enabled"),
        (both({"tls": {"secretName": "t"}}, ON_CPU), "tls.secretName needs server.enabled"),
        (both({"tokens": {"secretName": "t"}}, ON_CPU), "tokens.secretName needs server.enabled"),
        (both({"server": {"settings": {"log_level": "debug"}}}, ON_CPU), "server.settings needs server.enabled"),
        (both({"server": {"journal": {"claim": True}}}, ON_CPU), "server.journal.claim needs server.enabled"),
        (both(ON_CPU, {"vllm": {"serverSettings": {"log_level": {}}}}), "/vllm/serverSettings/log_level"),
        ({"vllm": {"hostMemoryMiB": "64GiB"}}, "/vllm/hostMemoryMiB"),
        (
            both(ON_CPU, {"vllm": {"hostMemoryMiB": 64, "args": ["--no-enable-prefix-caching"]}}),
            "vllm.hostMemoryMiB needs prefix caching",
        ),
    ],
)
def test_values_that_cannot_work_are_refused(values: Object, message: str) -> None:
    done = helm("template", "kvpool", CHART, values=values)
    assert done.returncode != 0
    assert message in done.stderr


def test_every_value_has_a_schema_and_a_comment_names_no_other() -> None:
    values, schema = (
        yaml.safe_load((CHART / "values.yaml").read_text()),
        json.loads((CHART / "values.schema.json").read_text()),
    )

    def keys(of: Object, properties: Object, where: str = "") -> list[str]:
        missing = []
        for key, value in of.items():
            found = properties.get(key)
            missing += [] if found else [f"{where}{key}"]
            if found and isinstance(value, dict) and value:
                missing += keys(value, found["properties"], f"{where}{key}.")
        return missing

    assert keys(values, schema["properties"]) == []
    assert schema["properties"].keys() - values.keys() == {"global"}
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize(
    "checked",
    [pytest.param(each, id=f"{case}-{each['kind']}-{name_of(each)}") for case in RENDERED for each in RENDERED[case]],
)
def test_objects_match_their_schemas(checked: Object) -> None:
    misspelt = copy.deepcopy(checked)
    key = next(iter(misspelt["spec"]))
    misspelt["spec"][f"{key}x"] = misspelt["spec"].pop(key)
    if checked["kind"] == "ServiceMonitor":
        assert_service_monitor(checked)
        with pytest.raises((ValueError, AssertionError)):
            assert_service_monitor(misspelt)
        return
    kubernetes_validate.validate(checked, KUBERNETES_VERSION, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(misspelt, KUBERNETES_VERSION, strict=True)


def assert_service_monitor(checked: Object) -> None:
    """Types and required fields follow the custom resource definition, which drops unknown fields."""
    read = ServiceMonitor.model_validate(checked)
    kept = read.model_dump(by_alias=True, exclude_unset=True, mode="json")
    assert kept["spec"] == checked["spec"]


@pytest.mark.parametrize("case", CASES)
def test_objects_of_a_release_agree_with_each_other(case: str) -> None:
    services = {name_of(each): each for each in RENDERED[case] if each["kind"] == "Service"}
    workloads = {name_of(each): each["spec"] for each in RENDERED[case] if each["kind"] == "StatefulSet"}
    selectors = [
        each["spec"]["podSelector"]["matchLabels"] for each in RENDERED[case] if each["kind"] == "NetworkPolicy"
    ]
    selectors += [
        each["spec"]["selector"]["matchLabels"] for each in RENDERED[case] if each["kind"] == "PodDisruptionBudget"
    ]
    for name, pods in workloads.items():
        service, labels = services[pods["serviceName"]]["spec"], pods["template"]["metadata"]["labels"]
        assert name == pods["serviceName"]
        assert service["selector"] == pods["selector"]["matchLabels"] == labels
        ports = [port["name"] for each in containers(pods["template"]["spec"]) for port in each["ports"]]
        assert len(set(ports)) == len(ports)
        assert {port["targetPort"] for port in service["ports"]} <= {*ports}
        for each in containers(pods["template"]["spec"]):
            mounted = {mount["name"] for mount in each["volumeMounts"]}
            volumes = [*pods["template"]["spec"]["volumes"], *pods.get("volumeClaimTemplates", ())]
            assert mounted <= {volume.get("name") or name_of(volume) for volume in volumes}
    assert all(selector in [pods["selector"]["matchLabels"] for pods in workloads.values()] for selector in selectors)
    names = [(each["kind"], name_of(each)) for each in RENDERED[case]]
    assert len(set(names)) == len(names)


def test_jobs_have_the_names_that_the_rules_use() -> None:
    jobs = set(re.findall(r'job="([\w-]+)"', RULES.read_text()))
    (monitor,) = (each["spec"] for each in RENDERED["everything"] if each["kind"] == "ServiceMonitor")
    monitored = {each["port"]: each["relabelings"][0]["replacement"] for each in monitor["endpoints"]}
    assert {*monitored.values()} == jobs
    for service in (each for each in RENDERED["everything"] if each["kind"] == "Service"):
        assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        metrics = {port["name"] for port in service["spec"]["ports"] if port["name"].startswith("metrics")}
        assert "metrics" in metrics
        assert metrics <= monitored.keys()
    pod = find("StatefulSet", "kvpool-vllm", "everything")["spec"]["template"]["spec"]
    serving = {port["name"]: each["name"] for each in containers(pod) for port in each["ports"]}
    assert {job: {serving[port].partition("-")[0] for port in monitored if monitored[port] == job} for job in jobs} == {
        "kvpool-server": {"server"},
        "kvpool-worker": {"lender"},
    }


@pytest.mark.parametrize("case", CASES)
def test_pods_have_no_privilege_and_a_limit(case: str) -> None:
    for pod in templates(case):
        assert pod["enableServiceLinks"] is pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostPID", "hostIPC", "hostNetwork"} & pod.keys()
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("case", CASES)
def test_no_probe_starts_a_process(case: str) -> None:
    for container in (each for pod in templates(case) for each in containers(pod)):
        ports = {port["name"] for port in container["ports"]}
        is_beside = "restartPolicy" in container
        for kind in ("startupProbe", "livenessProbe", *(() if is_beside else ("readinessProbe",))):
            probe = container[kind]
            assert "exec" not in probe
            assert probe["httpGet"]["port"] in ports
            if container["name"] == "server":
                assert probe["httpGet"]["path"] in ("/healthz", "/readyz")
                assert probe["httpGet"]["path"] == "/healthz" or kind == "readinessProbe"


def test_a_pair_survives_a_machine_and_an_update() -> None:
    service, budget, pods = (
        find(kind, "kvpool-server", "shard")["spec"] for kind in ("Service", "PodDisruptionBudget", "StatefulSet")
    )
    labels = pods["selector"]["matchLabels"]
    assert budget["selector"]["matchLabels"] == service["selector"] == labels
    assert pods["replicas"] - budget["maxUnavailable"] == 1
    (term,) = pods["template"]["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert (term["topologyKey"], term["labelSelector"]["matchLabels"]) == ("kubernetes.io/hostname", labels)
    container = server_container(RENDERED["shard"])
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz", "an update waits for the new standby"
    assert service["publishNotReadyAddresses"] is True, "servers that are not ready find each other"
    assert [name_of(claim) for claim in pods["volumeClaimTemplates"]] == ["journal"]


def test_whoever_may_call_the_server_may_send_steps() -> None:
    service, policy = (find(kind, "kvpool-server", "shard")["spec"] for kind in ("Service", "NetworkPolicy"))
    ports = {port["name"]: port["port"] for port in service["ports"]}
    assert ports["steps"] == ports["grpc"] + 1, "the default of a server"
    assert [{"port": "grpc"}, {"port": "steps"}] in [rule["ports"] for rule in policy["ingress"]]
    assert {each["name"]: each["containerPort"] for each in server_container(RENDERED["shard"])["ports"]} == ports


def test_a_release_of_engines_has_no_shared_server() -> None:
    assert {name_of(each) for each in RENDERED["engines"]} == {"kvpool-vllm"}
    shared = {(each["kind"], name_of(each)) for each in RENDERED["default"]}
    engines = {(each["kind"], name_of(each)) for each in RENDERED["engines"]}
    assert {(each["kind"], name_of(each)) for each in RENDERED["both"]} == shared | engines


def test_engines_map_what_the_lenders_of_their_pod_lend() -> None:
    for case, num_ranks, num_engines in (("engines", 1, 2), ("engines on CPU", 1, 2), ("everything", 2, 3)):
        pod = find("StatefulSet", "kvpool-vllm", case)["spec"]["template"]["spec"]
        assert pod["shareProcessNamespace"] is True, "a lender lends to processes that it can see"
        server, *lenders = pod["initContainers"]
        assert {each["restartPolicy"] for each in pod["initContainers"]} == {"Always"}, "they run beside the engines"
        assert {each["image"] for each in containers(pod)} == {server["image"]}, "they are of one version"
        assert len(pod["containers"]) == num_engines
        sockets = {env(each)["KVPOOL_WORKER_LEND"] for each in lenders}
        assert len(sockets) == num_ranks
        for engine in pod["containers"]:
            settings = env(engine)
            assert {settings["KVPOOL_MEMORY"].replace("{rank}", str(rank)) for rank in range(num_ranks)} == sockets
            assert {env(each)["KVPOOL_WORKER_POOL"] for each in lenders} == {settings["KVPOOL_POOL"]}
            servers = {env(each)["KVPOOL_WORKER_SERVER"] for each in lenders}
            assert servers == {settings["KVPOOL_ADDRESS"]} == {env(server)["KVPOOL_SERVE_LISTEN"]}
        those = [*lenders, *pod["containers"]]
        mounts = [{mount["name"]: mount["mountPath"] for mount in each["volumeMounts"]} for each in (server, *those)]
        assert {each["sockets"] for each in mounts} == {"/run/kvpool"}
        assert {each["memory"] for each in mounts[1:]} == {"/dev/shm"}  # noqa: S108 - that of the containers
        claims = [each["resources"].get("claims") for each in those]
        is_on_gpu = case != "engines on CPU"
        assert claims == [[{"name": "devices"}] if is_on_gpu else None] * len(claims)
        options = dict(each.split("=") for each in pod["containers"][0]["args"] if "=" in each)
        assert int(options["--shutdown-timeout"]) < pod["terminationGracePeriodSeconds"]
        assert ("--kv-cache-memory-bytes" in options) is is_on_gpu


def test_memory_that_is_lent_on_cpu_counts_to_whom_it_may_be_charged() -> None:
    pod = find("StatefulSet", "kvpool-vllm", "engines on CPU")["spec"]["template"]["spec"]
    (memory,) = (each["emptyDir"]["sizeLimit"] for each in pod["volumes"] if each["name"] == "memory")
    assert memory == "2112Mi", "64 MiB, and 1 GiB for each engine"
    limits = [each["resources"]["limits"]["memory"] for each in containers(pod)]
    assert limits == ["4096Mi", "2112Mi", "16448Mi", "16448Mi"], "not to the server"


@pytest.mark.parametrize(
    ("case", "size", "shared", "requested", "limits"),
    [
        ("host memory on CPU", "32MiB", "2144Mi", ["1120Mi"], ["4096Mi", "2144Mi", "16448Mi", "16448Mi"]),
        ("everything", "65536MiB", "134144Mi", ["66560Mi"] * 2, ["4096Mi", *["67584Mi"] * 2, *["16384Mi"] * 3]),
    ],
)
def test_host_memory_has_room_and_counts_to_its_lender(
    case: str, size: str, shared: str, requested: list[str], limits: list[str]
) -> None:
    pod = find("StatefulSet", "kvpool-vllm", case)["spec"]["template"]["spec"]
    _, *lenders = pod["initContainers"]
    assert {env(each)["KVPOOL_WORKER_HOST_MEMORY"] for each in lenders} == {size}
    (memory,) = (each["emptyDir"]["sizeLimit"] for each in pod["volumes"] if each["name"] == "memory")
    assert memory == shared, "that of all ranks, and 1 GiB for each engine"
    assert [each["resources"]["requests"]["memory"] for each in lenders] == requested
    assert [each["resources"]["limits"]["memory"] for each in containers(pod)] == limits


def test_settings_replace_those_of_the_chart() -> None:
    settings = variables(RENDERED["everything"])
    assert settings["KVPOOL_SERVE_LOG_LEVEL"] == "debug"
    assert settings["KVPOOL_SERVE_MAX_SESSIONS"] == "3000000"
    assert settings["KVPOOL_SERVE_MAX_MEMORY_BYTES"] == "0", "no maximum"
    assert settings["KVPOOL_SERVE_ALLOW_PLAINTEXT"] == "grpc metrics"
    assert settings["KVPOOL_SERVE_LISTEN"] == "0.0.0.0:50051"
    image = server_container(RENDERED["everything"])["image"]
    assert image == "registry.example.com/team/kvpool-server:0.1.0"


def test_the_server_of_a_pod_has_settings_of_its_own() -> None:
    pod = find("StatefulSet", "kvpool-vllm", "everything")["spec"]["template"]["spec"]
    settings = env(pod["initContainers"][0])
    assert settings["KVPOOL_SERVE_LOG_LEVEL"] == "warning"
    assert settings["KVPOOL_SERVE_ALLOW_PLAINTEXT"] == "metrics"
    assert settings["KVPOOL_SERVE_MAX_SESSIONS"] == "32"
    assert settings["KVPOOL_SERVE_JOURNAL"] == "/var/lib/kvpool/journal"


def test_a_journal_lives_no_longer_than_the_memory_that_it_describes() -> None:
    server, engines = (
        find("StatefulSet", f"kvpool-{each}", "claims, no policies")["spec"] for each in ("server", "vllm")
    )
    assert [name_of(claim) for claim in server["volumeClaimTemplates"]] == ["journal"]
    assert "volumeClaimTemplates" not in engines
    assert {"name": "journal", "emptyDir": {"sizeLimit": "2Gi"}} in engines["template"]["spec"]["volumes"]


def test_limits_follow_the_memory_limit() -> None:
    default, doubled = render(), render({"server": {"memoryMiB": 8192}})
    assert (memory_limit_mib(default), memory_limit_mib(doubled)) == (4096, 8192)
    limits = [
        {name: int(value) for name, value in variables(each).items() if "_MAX_" in name} for each in (default, doubled)
    ]
    message = "KVPOOL_SERVE_MAX_MESSAGE_BYTES"
    assert limits[1] == {name: value * (1 if name == message else 2) for name, value in limits[0].items()}
    assert limits[0]["KVPOOL_SERVE_MAX_MEMORY_BYTES"] == 2**30
    page = (ROOT / "docs" / "reference" / "limits.md").read_text()
    section = page.partition("## Memory of a pod\n")[2].partition("\n## ")[0]
    shown = dict(re.findall(r"^\| `--([a-z-]+)` \| ([\d,]+) \|", section, re.MULTILINE))
    assert {
        f"KVPOOL_SERVE_{name.replace('-', '_').upper()}": int(value.replace(",", "")) for name, value in shown.items()
    } == limits[0]


@pytest.mark.parametrize("case", ["default", "secured", "shard", "secured shard", "engines"])
def test_a_server_accepts_the_settings_of_its_pod(case: str, tmp_path: Path) -> None:
    container = next(each for pod in templates(case) for each in containers(pod) if each["name"] == "server")
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
    values = env(container)
    mounts = [f"{mount['mountPath']}/" for mount in container["volumeMounts"]]
    assert all(value.startswith(tuple(mounts)) for value in values.values() if value.startswith("/"))
    settings = {name: str(files.get(value, value)) for name, value in values.items()}
    settings = {name: value.replace("$(POD_NAME)", "kvpool-server-0") for name, value in settings.items()}
    of_the_image = re.findall(r'(KVPOOL_SERVE_\w+)=(?:"([^"]*)"|(\S+))', (ROOT / "Dockerfile").read_text())
    listens = {name: quoted or plain for name, quoted, plain in of_the_image if name.endswith("LISTEN")}
    settings = listens | settings
    done = kvpool("serve", "--check", **settings, **{NO_JOURNAL: ""})
    assert (done.returncode, done.stdout) == (0, "the settings are valid\n"), done.stderr


@pytest.mark.parametrize("case", CASES)
def test_notes_name_the_address_and_what_is_open(case: str) -> None:
    done = helm("install", "kvpool", CHART, "--dry-run=client", values=CASES[case])
    notes = done.stdout.partition("NOTES:\n")[2]
    names = {name_of(each) for each in RENDERED[case]}
    assert {name for name in ("kvpool-server", "kvpool-vllm") if name in notes} == names - {"kvpool"}, done.stderr
    is_shared = "kvpool-server" in names
    assert ("no tokens" in notes) is (is_shared and "tokens" not in CASES[case])
    assert ("no TLS" in notes) is (is_shared and "tls" not in CASES[case])


def documented_values() -> list[Object]:
    """The values that the documentation shows."""
    pages = [(DOCS / "how-to" / name).read_text() for name in ("deploy.md", "high-availability.md")]
    mark = f"<!-- tested: tests/compose/{Path(__file__).name} -->\n```yaml\n"
    return [yaml.safe_load(text.partition("```")[0]) for page in pages for text in page.split(mark)[1:]]


@pytest.mark.parametrize("values", documented_values())
def test_documented_values_render(values: Object) -> None:
    assert [name for name in values if render({name: values[name]}) != render()] == list(values)
    assert render(values)


@pytest.mark.slow
def test_processes_work_with_the_variables_of_their_pod(tmp_path: Path) -> None:
    """A server, a lender and two engines. The reference engine is in place of vLLM, which takes the same variables.

    The server is killed after the first engine. Its successor has the cache from the journal.
    """
    pod = find("StatefulSet", "kvpool-vllm", "engines on CPU")["spec"]["template"]["spec"]
    replaced = {
        "/var/lib/kvpool": tmp_path / "state",
        "/run/kvpool": tmp_path,
        "0.0.0.0:9464": f"127.0.0.1:{free_port()}",
        "0.0.0.0:9465": f"127.0.0.1:{free_port()}",
    }

    def here(container: Object) -> dict[str, str]:
        values = {name: value for name, value in env(container).items() if name.startswith("KVPOOL_")}
        for there, found in replaced.items():
            values = {name: value.replace(there, str(found)) for name, value in values.items()}
        return values

    def hit_tokens(engine: Mapping[str, str]) -> int:
        where = {"server": "KVPOOL_ADDRESS", "pool": "KVPOOL_POOL", "memory": "KVPOOL_MEMORY"}
        options = [f"--{name}={engine[variable].replace('{rank}', '0')}" for name, variable in where.items()]
        done = subprocess.run(
            [processes.PYTHON, "-m", "examples.reference_engine", *options, "--json"],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env=processes.environment(**engine),
            timeout=DEADLINE_SECONDS,
        )
        assert done.returncode == 0, done.stderr
        return int(json.loads(done.stdout.splitlines()[-1])["hit_tokens"])

    serving, lending = pod["initContainers"]
    assert serving["command"] == ["kvpool", "serve"]
    lent = {**here(lending), "KVPOOL_WORKER_LEND_FOLDER": str(tmp_path)}
    with (
        CommandLineServer(environment={NO_JOURNAL: "", **here(serving)}) as server,
        LoggingProcess(processes.KVPOOL, *lending["command"][1:], environment=lent) as lender,
    ):
        lender.wait_for('"lending"')
        first, second = (here(engine) for engine in pod["containers"])
        cold = hit_tokens(first)
        server.kill()
        server.restart()
        assert hit_tokens(second) > cold


@pytest.mark.parametrize("service", ["server", "kv-a", "kv-b", "lending-server", "vllm-server"])
def test_compose_has_the_limits_of_the_chart_for_its_memory(service: str) -> None:
    compose = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"][service]
    objects = render()
    assert compose["mem_limit"] == f"{memory_limit_mib(objects) // 1024}g"
    limits = {name: value for name, value in variables(objects).items() if name.startswith("KVPOOL_SERVE_MAX_")}
    assert len(limits) == 12
    assert {name: value for name, value in compose["environment"].items() if "_MAX_" in name} == limits
