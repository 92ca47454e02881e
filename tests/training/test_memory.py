import dataclasses

import jax
import jax.numpy as jnp
import pytest

from fp4zoo import configs
from fp4zoo.errors import UserError
from fp4zoo.training import memory
from fp4zoo.training.program import Program
from fp4zoo.training.sharding import MeshConfig, make_mesh

pytestmark = pytest.mark.usefixtures("optimized")

GIB = memory.GIB


def machine(root, *, available_gib, cgroup="", files=()):
    """A file system with what the kernel would say."""
    contents = {
        "proc/meminfo": f"MemTotal: 999999999 kB\nMemAvailable: {available_gib * 2**20} kB\n",
        "proc/self/cgroup": cgroup,
        **dict(files),
    }
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_free_memory_of_the_machine(tmp_path):
    machine(tmp_path, available_gib=7)
    assert memory.host_available_bytes(tmp_path) == 7 * GIB


def test_a_container_s_limit_holds_version_2(tmp_path):
    files = {
        "sys/fs/cgroup/jobs/mine/memory.max": "max",
        "sys/fs/cgroup/jobs/mine/memory.current": str(GIB),
        "sys/fs/cgroup/jobs/memory.max": str(4 * GIB),  # of its parent
        "sys/fs/cgroup/jobs/memory.current": str(3 * GIB),
        "sys/fs/cgroup/jobs/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    }
    machine(tmp_path, available_gib=64, cgroup="0::/jobs/mine", files=files.items())
    assert memory.host_available_bytes(tmp_path) == 2 * GIB


def test_a_container_s_limit_holds_version_1(tmp_path):
    files = {
        "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": str(8 * GIB),
        "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": str(5 * GIB),
    }
    cgroup = "5:cpu:/docker/x\n4:memory:/docker/x\n0::/"
    machine(tmp_path, available_gib=64, cgroup=cgroup, files=files.items())
    assert memory.host_available_bytes(tmp_path) == 3 * GIB


def test_fake_devices_share_the_machine():
    devices = jax.devices("cpu")
    assert memory.available_bytes(devices * 8) == pytest.approx(
        memory.available_bytes(devices * 1) / 8, rel=0.2
    )


def test_a_run_that_does_not_fit_is_told_what_to_change():
    estimate = memory.MemoryEstimate(100 * GIB, 200 * GIB, 100 * GIB, 50 * GIB)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    memory.check_fits(estimate, 500 * GIB, mesh, "none")
    with pytest.raises(UserError) as caught:
        memory.check_fits(estimate, 80 * GIB, mesh, "none")
    message = str(caught.value)
    assert "needs 450.0 GiB per device and 80.0 GiB are available" in message
    for row in ("parameters      100.00", "optimizer       200.00", "activations      50.00"):
        assert row in message
    for remedy in ("6 times as many", "mesh.fsdp", "remat=save_quantized", "batch_size", "model="):
        assert remedy in message


def test_a_compiled_step_that_does_not_fit_is_refused():
    compiled = jax.jit(lambda x: jnp.sort(x) + 1).lower(jnp.ones(2**20)).compile()
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    needed = memory.check_compiled(compiled, GIB, mesh, "none")
    assert needed >= 2 * 2**22  # the argument and the result
    with pytest.raises(UserError, match="the compiled step needs .* remat=save_quantized"):
        memory.check_compiled(compiled, 2**20, mesh, "none")


@pytest.mark.parametrize("remat", ["none", "save_quantized", "full"])
@pytest.mark.parametrize("recipe", ["nvfp4", "fp32"])
def test_activations_grow_with_what_is_kept(tiny, recipe, remat):
    def size(**changes):
        settings = {
            "tokens": 1024,
            "sequence_length": 64,
            "activation_size": 2,
            "remat": remat,
            "on_cpu": False,
        }
        model = dataclasses.replace(tiny, num_layers=changes.pop("num_layers", 8))
        return memory.activation_bytes(model, recipe, **{**settings, **changes})

    assert size(tokens=2048) > 1.5 * size()
    assert size(activation_size=4) > size()
    assert size(num_layers=16) > size()
    order = ["full", "save_quantized", "none"]
    sizes = [size(remat=each) for each in order]
    assert sizes == sorted(sizes) and sizes[1] < sizes[2]
    assert (sizes[0] < sizes[1]) == (recipe == "nvfp4")  # FP32 has nothing quantised to keep
    assert (size(packed=True) < size()) == (recipe == "nvfp4")


@pytest.mark.slow
def test_what_saves_memory_saves_it_in_the_compiled_step():
    """XLA's own account of a step whose activations outweigh everything else."""
    model = [
        "model=llama-tiny",
        "model.num_layers=12",
        "model.vocab_size=2048",
        "sequence_length=512",
    ]
    model += ["precision=nvfp4", "precision.rules.last_blocks=0"]

    def analysis(*overrides):
        config = dataclasses.replace(configs.load([*model, *overrides]), mesh=MeshConfig())
        program = Program(config, jax.devices()[:1])
        return program, program.compile_train_step().memory_analysis()

    program, plain = analysis()
    quantized, full = (
        analysis(f"remat={remat}")[1].temp_size_in_bytes for remat in ("save_quantized", "full")
    )
    assert full < 0.55 * plain.temp_size_in_bytes
    assert full < quantized < 1.02 * plain.temp_size_in_bytes
    _, small = analysis("optimizer.first_moment_dtype=bfloat16", "remat=full")
    saved = plain.argument_size_in_bytes - small.argument_size_in_bytes
    assert saved == pytest.approx(2 * program.num_parameters, rel=1e-3)
