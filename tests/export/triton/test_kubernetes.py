"""The Deployment in the documentation asks for what the served model has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import ROOT
from via_sd.contract.served_model import INPUTS
from via_sd.runtime.triton.metrics import GAUGES, PREFIX

MANIFESTS = ROOT / "docs" / "kubernetes" / "via-sd.yaml"


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    """The documents of the file, by kind."""
    yaml = pytest.importorskip("yaml")
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFESTS.read_text(encoding="utf-8"))}


@pytest.fixture(scope="module")
def container(manifests: dict[str, Any]) -> dict[str, Any]:
    (only,) = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(only)


def test_service_and_autoscaler_mean_the_deployment(manifests: dict[str, Any], container: dict[str, Any]) -> None:
    deployment = manifests["Deployment"]
    assert manifests["Service"]["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert deployment["spec"]["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]
    target = manifests["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == (deployment["kind"], deployment["metadata"]["name"])
    ports = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in manifests["Service"]["spec"]["ports"]} == ports


def test_it_scales_on_figures_that_the_model_keeps(manifests: dict[str, Any]) -> None:
    names = [each["pods"]["metric"]["name"] for each in manifests["HorizontalPodAutoscaler"]["spec"]["metrics"]]
    assert names
    assert {name.removeprefix(PREFIX) for name in names} <= set(GAUGES)


def test_the_liveness_probe_sends_a_request_that_the_model_takes(container: dict[str, Any]) -> None:
    command = container["livenessProbe"]["exec"]["command"]
    body = json.loads(command[command.index("--data") + 1])
    assert set(body) <= {spec.name for spec in INPUTS}
    assert {spec.name for spec in INPUTS if not spec.optional} <= set(body)
    assert container["livenessProbe"]["timeoutSeconds"] > float(command[command.index("--max-time") + 1])


def test_a_replica_has_the_time_to_finish_what_it_began(manifests: dict[str, Any], container: dict[str, Any]) -> None:
    (exit_timeout,) = [arg for arg in container["args"] if arg.startswith("--exit-timeout-secs=")]
    grace = manifests["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > int(exit_timeout.partition("=")[2])
