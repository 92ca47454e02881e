"""The files that start a run on a cluster: what can be checked of them without one."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fp4zoo import configs, train
from fp4zoo.training.cluster import find_launch

FOLDER = Path(train.__file__).parent / "examples" / "cluster"
SBATCH = (FOLDER / "train.sbatch").read_text()
JOBSET = (FOLDER / "jobset.yaml").read_text()
FLAGS = re.findall(r"--xla_[a-z_]+=\w+", SBATCH)


@pytest.mark.parametrize("name", ["loopback.sh", "train.sbatch"])
def test_scripts_are_bash(name):
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)
    assert "set -euo pipefail" in (FOLDER / name).read_text()


def test_the_batch_script_asks_for_what_the_program_needs():
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", SBATCH, re.MULTILINE))
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == (
        "4",
        "1",
        "8",
    )
    signal, _, seconds = options["signal"].partition("@")
    assert signal == "TERM" and int(seconds) >= 120  # to the processes, not to the script
    assert "srun --kill-on-bad-exit=1 fp4zoo-train" in SBATCH
    environment = {
        "SLURM_STEP_NODELIST": "node[1-4]",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
    }
    config = configs.load(["model=llama-3-8b", "precision=nvfp4", "output_dir=runs/fp4zoo"])
    launch = find_launch(config.cluster, environment)
    assert launch is not None and launch.local_devices == []  # all eight
    assert (launch.num_processes, launch.process_id) == (4, 3)


def test_the_jobset_is_one_run():
    jobset = yaml.safe_load(JOBSET)
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (workers,) = jobset["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    assert job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"] == 4
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy wants it
    program, *overrides = container["command"]
    assert program == "fp4zoo-train"
    config = configs.load(overrides)
    # The pod that JobSet names so: JOBSET-REPLICATEDJOB-JOB-POD, in the subdomain JOBSET.
    name = f"{jobset['metadata']['name']}-{workers['name']}-0-0.{jobset['metadata']['name']}"
    assert config.cluster.coordinator == f"{name}:{container['ports'][0]['containerPort']}"
    environment = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"}
    launch = find_launch(config.cluster, environment)
    assert launch is not None
    assert (launch.num_processes, launch.process_id, launch.local_devices) == (4, 2, [])
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    values = {variable["name"]: variable["value"] for variable in container["env"]}
    assert values["XLA_FLAGS"].split() == FLAGS
    assert values["FP4ZOO_CACHE"].startswith(mounts["data"])


def test_xla_knows_the_flags():
    """XLA ends a process whose XLA_FLAGS it does not know; so does a CPU's."""
    code = "import jax; print(len(jax.devices()))"
    for flags, known in ((FLAGS, True), ([*FLAGS, "--xla_gpu_no_such_flag=1"], False)):
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)},
            capture_output=True,
        )
        assert (result.returncode == 0) == known, result.stderr
    assert len(FLAGS) == 4


def test_the_page_explains_every_setting():
    page = (Path(train.__file__).parent / "docs" / "cluster.md").read_text()
    names = [flag.partition("=")[0] for flag in FLAGS]
    names += re.findall(r"export (\w+)=", SBATCH) + re.findall(
        r"^#SBATCH (--[a-z-]+)", SBATCH, re.M
    )
    ignored = {
        "--job-name",
        "--nodes",
        "--time",
        "--output",
        "--cpus-per-task",
        "--exclusive",
        "XLA_FLAGS",
    }
    for name in set(names) - ignored:
        assert f"`{name}" in page, name


@pytest.mark.slow
def test_the_loopback_script_trains(tmp_path):
    shutil.copy(__file__, tmp_path / "text.txt")
    options = [
        "precision=fp32",
        "model.vocab_size=272",
        "model.num_layers=1",
        "model.embed_dim=32",
        "model.num_heads=2",
        "model.num_kv_heads=1",
        "model.head_dim=16",
        "model.mlp_dim=64",
        f"data.path={tmp_path / 'text.txt'}",
        "data.tokenizer=bytes",
        "data.validation_fraction=0",
        "batch_size=2",
        "sequence_length=32",
        "max_steps=2",
        "sample_tokens=0",
        f"output_dir={tmp_path / 'run'}",
    ]
    result = subprocess.run(
        [str(FOLDER / "loopback.sh"), "2", *options],
        env={**os.environ, "PYTHON": sys.executable, "FP4ZOO_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stderr
    assert "2 x cpu in 2 processes" in result.stdout and "step 2/2" in result.stdout
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["2"]
    result = subprocess.run(
        [str(FOLDER / "loopback.sh"), "2", *options, "mesh.tensor=3"],
        env={**os.environ, "PYTHON": sys.executable, "FP4ZOO_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 2 and result.stderr.count("error: ") == 1
