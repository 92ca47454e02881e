import pytest

from fp4zoo.errors import UserError
from fp4zoo.planning import targets

pytestmark = pytest.mark.usefixtures("optimized")
needs_plugin = pytest.mark.skipif(
    targets.plugin_library() is None,
    reason="the wheels jax-cuda13-plugin and jax-cuda13-pjrt are not installed",
)


@needs_plugin
@pytest.mark.parametrize("name", targets.NAMES)
def test_every_name_is_described_by_the_plugin(name):
    target = targets.find_target(name)
    assert target.device_kind == targets.NAMES[name][0]
    assert 70e9 < target.memory_bytes < 400e9
    assert 1e12 < target.memory_bandwidth < 30e12
    assert 8 <= target.compute_capability[0] <= 12
    assert target.cudnn_version > 80000


@needs_plugin
def test_devices_are_those_of_several_hosts():
    devices = targets.target_devices("gb200", 8)
    assert [device.process_index for device in devices] == [0] * 4 + [1] * 4
    assert {(device.platform, device.device_kind) for device in devices} == {
        ("gpu", "NVIDIA GB200")
    }
    assert devices[0].compute_capability == "10.0"


def test_an_unknown_target_is_named_with_its_near_match():
    with pytest.raises(UserError, match="target=gb20: unknown choice: did you mean 'gb200'"):
        targets.find_target("gb20")


@needs_plugin
@pytest.mark.parametrize("count", [0, 12])
def test_a_count_that_does_not_fill_its_hosts_is_refused(count):
    with pytest.raises(UserError, match=f"devices={count}"):
        targets.target_devices("b200", count)


def test_without_the_plugin_the_error_names_both_wheels(monkeypatch):
    monkeypatch.setattr(targets, "plugin_library", lambda: None)
    with pytest.raises(UserError, match="jax-cuda13-plugin==.* jax-cuda13-pjrt=="):
        targets.find_target("b200")
    monkeypatch.undo()
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    assert targets.plugin_library() is None


def test_a_text_that_the_plugin_lacks_is_named(monkeypatch, tmp_path):
    library = tmp_path / "xla_cuda_plugin.so"
    library.write_bytes(
        b'\x7fELF\0gpu_device_info {\n core_count: 7\n}\ndevice_description_str: "NVIDIA B200"\0x'
    )
    monkeypatch.setattr(targets, "plugin_library", lambda: library)
    assert targets.find_target("b200").num_cores == 7
    with pytest.raises(UserError, match="does not describe 'NVIDIA GB200'"):
        targets.find_target("gb200")
