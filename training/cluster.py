"""Several processes, one run: how they find one another, and how they agree.

JAX connects them (`jax.distributed`): as Slurm, MPI or Kubernetes started them, or as explicit
flags say. Everything here that processes tell one another goes through JAX's coordination service,
a small key-value store in process 0, before and beside the collectives of the training step. With
one process all of it is trivial.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..errors import SaidElsewhere, UserError
from .signals import StopRequest

T = TypeVar("T")

_HEARTBEAT_SECONDS = 60  # after which a process that died is noticed by the others
_POLL_MILLISECONDS = 60_000
_PATIENCE_SECONDS = 10  # until a process that failed takes itself to be the only one
_FOREVER = 1 << 30  # seconds

# Variables of launchers: number of processes, this one's number; on this host likewise.
_LAUNCHERS: dict[str, tuple[str, str, str, str]] = {
    "slurm": ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"),
    "ompi": (
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    "pmi": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
}


@dataclass(frozen=True)
class ClusterConfig:
    """The processes of a run. All null: one process, or as Slurm, Open MPI or Kubernetes say.

    Attributes:
      coordinator: host:port on which process 0 listens; null takes the launcher's.
      num_processes: number of processes; null takes the launcher's.
      process_id: number of this process, from 0; null takes the launcher's.
      launcher: who started the processes; auto looks for Slurm (srun), Open MPI and an indexed
        Kubernetes job, mpi4py asks an installed mpi4py, none is a single process whatever the
        environment says.
      timeout: seconds until processes that do not find one another give up.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    launcher: Literal["auto", "slurm", "ompi", "mpi4py", "k8s", "none"] = "auto"
    timeout: int = 300

    def __post_init__(self) -> None:
        if self.coordinator is not None:
            host, _, port = self.coordinator.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 65536:
                raise UserError(
                    f"cluster.coordinator={self.coordinator} must be host:port, such as "
                    "node001:12345"
                )
        if self.num_processes is not None and self.num_processes < 1:
            raise UserError(f"cluster.num_processes={self.num_processes} must be at least 1")
        if self.process_id is not None and self.process_id < 0:
            raise UserError(f"cluster.process_id={self.process_id} must not be negative")
        if self.process_id is not None and self.num_processes is not None:
            if self.process_id >= self.num_processes:
                raise UserError(
                    f"cluster.process_id={self.process_id} must be below "
                    f"cluster.num_processes={self.num_processes}: they count from 0"
                )
        if self.timeout < 1:
            raise UserError(f"cluster.timeout={self.timeout} must be at least 1 second")


@dataclass(frozen=True)
class Launch:
    """How this process joins the others: arguments of `jax.distributed.initialize`.

    None leaves an argument to JAX's own detection, `method`. local_devices: those that this process
    uses of its host's; empty for all.
    """

    coordinator: str | None
    num_processes: int | None
    process_id: int | None
    local_devices: list[int] | None
    method: str


def find_launch(config: ClusterConfig, environment: Mapping[str, str]) -> Launch | None:
    """How to join, or None for a single process.

    Raises:
      UserError: if the environment speaks of several processes but does not say how they meet.
    """
    launcher = _launcher(config, environment)
    number, index = config.num_processes, config.process_id
    devices: list[int] | None = []
    if launcher in _LAUNCHERS:
        size, rank, _, _ = _LAUNCHERS[launcher]
        number = int(environment[size]) if number is None else number
        index = int(environment[rank]) if index is None else index
        devices = _local_devices(launcher, environment)
    elif launcher == "k8s" and index is None:
        index = int(environment["JOB_COMPLETION_INDEX"])
    elif launcher == "mpi4py":
        devices = None
    if "JAX_LOCAL_DEVICE_IDS" in environment:
        devices = None  # JAX reads it
    if config.coordinator is not None:
        for key, value in (("num_processes", number), ("process_id", index)):
            if value is None:
                raise UserError(
                    f"cluster.coordinator={config.coordinator} needs cluster.{key}: no launcher "
                    "in the environment says it"
                )
        return Launch(config.coordinator, number, index, devices, "deactivate")
    if launcher is None:
        if number is not None and number > 1:
            raise UserError(f"cluster.num_processes={number} needs cluster.coordinator=host:port")
        return None
    if launcher in _LAUNCHERS and number == 1:
        return None
    if launcher == "pmi" or (launcher == "ompi" and "OMPI_MCA_orte_hnp_uri" not in environment):
        raise UserError(
            f"MPI started {number} processes but does not say where they meet: give "
            "cluster.coordinator=host:port, or install mpi4py and give cluster.launcher=mpi4py"
        )
    return Launch(None, number, index, devices, launcher)


def _local_devices(launcher: str, environment: Mapping[str, str]) -> list[int]:
    """All devices of the host for its only process; else one for each, by its number there."""
    _, _, local_size, local_rank = _LAUNCHERS[launcher]
    # Slurm writes "8(x2)" for eight on each of two hosts.
    here = environment.get(local_size, "1").partition("(")[0].partition(",")[0]
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    sees_one = visible != "" and "," not in visible  # the launcher has divided them already
    return [] if here == "1" or sees_one else [int(environment.get(local_rank, "0"))]


def _launcher(config: ClusterConfig, environment: Mapping[str, str]) -> str | None:
    """Who started this process, by the environment; None: nobody that we know."""
    if config.launcher == "none":
        return None
    if config.launcher != "auto":
        wanted = _LAUNCHERS.get(config.launcher, ())
        missing = [name for name in wanted[:2] if name not in environment]
        if config.launcher == "k8s" and "JOB_COMPLETION_INDEX" not in environment:
            missing = ["JOB_COMPLETION_INDEX"]
        if missing:
            raise UserError(
                f"cluster.launcher={config.launcher}: {missing[0]} is not in the environment; "
                "start the processes with that launcher, or give cluster.coordinator"
            )
        return config.launcher
    # SLURM_STEP_NODELIST: of srun only. A batch script's own process is one, whatever was asked.
    if "SLURM_STEP_NODELIST" in environment and "SLURM_PROCID" in environment:
        return "slurm"
    for name in ("ompi", "pmi"):
        if all(variable in environment for variable in _LAUNCHERS[name][:2]):
            return name
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        if config.coordinator is None and importlib.util.find_spec("kubernetes") is None:
            raise UserError(
                "this is a pod of an indexed Kubernetes job: give cluster.coordinator=host:port "
                "and cluster.num_processes, or install the package kubernetes (jax[k8s]); "
                "cluster.launcher=none for a job whose pods have nothing to do with one another"
            )
        return "k8s"
    return None


class Cluster:
    """The processes of a run.

    Attributes:
      index: number of this process.
      count: number of processes.
    """

    def __init__(self, index: int = 0, count: int = 1):
        self.index, self.count = index, count
        self._numbers = itertools.count()
        self._hosts: list[str] = self.gather(socket.gethostname())

    @property
    def count_here(self) -> int:
        """Number of processes on this host."""
        return self._hosts.count(self._hosts[self.index])

    @property
    def is_first(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.index == 0

    def say(self, text: str) -> None:
        """Prints a line, once for all processes."""
        if self.is_first:
            print(text, flush=True)

    def gather(self, value: Any, *, timeout: float = _FOREVER) -> list[Any]:
        """The JSON-able `value` of every process, in order. Waits for all of them.

        Raises:
          TimeoutError: when another process does not come here in time (seconds).
        """
        if self.count == 1:
            return [value]
        name = f"fp4zoo/{next(self._numbers)}"
        _client().key_value_set(f"{name}/{self.index}", json.dumps(value))
        return [json.loads(_wait(f"{name}/{other}", timeout)) for other in range(self.count)]

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns in process 0, the only one to call it: JSON-able."""
        with self.together():
            value = make() if self.is_first else None
        return self.gather(value)[0]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """The block ends well in every process, or `UserError` leaves it in every process.

        Process 0 raises the error that is printed: its own, or that of the first other one with
        its number; the rest raise `SaidElsewhere`.
        """
        mine: UserError | None = None
        try:
            yield
        except UserError as error:
            mine = error
        except BaseException as error:
            with contextlib.suppress(TimeoutError):
                self.gather(f"{type(error).__name__}: {error}", timeout=_PATIENCE_SECONDS)
            raise
        told = self.gather(None if mine is None else str(mine))
        failed = [index for index, message in enumerate(told) if message is not None]
        if not failed:
            return
        if not self.is_first:
            raise SaidElsewhere(told[failed[0]]) from mine
        if mine is not None:
            raise mine
        raise UserError(f"process {failed[0]}: {told[failed[0]]}")

    def in_turn(self, make: Callable[[], T]) -> T:
        """Calls `make` in process 0, then in the first process of each other host, then in the
        others: what it leaves on disk, of one host or of all, is made once and found by the rest.

        Raises:
          UserError: of any process, in all.
        """
        leads = self._hosts.index(self._hosts[self.index]) == self.index
        turn = 2 if not leads else 0 if self.is_first else 1
        made: list[T] = []
        for current in range(3 if self.count > 1 else 1):
            with self.together():
                if current == turn:
                    made.append(make())
        return made[0]

    def check_same(self, values: Mapping[str, Any], what: str) -> None:
        """Raises UserError, naming the first key that differs, unless all have equal values.

        values: JSON-able, by key.
        """
        if self.count == 1:
            return
        first = self.gather(dict(values) if self.is_first else None)[0]
        mine = json.loads(json.dumps(dict(values)))
        with self.together():
            for key in sorted(first.keys() | mine.keys()):
                here, there = mine.get(key), first.get(key)
                if here != there:
                    raise UserError(
                        f"{what} differs between processes: {key}={here} here and {key}={there} "
                        "in process 0; start all with the same command"
                    )

    def end_if_alone(self, failure: Exception) -> None:
        """Ends this process, with status 1, for a failure that not all have: the others wait for it
        in a collective, and have to notice that it is gone."""
        try:
            self.gather(str(failure), timeout=_PATIENCE_SECONDS)
        except TimeoutError:
            print(f"error: process {self.index}: {failure}", file=sys.stderr, flush=True)
            os._exit(1)

    def leave(self) -> None:
        """Ends the connection, once all processes come here."""
        if self.count > 1:
            jax.distributed.shutdown()


class StopAgreement:
    """Whether any process was asked to stop, known to all of them at the same step.

    The answer is two steps old, so that asking never waits for the devices.

    Attributes:
      signal: the signal that some process received, or None.
    """

    def __init__(self, request: StopRequest, mesh: Mesh):
        self._request = request
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._asked: collections.deque[jax.Array] = collections.deque()
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))

    @property
    def signal(self) -> signal.Signals | None:
        return self._request.signal

    def is_due(self) -> bool:
        """To be asked once before every step by every process; the same answer in all of them."""
        if jax.process_count() == 1:
            return bool(self._request)
        mine = np.int32(self.signal or 0)
        shape = (self._sharding.mesh.size,)
        numbers = jax.make_array_from_callback(
            shape, self._sharding, lambda place: np.full(1, mine, np.int32)
        )
        self._asked.append(self._largest(numbers))
        if len(self._asked) <= 2:
            return False
        number = int(self._asked.popleft())
        if number:
            self._request.signal = signal.Signals(number)
        return bool(number)


def start(config: ClusterConfig) -> Cluster:
    """Joins the other processes; before anything asks JAX for its devices.

    Raises:
      UserError: if the flags or the environment do not say enough. Ends the process with status 2
        and one line when the others are not found in time: JAX itself aborts then.
    """
    launch = find_launch(config, os.environ)
    if launch is None:
        return Cluster()
    # Its handler of SIGTERM would take ours away; see signals.py for what a signal does.
    jax.config.update("jax_enable_preemption_service", False)
    with _time_limit(config.timeout, launch):
        try:
            jax.distributed.initialize(
                launch.coordinator,
                launch.num_processes,
                launch.process_id,
                local_device_ids=launch.local_devices,
                cluster_detection_method=launch.method,
                initialization_timeout=config.timeout + 60,
                heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            )
        except (RuntimeError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(
                f"the processes cannot be connected ({reason}): check cluster.coordinator, "
                "cluster.num_processes and cluster.process_id"
            ) from error
    return Cluster(jax.process_index(), jax.process_count())


@contextlib.contextmanager
def _time_limit(seconds: int, launch: Launch) -> Iterator[None]:
    def give_up() -> None:
        print(f"error: {_why_not(launch, seconds)}", file=sys.stderr, flush=True)
        os._exit(2)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _why_not(launch: Launch, seconds: int) -> str:
    where = launch.coordinator or "the coordinator that the launcher names"
    advice = "check that all processes run and were given the same cluster.coordinator"
    if launch.process_id != 0 and launch.coordinator is not None:
        host, _, port = launch.coordinator.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
        except OSError as error:
            return (
                f"process {launch.process_id} cannot reach the coordinator {where} "
                f"({error.strerror or error}) within cluster.timeout={seconds} s: {advice}, and "
                "that no firewall closes the port"
            )
    return (
        f"process {launch.process_id} waited cluster.timeout={seconds} s at {where} and not all "
        f"of {launch.num_processes} processes came: {advice}"
    )


def _client() -> Any:
    from jax._src.distributed import global_state  # JAX has no public name for its key-value store

    return global_state.client


def _wait(key: str, timeout: float) -> str:
    end = time.monotonic() + timeout
    while True:
        left = max(int((end - time.monotonic()) * 1000), 1)
        try:
            return _client().blocking_key_value_get(key, min(left, _POLL_MILLISECONDS))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if time.monotonic() >= end:
                raise TimeoutError(f"no process wrote {key}") from error
