import os
import socket
import subprocess
import sys
import time

import pytest

from fp4zoo.errors import UserError
from fp4zoo.training.cluster import Cluster, ClusterConfig, Launch, find_launch

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[001-002]",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"}


def flags(**options):
    return ClusterConfig(**options)


@pytest.mark.parametrize(
    ("config", "environment", "expected"),
    [
        (flags(), {}, None),
        (
            flags(coordinator="a:1", num_processes=2, process_id=1),
            {},
            Launch("a:1", 2, 1, [], "deactivate"),
        ),
        # One task for each GPU, and one for each host, which takes all of its GPUs.
        (flags(), SLURM, Launch(None, 16, 9, [1], "slurm")),
        (
            flags(),
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x16)", "SLURM_LOCALID": "0"},
            Launch(None, 16, 9, [], "slurm"),
        ),
        (flags(), SLURM | {"CUDA_VISIBLE_DEVICES": "3"}, Launch(None, 16, 9, [], "slurm")),
        (
            flags(),
            SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
            Launch(None, 16, 9, [1], "slurm"),
        ),
        (flags(), SLURM | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, Launch(None, 16, 9, None, "slurm")),
        # A batch script itself, and a job of one task.
        (flags(), {k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}, None),
        (flags(), SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        (flags(launcher="none"), SLURM, None),
        (
            flags(coordinator="a:1"),
            OPEN_MPI,
            Launch("a:1", 4, 3, [1], "deactivate"),
        ),
        (
            flags(),
            OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:3"},
            Launch(None, 4, 3, [1], "ompi"),
        ),
        (
            flags(coordinator="a:1"),
            {"PMI_SIZE": "2", "PMI_RANK": "0"},
            Launch("a:1", 2, 0, [], "deactivate"),
        ),
        (flags(), {"PMI_SIZE": "1", "PMI_RANK": "0"}, None),
        (
            flags(coordinator="job-0.svc:1", num_processes=4),
            KUBERNETES,
            Launch("job-0.svc:1", 4, 2, [], "deactivate"),
        ),
        (flags(launcher="mpi4py"), {}, Launch(None, None, None, None, "mpi4py")),
    ],
)
def test_how_a_process_joins(config, environment, expected):
    assert find_launch(config, environment) == expected


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        ({"coordinator": "a:1"}, {}, "cluster.coordinator=a:1 needs cluster.num_processes"),
        ({"coordinator": "a:1", "num_processes": 2}, {}, "needs cluster.process_id"),
        ({"num_processes": 2}, {}, "cluster.num_processes=2 needs cluster.coordinator"),
        ({}, OPEN_MPI, "MPI started 4 processes but does not say where they meet"),
        ({}, {"PMI_SIZE": "2", "PMI_RANK": "0"}, "give cluster.coordinator=host:port"),
        ({"launcher": "slurm"}, {}, "SLURM_NTASKS is not in the environment"),
        ({"launcher": "k8s"}, {}, "JOB_COMPLETION_INDEX is not in the environment"),
        ({}, KUBERNETES, "a pod of an indexed Kubernetes job"),
    ],
)
def test_an_environment_that_says_too_little(monkeypatch, options, environment, message):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=message):
        find_launch(ClusterConfig(**options), environment)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coordinator": "node001"}, "must be host:port"),
        ({"coordinator": "node001:99999"}, "must be host:port"),
        ({"num_processes": 0}, "cluster.num_processes=0 must be at least 1"),
        ({"process_id": -1}, "cluster.process_id=-1 must not be negative"),
        ({"num_processes": 2, "process_id": 2}, "cluster.process_id=2 must be below"),
        ({"timeout": 0}, "cluster.timeout=0 must be at least 1 second"),
    ],
)
def test_impossible_flags_are_named(options, message):
    with pytest.raises(UserError, match=message):
        ClusterConfig(**options)


def test_one_process_agrees_with_itself():
    cluster = Cluster()
    assert cluster.is_first and cluster.gather(7) == [7]
    assert cluster.from_first(lambda: "runs/x") == "runs/x"
    assert cluster.in_turn(lambda: object) is object
    cluster.check_same({"seed": 1}, "the configuration")
    with pytest.raises(UserError, match="^mine$"), cluster.together():
        raise UserError("mine")


# Several processes: only what they tell one another.


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_processes(program, count, *, present=None, timeout=60):
    address = f"127.0.0.1:{free_port()}"
    return [
        subprocess.Popen(
            [sys.executable, "-c", program, address, str(count), str(index), str(timeout)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        for index in (range(count) if present is None else present)
    ]


def finish(processes):
    try:
        results = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        (process.returncode, output, error)
        for process, (output, error) in zip(processes, results, strict=True)
    ]


HEAD = """
import sys
from fp4zoo.errors import SaidElsewhere, UserError
from fp4zoo.training.cluster import ClusterConfig, start
address, count, index, timeout = sys.argv[1], *map(int, sys.argv[2:5])
cluster = start(ClusterConfig(address, count, index, timeout=timeout))
"""


def test_what_processes_tell_one_another():
    program = (
        HEAD
        + """
assert cluster.gather(index * 10) == [0, 10]
assert cluster.from_first(lambda: f"by {index}") == "by 0"
made = []
assert cluster.in_turn(lambda: made.append(index) or "text") == "text"
cluster.check_same({"seed": 1, "sizes": (1, 2)}, "the configuration")

def failing(action):
    try:
        action()
    except SaidElsewhere as error:
        return f"silent: {error}"
    except UserError as error:
        return f"says: {error}"

def only_in_the_second():
    with cluster.together():
        if index == 1:
            raise UserError("no such file")

other = failing(lambda: cluster.check_same({"seed": 1 + index, "a": 0}, "the configuration"))
alone = failing(only_in_the_second)
if index == 0:
    assert other.startswith("says: process 1: the configuration differs between processes: seed=2")
    assert alone == "says: process 1: no such file", alone
else:
    assert other.startswith("silent: ") and alone == "silent: no such file", (other, alone)
cluster.leave()
print("well")
"""
    )
    for status, output, error in finish(start_processes(program, 2)):
        assert (status, output) == (0, "well\n"), error


def test_processes_that_are_not_found_end_in_time_with_one_line():
    begin = time.monotonic()
    first, second = (start_processes(HEAD, 2, present=[index], timeout=1)[0] for index in (0, 1))
    results = finish([first, second])
    assert time.monotonic() - begin < 60
    (status, _, error), (status_of_second, _, error_of_second) = results
    assert status == status_of_second == 2
    assert error.startswith("error: process 0 waited cluster.timeout=1 s at 127.0.0.1:")
    assert error_of_second.startswith("error: process 1 cannot reach the coordinator 127.0.0.1:")
    assert error.count("\n") == error_of_second.count("\n") == 1


@pytest.mark.slow
def test_a_failure_of_one_process_alone_ends_all():
    program = (
        HEAD
        + """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
cluster.gather(len(jax.devices()))
if index == 1:
    cluster.end_if_alone(OSError("disk full"))
sharding = NamedSharding(Mesh(np.array(jax.devices()), "x"), PartitionSpec("x"))
ones = jax.make_array_from_callback((2,), sharding, lambda place: np.ones(1))
print(float(jax.jit(jnp.sum)(ones)))
"""
    )
    first, second = finish(start_processes(program, 2))
    assert second[0] == 1 and "error: process 1: disk full" in second[2]
    assert first[0] != 0 and not first[1]
