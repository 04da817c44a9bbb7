"""The manifest of a PyTorchJob: against the operator's schema, and its command as pods run it.

There is no cluster here. `pytorchjob_schema.json` is the schema of Kubeflow's training operator
(kubeflow/training-operator, February 2025, Apache License 2.0), without its descriptions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch import free_port

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "examples" / "cluster" / "pytorchjob.yaml"


def problems(manifest: object) -> list[str]:
    """Return what the operator's schema says against a manifest."""
    jsonschema = pytest.importorskip("jsonschema", reason="no jsonschema")
    schema = json.loads((Path(__file__).parent / "pytorchjob_schema.json").read_text())
    validator = jsonschema.Draft202012Validator(closed(schema))
    return [error.message for error in validator.iter_errors(manifest)]


def closed(schema: Any) -> Any:
    """Return the schema as an API server reads it: fields that it does not name are errors."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if schema.get("type") == "object" and schema.get("properties"):
        found.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        found["type"] = ["integer", "string"]
    return found


def test_the_manifest_is_as_the_operator_wants_it() -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    metadata = manifest.pop("metadata")  # the API server's own, which the schema does not spell out
    assert metadata == {"name": "byte-lm"}
    assert problems({**manifest, "metadata": {}}) == []
    # it finds what is misspelled and what has the wrong type
    manifest["spec"]["nprocPerNode"] = 2
    manifest["spec"]["elasticPolicy"]["maxRestart"] = 3
    wrong = problems({**manifest, "metadata": {}})
    assert len(wrong) == 2, wrong
    assert any("'maxRestart' was unexpected" in problem for problem in wrong)


@pytest.mark.timeout(600)
def test_its_command_trains_on_all_ranks_of_all_pods(tmp_path: Path) -> None:
    """Each pod is a process group of its own, with the variables that the operator sets."""
    spec = yaml.safe_load(MANIFEST.read_text())["spec"]
    worker, policy = spec["pytorchReplicaSpecs"]["Worker"], spec["elasticPolicy"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    runs = f"hydra.run.dir={tmp_path}/runs"
    words = [runs if word.startswith("hydra.run.dir=") else word for word in container["command"]]
    assert runs in words and words[0] == "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    command += ["trainer.max_epochs=1", "trainer.limit_train_batches=4", "data.batch_size=2"]
    command += ["trainer.limit_val_batches=2", "trainer.accelerator=cpu"]
    environment = {
        **os.environ,
        **{each["name"]: each["value"] for each in container["env"]},
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "PYTHONUNBUFFERED": "1",
        "PET_NPROC_PER_NODE": spec["nprocPerNode"],
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",  # of byte-lm-worker-0
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
    }
    logs = [tmp_path / f"pod{index}.log" for index in range(worker["replicas"])]
    pods = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for log in logs
    ]
    try:
        ended = [pod.wait(timeout=400) for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert ended == [0] * len(pods), "\n".join(log.read_text()[-3000:] for log in logs)
    record = json.loads((tmp_path / "runs" / "run.json").read_text())
    assert record["world_size"] == worker["replicas"] * int(spec["nprocPerNode"])
    assert 0 < record["metrics"]["val_bits_per_byte"] < 9
