"""The recipes in deploy/, whose settings Ray, KubeRay, SLURM and fedsweep's command line accept."""

import json
import re
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml

from fedsweep import cli

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
TUNE: Any = typer.main.get_command(cli.app).commands["tune"]  # type: ignore[attr-defined]
# The fields of KubeRay's ray.io/v1 that the recipes use, with their types (its API reference, v1.5.1 to v1.7.1).
CLUSTER: dict[str, type] = {
    "rayVersion": str,
    "authOptions": dict,
    "enableInTreeAutoscaling": bool,
    "autoscalerOptions": dict,
    "headGroupSpec": dict,
    "workerGroupSpecs": list,
}
JOB: dict[str, type] = {
    "entrypoint": str,
    "submissionMode": str,
    "backoffLimit": int,
    "shutdownAfterJobFinishes": bool,
    "ttlSecondsAfterFinished": int,
    "rayClusterSpec": dict,
}
WORKERS: dict[str, type] = {
    "groupName": str,
    "replicas": int,
    "minReplicas": int,
    "maxReplicas": int,
    "rayStartParams": dict,
    "template": dict,
}
MEMORY = re.compile(r"\d+(Ki|Mi|Gi|Ti)")


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def cluster_of(name: str) -> dict[str, Any]:
    manifest = read(name)
    return manifest["spec"] if manifest["kind"] == "RayCluster" else manifest["spec"]["rayClusterSpec"]


def fields_are(found: dict[str, Any], known: dict[str, type]) -> None:
    for field, value in found.items():
        assert isinstance(value, known[field]), f"{field}: {value}"


def parsed(command: str) -> dict[str, Any]:
    """Return the options of `fedsweep tune ...` as the command line parses them."""
    words = shlex.split(command)
    assert words[:2] == ["fedsweep", "tune"]
    return TUNE.make_context("tune", words[2:]).params


def test_every_recipe_is_checked_and_named_by_the_page():
    page = (ROOT / "docs" / "cluster.md").read_text()
    names = sorted(path.name for path in DEPLOY.iterdir())
    kuberay = ["kuberay_cluster.yaml", "kuberay_job.yaml", "kuberay_storage.yaml"]
    assert names == ["Dockerfile", *kuberay, "ray_cluster.yaml", "slurm.sh"]
    assert all(f"deploy/{name}" in page for name in names)


def test_the_cluster_yaml_follows_rays_schema():
    from ray.autoscaler._private.util import prepare_config, validate_config

    package = find_spec("ray").submodule_search_locations[0]
    schema = json.loads((Path(package) / "autoscaler" / "ray-schema.json").read_text())
    recipe = read("ray_cluster.yaml")
    jsonschema.validate(recipe, schema)
    with pytest.raises(jsonschema.ValidationError):  # shows that the schema checks this field
        jsonschema.validate({**recipe, "max_worker": 2}, schema)
    whole = prepare_config(recipe)  # as `ray up` completes it
    validate_config(whole)
    assert whole["max_workers"] == len(recipe["provider"]["worker_ips"])
    for role in ("head", "worker"):
        starts = [one for one in recipe[f"{role}_start_ray_commands"] if "ray start" in one]
        assert starts
        assert all(one.startswith("RAY_AUTH_MODE=token ") for one in starts)


@pytest.mark.parametrize("name", ["kuberay_job.yaml", "kuberay_cluster.yaml"])
def test_kuberay_manifests_have_only_fields_of_kuberay(name: str):
    manifest, cluster = read(name), cluster_of(name)
    assert manifest["apiVersion"] == "ray.io/v1"
    fields_are(cluster, CLUSTER)
    if manifest["kind"] == "RayJob":
        fields_are(manifest["spec"], JOB)
        assert manifest["spec"]["submissionMode"] in ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")
        given = parsed(manifest["spec"]["entrypoint"])
        assert given["address"] == "auto"
        assert given["at_once"] > 1  # workers begin at 0, so the number of trials must be requested
    assert cluster["authOptions"] == {"mode": "token"}
    fields_are(cluster["headGroupSpec"], {"rayStartParams": dict, "template": dict})
    assert cluster["workerGroupSpecs"]
    for group in cluster["workerGroupSpecs"]:
        fields_are(group, WORKERS)
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


@pytest.mark.parametrize("name", ["kuberay_job.yaml", "kuberay_cluster.yaml"])
def test_pods_share_a_store_and_request_as_much_as_their_limits(name: str):
    cluster, claim = cluster_of(name), read("kuberay_storage.yaml")
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    for pod in pods:
        (container,) = pod["containers"]
        assert container["image"] == pods[0]["containers"][0]["image"]
        asked, limit = container["resources"]["requests"], container["resources"]["limits"]
        assert asked == limit  # Ray counts the limit; a node that promises more than it has is slowed or killed
        assert {"cpu", "memory"} <= asked.keys() <= {"cpu", "memory", "nvidia.com/gpu"}
        assert all(isinstance(value, str) for value in asked.values())
        assert MEMORY.fullmatch(asked["memory"])
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() == volumes.keys()
        assert volumes["shared"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert mounts["shared"] == "/shared"
        for variable in container["env"]:
            assert variable["value"].startswith(tuple(mounts.values())), "a path must be inside a mounted folder"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    head, *workers = pods
    assert "nvidia.com/gpu" not in head["containers"][0]["resources"]["limits"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert [pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for pod in workers] == ["1"]


def test_both_kuberay_manifests_describe_the_same_cluster():
    assert cluster_of("kuberay_job.yaml") == cluster_of("kuberay_cluster.yaml")


STUBS = {
    "scontrol": '[ "$1" = show ] && echo node1 || echo "$*" >> requeued',
    "srun": 'case "$*" in *hostname*) echo 10.0.0.1 ;; *) exec sleep 60 ;; esac',
    "ray": "exit 0",
    "python": "cat > /dev/null; echo token",
    "fedsweep": """echo "$*" > called
while [ "$1" != --id-file ]; do shift; done
[ -n "$STARTED" ] && echo "$STARTED" > "$2"
[ -n "$FINISH" ] && exit 0
trap 'exit 143' TERM
kill -"$SIGNAL" "$PPID"
while :; do sleep 0.05; done""",
}
"""Programs in place of those that the SLURM script calls, as shell scripts."""


def slurm(folder: Path, *options: str, **variables: str) -> tuple[int, str, bool]:
    """Run the SLURM script without SLURM, with `options` for the sweep, and with the environment `variables`.

    Returns:
        The exit code, the arguments of `fedsweep`, and whether the job was queued again.
    """
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "activate").touch()
    for name, body in STUBS.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    (folder / "requeued").unlink(missing_ok=True)
    job = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_NODELIST": "n"}
    path = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "FEDSWEEP_ENV": str(folder),
        "HOME": str(folder),
        "TMPDIR": str(folder),
    }
    done = subprocess.run(
        ["bash", DEPLOY / "slurm.sh", "tiny", *options],
        env={"FINISH": "", "STARTED": "", "SIGNAL": "INT", **path, **job, **variables},
        cwd=folder,
        capture_output=True,
        timeout=60,
    )
    return done.returncode, (folder / "called").read_text().strip(), (folder / "requeued").exists()


def test_the_slurm_script_queues_the_job_again_and_resumes_its_own_sweep(tmp_path: Path):
    end = "--id-file .fedsweep_job_7 --address 10.0.0.1:20007"
    new = f"tune tiny --fresh --seeds 0 {end}"
    mine = f"tune tiny --seeds 0 --resume --sweep mine {end}"
    options = ("--fresh", "--seeds", "0")
    assert slurm(tmp_path, *options) == (143, new, True)  # the time limit
    assert slurm(tmp_path, *options, SLURM_RESTART_COUNT="1", STARTED="mine") == (143, new, True)  # there was no sweep
    other = tmp_path / "mlruns" / "sweeps" / "tiny" / "newer" / "sweep.json"  # of another job
    other.parent.mkdir(parents=True)
    other.touch()
    for given in (options, ("--seeds", "0", "--resume"), ("--sweep", "mine", "--seeds", "0", "--resume")):
        assert slurm(tmp_path, *given, SLURM_RESTART_COUNT="2") == (143, mine, True)
    assert slurm(tmp_path, *options, SLURM_RESTART_COUNT="3", SIGNAL="TERM") == (143, mine, False)  # scancel
    assert slurm(tmp_path, *options, FINISH="yes") == (0, new, False)
    assert not list(tmp_path.glob(".fedsweep_job_*")) + list(tmp_path.glob(".ray_token_*"))
    given = parsed(f"fedsweep {mine}")
    assert (given["resume"], given["sweep"], given["fresh"]) == (True, "mine", False)


def test_the_slurm_script_is_bash_and_requests_what_it_uses():
    path = DEPLOY / "slurm.sh"
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text()
    lines = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE)
    assert len(lines) == text.count("#SBATCH")
    asked = dict(lines)
    assert "requeue" in asked
    assert asked["open-mode"] == "append"  # the log of the first start is kept
    assert asked["ntasks-per-node"] == "1"  # one Ray on each node
    assert int(asked["nodes"]) > 1
    assert {"cpus-per-task", "gpus-per-node", "mem", "exclusive"} <= asked.keys()
    assert re.fullmatch(r"\d+:\d\d:\d\d", asked["time"])
    assert re.fullmatch(r"B:INT@\d+", asked["signal"])
    assert text.index("#SBATCH") < text.index("set -euo pipefail")  # SLURM ignores lines after the first command
    example = re.search(r"sbatch deploy/slurm.sh (.+)$", text, re.MULTILINE)
    assert example is not None
    assert parsed(f"fedsweep tune {example[1]} --resume --address 10.0.0.1:6379")["address"] == "10.0.0.1:6379"
