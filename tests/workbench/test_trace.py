"""The time of a device is divided into compute, exposed communication and idle time."""

import dataclasses
import json

import jax
import pytest
from jax.profiler import ProfileData
from tiny import make_batch, wrapped

import jddp
from jddp.commands.checks import explain_command as main
from jddp.ground.errors import DataError, ExitCode
from jddp.trainer.loop import Profile
from jddp.workbench.trace import (
    MODELLED,
    DeviceTime,
    StepTimes,
    Trace,
    device_times,
    read_trace,
    times_as_text,
)

pytestmark = pytest.mark.usefixtures("started_devices")
SECOND = 10**12  # picoseconds
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def plane(name, lines, stats=None):
    """A plane in the text form of traces; kernels are (name, start, seconds)."""
    numbers = {}
    text = ""
    for line, kernels in lines.items():
        events = ""
        for kernel, start, seconds in kernels:
            number = numbers.setdefault(kernel, len(numbers) + 1)
            events += f"events {{ metadata_id: {number} offset_ps: {start * SECOND} "
            events += f"duration_ps: {seconds * SECOND} {stats or ''} }}\n"
        text += f'lines {{ name: "{line}" {events} }}\n'
    for kernel, number in numbers.items():
        text += f'event_metadata {{ key: {number} value {{ id: {number} name: "{kernel}" }} }}\n'
    for number, stat in ((1, "hlo_op"), (2, "device_ordinal")):
        text += f'stat_metadata {{ key: {number} value {{ id: {number} name: "{stat}" }} }}\n'
    return f'planes {{ name: "{name}" {text} }}\n'


def times_in(text):
    return device_times(ProfileData.from_text_proto(text).planes)


def on_cpu(number):
    """The stats of a kernel of a CPU device: its instruction and the device."""
    stats = 'stats { metadata_id: 1 str_value: "x" }'
    return f"{stats} stats {{ metadata_id: 2 int64_value: {number} }}"


def test_communication_is_exposed_where_no_kernel_of_any_stream_computes():
    streams = {
        "Stream #10(Compute)": [("gemm", 0, 10), ("fusion", 5, 10), ("gemm", 20, 5)],
        "Stream #11(MemcpyD2D,Compute)": [
            (ALL_REDUCE, 10, 12),  # beside it 10 to 15 and 20 to 22 are computed
            ("MemcpyD2D", 30, 10),
            (ALL_REDUCE, 30, 8),  # beside a copy alone
        ],
        "XLA Ops": [("loop", 30, 10)],  # repeats the streams
    }
    text = plane("/device:GPU:0", streams)
    text += plane("/device:GPU:1", {"Stream #10(Compute)": [("all-reduce.3", 0, 4)]})
    text += plane("/host:CPU", {"python": [("gemm", 0, 50)]})
    found = times_in(text)
    assert found == {"GPU:0": DeviceTime(40, 20, 20, 13), "GPU:1": DeviceTime(4, 0, 4, 4)}
    assert found["GPU:0"].idle == 7
    assert found["GPU:0"].hidden_share == pytest.approx(7 / 20)


def test_instructions_of_cpus_belong_to_their_device_and_loops_are_not_counted_twice():
    kernels = [("while.2", 0, 30), ("dot.1", 0, 10), ("all-reduce.3", 12, 8), ("end: dot.1", 10, 1)]
    text = plane("/host:CPU", {"tf_XLAEigen/1": kernels}, on_cpu(0))
    text += plane("/host:CPU", {"tf_XLAEigen/1": [("all_reduce_fusion", 0, 3)]}, on_cpu(1))
    assert times_in(text) == {"CPU:0": DeviceTime(20, 10, 8, 8), "CPU:1": DeviceTime(3, 3, 0, 0)}


def test_a_trace_is_a_table_of_means_in_80_columns():
    devices = {"process_0 GPU:0": DeviceTime(4, 2, 1, 0.5)}
    devices |= {"process_1 GPU:0": DeviceTime(4, 3, 1, 1)}
    trace = Trace((10, 11), devices, 0.25)
    assert "a step takes 2,000.00 ms, of which a device computes 62.5%" in trace.verdict
    assert "process_1 GPU:0      2,000.00   1,500.00 " in str(trace)
    assert "A process waits 125.00 ms a step for its batch." in str(trace)
    assert max(map(len, str(trace).splitlines())) <= 80
    assert trace.as_json()["devices"]["process_0 GPU:0"]["idle_seconds"] == 0.75
    assert dataclasses.replace(trace, steps=()).times.data_wait is None
    modelled = StepTimes(MODELLED, 1.0, 0.75, 0.25)
    _, time, *_, idle, _ = times_as_text([trace.times, modelled]).splitlines()
    assert time.split() == ["time", "2,000.00", "ms", "1,000.00", "ms"]
    assert idle.split() == ["idle", "375.00", "ms", "18.75%", "not", "known"]


@pytest.mark.slow
def test_a_run_records_the_steps_that_its_config_asks_for(tmp_path, capsys):
    job = {"model": {"name": "mlp"}, "mesh": {"num_devices": 2}}
    train = {"num_steps": 6, "profile_steps": [3, 4], "eval_every_steps": None}
    jddp.train("fashion_mnist_cnn", **job, train=train, run={"dir": str(tmp_path / "run")})
    trace = read_trace(tmp_path / "run")
    assert trace.steps == (3, 4)
    assert sorted(trace.devices) == ["CPU:0", "CPU:1"]
    for time in trace.devices.values():
        assert 0 < time.compute < time.span
        assert 0 < time.exposed <= time.communication  # CPUs send and compute in turn
    assert main(["--trace", str(tmp_path / "run"), "--json"]) == ExitCode.DONE
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["kind"], found["steps"]) == ("measured", [3, 4])


def test_a_trace_that_the_last_step_leaves_open_ends_with_the_run(tmp_path):
    ddp, batch = wrapped(), make_batch()
    state = ddp.init(0, batch)
    profile = Profile((1, 10), tmp_path)
    for number in (1, 2):
        with profile.step(number, state):
            state, _ = ddp.step(state, batch)
    jax.block_until_ready(state)
    profile.close()
    profile.close()
    assert read_trace(tmp_path).steps == (1, 2)


def test_a_trace_that_is_absent_damaged_or_empty_is_one_line(tmp_path, capsys):
    with pytest.raises(DataError, match=r"holds no trace .*profile_steps=\[10,13\]"):
        read_trace(tmp_path)
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(b"\xff" * 100)
    assert main(["--trace", str(tmp_path)]) == ExitCode.DATA
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{file} is damaged: " in line
    file.write_bytes(b"")
    with pytest.raises(DataError, match="the trace holds no kernel of a device"):
        read_trace(tmp_path)
