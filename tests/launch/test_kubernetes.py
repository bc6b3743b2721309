"""The manifests: valid by the published API, and the command that they give is one that runs."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest
import yaml
from helpers import LONG
from helpers.resumed import losses
from helpers.started import StartedRun, own_recipe

from trainer import cli

LAUNCH = Path(__file__).parents[2] / "launch"
SCHEMA = json.loads((Path(__file__).parent / "schemas" / "kubeflow.json").read_text())
API = {
    "PersistentVolumeClaim": "v1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "TrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "PyTorchJob": "kubeflow.org/v1",
}
SETTINGS = """
    model=Disturbed("custom", patch_size=4, layers=1, heads=2, width=16, mlp_width=32, dropout=0.1),
    optim=Optim("sgd", lr=0.1, momentum=0.9),
    batch_size=50,
    max_steps=400,
    memory=Memory(micro_batch_size=5),
"""
DOCUMENTS = [
    (path.name, document)
    for path in sorted(LAUNCH.glob("kubernetes*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]
IDS = [f"{name}-{document['kind']}" for name, document in DOCUMENTS]


def of_kind(kind):
    return next(document for _, document in DOCUMENTS if document["kind"] == kind)


def problems(document):
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    schema = SCHEMA | {"$ref": f"#/$defs/{document['kind']}"}
    return [f"{error.json_path}: {error.message}" for error in validator(schema).iter_errors(document)]


def pods():
    """Every pod of the manifests by its name: its spec, and the container that trains."""
    job = of_kind("TrainJob")["spec"]
    patch = job["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    specs = {"TrainJob": patch["template"]["spec"]["template"]["spec"]}
    for name, replica in of_kind("PyTorchJob")["spec"]["pytorchReplicaSpecs"].items():
        specs[name] = replica["template"]["spec"]
    own = {"TrainJob": job["trainer"]}
    return {name: (spec, spec["containers"][0] | own.get(name, {})) for name, spec in specs.items()}


@pytest.mark.parametrize(("name", "document"), DOCUMENTS, ids=IDS)
def test_manifests_are_valid_by_the_published_api(name, document):
    assert document["apiVersion"] == API[document["kind"]]
    assert problems(document) == [], name


def test_the_schema_finds_what_an_api_server_would_refuse():
    job = json.loads(json.dumps(of_kind("TrainJob")))
    job["spec"]["trainer"]["numNode"] = job["spec"]["trainer"].pop("numNodes")
    del job["spec"]["runtimeRef"]
    job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["replicas"] = "2"
    assert len(problems(job)) == 3
    claim = json.loads(json.dumps(of_kind("PersistentVolumeClaim")))
    claim["spec"]["accessModes"] = "ReadWriteMany"
    assert len(problems(claim)) == 1


@pytest.mark.parametrize("pod", pods())
def test_the_flags_are_those_of_the_trainer(pod, capsys):
    _, container = pods()[pod]
    command, args = container["command"], container["args"]
    assert command[0] == "torchrun"
    assert command[-2:] == ["-m", "trainer"]
    assert cli.run([*args, "--print_config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["run"]["dir"].startswith("/runs/")
    assert printed["run"]["resume"] == "auto"
    assert printed["checkpoint"]["every"] == "10min"


@pytest.mark.parametrize("pod", pods())
def test_a_pod_has_what_training_needs(pod):
    spec, container = pods()[pod]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    places = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    claim = of_kind("PersistentVolumeClaim")
    assert places["/runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert places["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    # torchrun must have ended its ranks before the pod is killed.
    command = container["command"]
    to_save = int(command[command.index("--shutdown-timeout") + 1])
    assert spec["terminationGracePeriodSeconds"] >= to_save + 30
    assert spec["securityContext"]["runAsNonRoot"]
    image = (LAUNCH / "Dockerfile").read_text()
    assert f"USER {spec['securityContext']['runAsUser']}:{spec['securityContext']['fsGroup']}" in image
    assert {"/runs", "/cache"} <= places.keys()
    assert re.search(r"HF_HOME=/cache/", image)


def test_a_train_job_can_name_the_runtime_with_rules_for_restarts():
    runtime = of_kind("TrainingRuntime")
    comment = (LAUNCH / "kubernetes.yaml").read_text()
    assert f"kind TrainingRuntime, name {runtime['metadata']['name']}" in comment
    job = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]
    assert job["name"] == "node"  # what patches and the runtime's plugin look for
    rules = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert [rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule] == [[75]]
    assert job["template"]["spec"]["template"]["spec"]["restartPolicy"] == "Never"


def start_pods(folder, run_dir, port):
    """What the runtime starts in each of two pods, as processes: the manifest's command with its variables."""
    _, container = pods()["TrainJob"]
    words = [sys.executable, "-m", "torch.distributed.run", *container["command"][1:], *container["args"]]
    words[words.index("vit_digits")] = str(folder / "own.py")
    words[words.index("/runs/vit-digits")] = str(run_dir)
    # Both are on this machine, whose own name may lead nowhere.
    variables = ["GLOO_SOCKET_IFNAME=lo", "PET_MASTER_ADDR=127.0.0.1", f"PET_MASTER_PORT={port}"]
    variables += ["PET_NNODES=2", "PET_NPROC_PER_NODE=1"]
    places = [folder / f"{port}-{rank}" for rank in range(2)]
    for place in places:
        place.mkdir()
    return [StartedRun(place, ["env", *variables, f"PET_NODE_RANK={n}", *words]) for n, place in enumerate(places)]


def printed(started):
    return "\n".join(pod.text for pod in started)


@pytest.mark.slow
def test_pods_that_are_evicted_save_and_go_on(tmp_path):
    """Two torchruns with the runtime's variables; SIGTERM, as the kubelet sends it, then the same again."""
    own_recipe(tmp_path, SETTINGS)
    undisturbed = start_pods(tmp_path, tmp_path / "whole", 29611)
    assert [pod.wait() for pod in undisturbed] == [0, 0], printed(undisturbed)
    first = start_pods(tmp_path, tmp_path / "run", 29612)
    assert first[0].until(lambda: "step 1/400" in printed(first), LONG), printed(first)
    for pod in first:
        pod.process.send_signal(signal.SIGTERM)
    assert 0 not in [pod.wait() for pod in first], printed(first)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "stopped", printed(first)
    again = start_pods(tmp_path, tmp_path / "run", 29613)
    assert [pod.wait() for pod in again] == [0, 0], printed(again)
    assert "resuming from" in printed(again)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["world_size"] == 2
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
