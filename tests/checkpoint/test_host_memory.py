"""States in the memory of the hosts: complete, private, two of them, and gone after the run."""

import os
import time

import jax
import numpy as np
import optax
import pytest
from states import assert_same
from tiny import make_batches, take_steps, wrapped

import jddp
from jddp.checkpoint import memory
from jddp.checkpoint.memory import HostMemory
from jddp.checkpoint.reader import Damaged, put_on_devices
from jddp.ground.errors import FileSystemError, ReplicaMismatchError

STRATEGIES = {
    "ddp": {},
    "zero1": {"strategy": "zero1"},
    "fsdp": {"strategy": "fsdp"},
    "groups": {"strategy": jddp.FSDP(group_size=2)},
    "local": {"strategy": jddp.LocalSteps(2)},
}


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv(memory.VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def states():
    """The memory of a run, with a function that makes and saves the state of a step."""
    first = wrapped().init(0, make_batches(1)[0])
    own = HostMemory("run", first)

    def save(step):
        state = first.replace(step=first.step + step)
        own.save(step, state, {"position": step})
        return state

    yield own, save
    own.close(keeps=True)


@pytest.mark.parametrize("options", STRATEGIES.values(), ids=[*STRATEGIES])
def test_a_state_comes_back_bitwise_with_its_run_data(options, directory):
    ddp = wrapped(optimizer=optax.adam(0.1), mesh=4, ema_decay=0.9, **options)
    state, _ = take_steps(ddp, make_batches(3))
    layouts = ddp.steps.layouts(state)
    own = HostMemory("run", state)
    assert own.newest() is None
    assert own.save(3, state, {"position": [1, 2]}, layouts) > 0
    saved = own.newest()
    restored = put_on_devices(saved, ddp.init(1, make_batches(1)[0]), layouts)
    assert (restored.step, restored.beside) == (3, {"position": [1, 2]})
    assert_same(restored.state, state)
    used = sum(x.stat().st_size for x in own.folder.iterdir() if x.suffix != ".json")
    assert str(own) == f"two states of {used / 2**20:.3g} MiB in {directory}"
    own.close(keeps=False)
    assert not own.folder.exists()


@pytest.mark.parametrize("name", ["ddp", "zero1", "fsdp"])
def test_a_state_is_read_on_another_number_of_devices(name):
    options = STRATEGIES[name]
    many, few = (wrapped(optimizer=optax.adam(0.1), mesh=n, **options) for n in (4, 2))
    state, _ = take_steps(many, make_batches(3))
    own = HostMemory("run", state)
    own.save(3, state, {}, many.steps.layouts(state))
    like = few.init(1, make_batches(1)[0])
    restored = put_on_devices(own.newest(), like, few.steps.layouts(like))
    assert restored.state.params.keys() == state.params.keys()
    want, got = (x.evaluate(y, make_batches(2)) for x, y in ((many, state), (few, restored.state)))
    assert got == pytest.approx(want, rel=1e-6)  # the mean over other numbers of replicas
    own.close(keeps=False)


def test_two_states_stay_and_the_newest_complete_one_is_read(states):
    own, save = states
    for step in (1, 2, 3):
        save(step)
    assert sorted(x.name for x in own.folder.glob("*.json")) == ["2.0.json", "3.0.json"]
    assert own.newest().step == 3
    assert own.newest(above=3) is None
    (own.folder / "3.0.json").unlink()  # as of a process that was killed before it had written all
    assert own.newest().step == 2
    save(1)  # A run that went back at a loss spike.
    assert own.newest().step == 1


def test_what_a_faster_process_of_the_host_has_written_of_this_step_stays(states):
    own, save = states
    save(1)
    for name in ("0.1", "2.1", "2.1.json"):
        (own.folder / name).write_bytes(b"")
    save(2)
    assert sorted(x.name for x in own.folder.glob("*.1*")) == ["2.1", "2.1.json"]


def test_a_flipped_bit_is_found(states):
    own, save = states
    save(1)
    state = save(2)
    path = own.folder / "2.0"
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)
    with pytest.raises(Damaged, match="is not the array that was saved"):
        put_on_devices(own.newest(), state, None)
    assert own.newest(below=2).step == 1


def test_replicas_that_differ_are_not_kept(states):
    own, save = states
    state = save(1)
    leaf, *_ = jax.tree.leaves(state.params)
    parts = [x.data for x in leaf.addressable_shards]
    parts[1] += 1
    other = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
    changed = jax.tree.map(lambda x: other if x is leaf else x, state)
    with pytest.raises(ReplicaMismatchError, match="Step 2 is not kept in memory: .* on replica 1"):
        own.save(2, changed, {})
    assert own.newest().step == 1


def test_memory_that_is_full_loses_only_this_state(states, monkeypatch, caplog):
    own, save = states
    save(1)

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(memory, "replace_file", full)
        save(2)
    assert "Step 2 is not kept in memory: No space left on device." in caplog.text
    assert own.newest().step == 1


def test_a_memory_that_is_too_small_is_refused(states, monkeypatch):
    _, save = states
    monkeypatch.setattr(memory, "_available_bytes", lambda: 1024)
    with pytest.raises(FileSystemError, match="two states of .* MiB in .* take more than the "):
        HostMemory("other", save(1))


def test_only_the_user_can_read_a_state_and_a_folder_of_others_is_refused(states, directory):
    own, save = states
    state = save(1)
    assert own.folder.stat().st_mode & 0o777 == 0o700
    name = own.folder.name.replace("-run", "-open")
    (directory / name).mkdir(mode=0o755)
    with pytest.raises(FileSystemError, match="can be read by others. Remove it"):
        HostMemory("open", state)
    (directory / name).rmdir()
    (directory / name).symlink_to(own.folder)
    with pytest.raises(FileSystemError, match="can be read by others. Remove it"):
        HostMemory("open", state)


def test_states_of_an_ended_run_are_removed_by_another_run(states):
    own, save = states
    state = save(1)
    ended, recent = HostMemory("ended", state), HostMemory("recent", state)
    for x in (ended, recent):
        x.save(1, state, {})
        x.close(keeps=True)
    long_ago = time.time() - memory.LEFT_SECONDS - 1
    for x in (own, ended):
        os.utime(x.folder, (long_ago, long_ago))
    HostMemory("another", state).close(keeps=False)
    assert not ended.folder.exists()
    assert recent.folder.exists()  # It may be restarted.
    assert own.folder.exists()  # It runs.


def test_random_keys_and_narrow_numbers_come_back(directory):
    ddp = wrapped()
    state = ddp.init(0, make_batches(1)[0])
    narrow = jax.tree.map(lambda x: x.astype("bfloat16"), state.params)
    state = state.replace(params=narrow)
    own = HostMemory("run", state)
    own.save(1, state, {})
    restored = put_on_devices(own.newest(), state, None)
    assert_same(restored.state, state)
    assert all(np.asarray(x).dtype == "bfloat16" for x in jax.tree.leaves(restored.state.params))
    own.close(keeps=False)
