"""Launch files: their syntax, and that what they name exists and agrees. Nothing is started."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from deepspeed.launcher.runner import fetch_hostfile

from ds_hydra.environment import WANTED

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "examples" / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])
JOBS = sorted(LAUNCH.glob("*.yaml"))


def configuration_of(text):
    """Path of the one DeepSpeed JSON that a launch file names, and the GPUs in its name."""
    (path,) = set(re.findall(r"ds_hydra/configs/deepspeed/\S+?\.json", text))
    assert (ROOT / path).is_file(), path
    return path, int(re.search(r"_(\d+)gpus", path)[1])


def assert_files_exist(text):
    for path in re.findall(
        r"examples/[\w/]+\.(?:py|sh|sbatch|yaml)\b|examples/launch/hostfile\b", text
    ):
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_parse_and_name_files_that_exist(script):
    result = subprocess.run(
        ["bash", "-n", str(script)], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    text = script.read_text()
    configuration_of(text)
    assert_files_exist(text)
    assert text.startswith("#!/usr/bin/env bash\n")


def test_scripts_check_the_configuration_for_the_ranks_they_start():
    for script in SCRIPTS:
        _, gpus = configuration_of(script.read_text())
        assert f"--devices {gpus}" in script.read_text()
    slurm = (LAUNCH / "slurm.sbatch").read_text()
    nodes, per_node = (
        int(re.search(rf"--{key}[= ](\d+)", slurm)[1]) for key in ("nodes", "gpus-per-node")
    )
    assert nodes * per_node == configuration_of(slurm)[1]
    assert f"--nproc-per-node {per_node}" in slurm


def test_the_hostfile_is_read_by_deepspeed_and_has_the_ranks_of_its_script():
    slots = fetch_hostfile(str(LAUNCH / "hostfile"))
    assert sum(slots.values()) == configuration_of((LAUNCH / "several_nodes.sh").read_text())[1]


def settings_of(path):
    """Variables that a launch file gives to every rank."""
    text = path.read_text()
    if path.suffix == ".yaml":
        (job,) = yaml.safe_load_all(text)
        found = [
            f"{variable['name']}={variable['value']}"
            for _, container in containers(job)
            for variable in container.get("env", [])
        ]
    else:
        found = [w for line in text.splitlines() if "export" in line for w in shlex.split(line)]
        named = re.search(r"DS_ENV_FILE:-(\S+)}", text)
        found += (ROOT / named[1]).read_text().splitlines() if named else []
    return set(found)


@pytest.mark.parametrize("path", [*SCRIPTS, *JOBS], ids=lambda path: path.name)
def test_every_rank_gets_the_settings_of_cuda(path):
    assert {f"{name}={value}" for name, value in WANTED.items()} <= settings_of(path)


def containers(job):
    """Every container of a Kubeflow job with the number of its pods."""
    specs = next(value for key, value in job["spec"].items() if key.endswith("ReplicaSpecs"))
    for replica in specs.values():
        for container in replica["template"]["spec"]["containers"]:
            yield replica["replicas"], container


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_kubernetes_jobs_parse_and_have_the_gpus_of_their_configuration(path):
    (job,) = yaml.safe_load_all(path.read_text())
    assert {"apiVersion", "kind", "metadata", "spec"} <= job.keys()
    config, gpus = configuration_of(path.read_text())
    assert_files_exist(path.read_text())
    limits = [
        count * int(container["resources"]["limits"]["nvidia.com/gpu"])
        for count, container in containers(job)
        if "resources" in container
    ]
    assert sum(limits) == gpus
    commands = [container["command"] for _, container in containers(job) if "command" in container]
    assert all(isinstance(part, str) for command in commands for part in command)
    assert all(f"--ds_config={config}" in command for command in commands)
    spec = job["spec"]
    assert int(spec["nprocPerNode"]) * len(limits) == gpus
    for _, container in containers(job):
        volumes = {mount["name"] for mount in container.get("volumeMounts", [])}
        assert volumes == {"runs", "shm"}


def test_the_arguments_of_the_example_are_those_it_takes():
    """Options that launch files pass, against the example's own parser."""
    source = (ROOT / "examples/llama2_github/train.py").read_text() + (
        ROOT / "examples/common.py"
    ).read_text()
    known = set(re.findall(r'add_argument\(\s*"(--\w+)"', source))
    for path in [*SCRIPTS, *JOBS]:
        after = path.read_text().split("examples/llama2_github/train.py")[1:]
        for text in after:
            assert set(
                re.findall(r"(--[a-z_]+)[ =]", text.split("esac")[0].split("case")[0])
            ) <= known | {
                "--devices",
                "--model",
            }, path


def test_the_readme_names_every_file():
    text = (LAUNCH / "README.md").read_text()
    for path in LAUNCH.iterdir():
        assert path.name == "README.md" or f"`{path.name}`" in text


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_ranks_have_cores_of_their_own_where_the_launcher_can_give_them(script):
    text = script.read_text()
    options = {"torchrun": "--numa-binding=node", "deepspeed": "--bind_cores_to_rank"}
    started = [
        name for name in options if re.search(rf"^(srun .*|exec .*|.*\(){name} ", text, re.M)
    ]
    assert started
    assert all(options[name] in text for name in started)
    assert "command -v numactl" in text
