"""Checkpoints: bitwise round trips over meshes, damage noticed, failed saves surface, donation."""

import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ep_jax import checkpoint
from ep_jax.checkpoint import CheckpointConfig, Checkpointer, CheckpointError, Point, newest_whole, resume_point
from ep_jax.fields import ConfigError

AXES = ("replica", "fsdp", "ep")
MESHES = [(1, 8, 1), (1, 4, 2), (1, 1, 8), (1, 2, 2), (1, 1, 1), (2, 2, 2)]
METADATA = {"config": {"model": {"num_experts": 8}}, "data_position": 40, "mesh": [1, 2, 4]}


def mesh_of(sizes):
    count = int(np.prod(sizes))
    return jax.make_mesh(sizes, AXES, devices=jax.devices()[:count])


def spec_of(shape):
    specs = {(2, 8, 16, 32): jax.P(None, "ep", "fsdp"), (2, 16, 8): jax.P(), (32, 64): jax.P(("fsdp", "ep"))}
    return specs.get(shape, jax.P())


def params_of(num_experts=8, dtype=jnp.float32):
    shape = jax.ShapeDtypeStruct
    return {
        "embed": shape((32, 64), dtype),
        "block": {
            "router": shape((2, 16, num_experts), dtype),
            "experts": {"w": shape((2, num_experts, 16, 32), dtype)},
        },
    }


def state_shapes(optimizer, num_experts=8):
    params = params_of(num_experts)
    return {
        "step": jax.ShapeDtypeStruct((), jnp.int32),
        "params": params,
        "opt_state": jax.eval_shape(optimizer.init, params),
        "router": {"bias": jax.ShapeDtypeStruct((4, num_experts), jnp.float32)},
        "half": jax.ShapeDtypeStruct((8, 8), jnp.bfloat16),
        "rng": jax.ShapeDtypeStruct((2,), jnp.uint32),
    }


def target_of(shapes, mesh):
    def placed(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, spec_of(leaf.shape)))

    return jax.tree.map(placed, shapes)


def random_state(target, seed=0):
    """Random bits in every leaf, so that a permuted, cast or denormal-flushed value shows (NaNs included)."""
    generator = np.random.default_rng(seed)

    def fill(leaf):
        raw = generator.bytes(int(np.prod(leaf.shape)) * leaf.dtype.itemsize)
        return jax.device_put(np.frombuffer(raw, leaf.dtype).reshape(leaf.shape), leaf.sharding)

    return jax.tree.map(fill, target)


def bits(tree):
    return jax.tree.map(lambda leaf: (leaf.dtype.name, leaf.shape, np.asarray(leaf).tobytes()), tree)


def config(**changes):
    return CheckpointConfig(**{"keep": 3, "asynchronous": True} | changes)


OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "muon": optax.contrib.muon(
        1e-3,
        muon_weight_dimension_numbers=lambda params: jax.tree.map(
            lambda leaf: optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1), params
        ),
    ),
}


@pytest.fixture
def small():
    """(target, state) of two leaves, enough for everything that is not about the tree."""
    mesh = mesh_of((1, 2, 4))
    target = target_of(
        {"step": jax.ShapeDtypeStruct((), jnp.int32), "w": jax.ShapeDtypeStruct((32, 64), jnp.float32)}, mesh
    )
    return target, random_state(target)


@pytest.fixture
def two_saved(tmp_path, small):
    """Folder with whole checkpoints of steps 5 and 10; the state of step 5."""
    target, state = small
    saver = Checkpointer(tmp_path, config())
    saver.save(5, state, {"at": 5})
    saver.save(10, random_state(target, seed=1), {"at": 10})
    saver.close()
    return tmp_path, target, state


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_round_trip_is_bitwise_on_every_mesh(tmp_path, optimizer):
    shapes = state_shapes(OPTIMIZERS[optimizer])
    state = random_state(target_of(shapes, mesh_of((1, 2, 4))))
    saver = Checkpointer(tmp_path, config())
    saver.save(7, state, METADATA)
    saver.close()
    for sizes in MESHES:
        target = target_of(shapes, mesh_of(sizes))
        restored, metadata = Checkpointer(tmp_path, config()).restore(target)
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        assert bits(restored) == bits(state), sizes
        assert jax.tree.all(jax.tree.map(lambda got, want: got.sharding == want.sharding, restored, target)), sizes
        assert metadata == METADATA
    assert checkpoint.read_metadata(Point(tmp_path, 7)) == METADATA


def test_changing_experts_or_width_or_dtype_or_tree_is_refused(two_saved, tmp_path):
    shapes = state_shapes(OPTIMIZERS["adamw"])
    mesh = mesh_of((1, 2, 4))
    saver = Checkpointer(tmp_path / "other", config())
    saver.save(1, random_state(target_of(shapes, mesh)), METADATA)

    def refused(changed, *words):
        with pytest.raises(ConfigError) as refusal:
            saver.restore(target_of(changed, mesh))
        message = str(refusal.value)
        assert "\n" not in message
        assert all(word in message for word in (*words, str(tmp_path / "other" / "1"))), message

    more_experts = state_shapes(OPTIMIZERS["adamw"], num_experts=16)
    refused(
        more_experts, "opt_state/0/mu/block/experts/w", "float32[2, 8, 16, 32] there", "float32[2, 16, 16, 32] here"
    )
    wide = {**shapes, "half": jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)}
    refused(wide, "half", "bfloat16[8, 8]", "bfloat16[8, 16]")
    refused({**shapes, "half": jax.ShapeDtypeStruct((8, 8), jnp.float32)}, "half", "bfloat16[8, 8]", "float32[8, 8]")
    refused({**shapes, "extra": jax.ShapeDtypeStruct((3,), jnp.float32)}, "extra", "absent there", "float32[3] here")
    refused({key: value for key, value in shapes.items() if key != "rng"}, "rng", "uint32[2] there", "absent here")
    saver.close()


def data_file(step_folder):
    return max((path for path in step_folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def delete_file(folder):
    path = data_file(folder)
    path.unlink()
    return f"{path.relative_to(folder)}: expected", "found no such file"


def truncate(folder):
    path = data_file(folder)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2])
    return f"{path.relative_to(folder)}: expected {size} bytes, found {size // 2}", ""


def flip_one_bit(folder):
    path = data_file(folder)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    return f"{path.relative_to(folder)}: expected CRC-32", "found"


def zero_a_block(folder):
    path = data_file(folder)
    content = path.read_bytes()
    path.write_bytes(content[:512] + bytes(512) + content[1024:])
    return f"{path.relative_to(folder)}: expected CRC-32", "found"


def delete_manifest(folder):
    (folder / "MANIFEST.json").unlink()
    return "MANIFEST.json: expected a manifest", "found no such file"


def leave_a_file(folder):
    shutil.rmtree(folder)
    folder.write_text("in the way")
    return "expected a folder", "found a regular file"


DAMAGES = [delete_file, truncate, flip_one_bit, zero_a_block, delete_manifest, leave_a_file]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_newest_is_noticed_and_passed_over(two_saved, capfd, damage):
    folder, target, state = two_saved
    words = damage(folder / "10")
    restored, metadata = Checkpointer(folder, config()).restore(target)
    assert bits(restored) == bits(state)
    assert metadata == {"at": 5}
    warnings = [line for line in capfd.readouterr().err.splitlines() if line.startswith("WARNING: ")]
    assert len(warnings) == 1
    assert all(word in warnings[0] for word in (str(folder / "10"), *words, "falling back to step 5")), warnings
    with pytest.raises(CheckpointError, match=f"checkpoint {folder / '10'} is damaged"):
        resume_point("unused", str(folder / "10"))
    with pytest.raises(CheckpointError, match="is damaged"):
        Checkpointer(folder, config()).restore(target, step=10)


def test_damaged_checkpoint_is_replaced_when_its_step_comes_again(two_saved, capfd):
    folder, target, _ = two_saved
    flip_one_bit(folder / "10")
    state = random_state(target, seed=2)
    saver = Checkpointer(folder, config())
    saver.save(10, state, {"at": "again"})
    restored, metadata = saver.restore(target)
    assert bits(restored) == bits(state)
    assert metadata == {"at": "again"}
    assert sorted(path.name for path in folder.iterdir()) == ["10", "5"]
    assert capfd.readouterr().err == ""
    saver.close()


def test_leftover_of_a_killed_save_is_noticed_and_cleared_by_the_next_save(two_saved, small, capfd):
    folder, _, _ = two_saved
    for name in ("unfinished-save-15", "unfinished-save-15.orbax-checkpoint-tmp"):
        shutil.copytree(folder / "10", folder / name)
    assert newest_whole(folder) == Point(folder, 10)
    warnings = capfd.readouterr().err.splitlines()
    assert len(warnings) == 2
    assert all("a save that never finished" in line and "unfinished-save-15" in line for line in warnings)
    saver = Checkpointer(folder, config())
    saver.save(15, small[1], {})
    saver.close()
    assert sorted(path.name for path in folder.iterdir()) == ["10", "15", "5"]


def test_none_whole_lists_what_was_found(two_saved):
    folder, target, _ = two_saved
    delete_manifest(folder / "5")
    truncate(folder / "10")
    with pytest.raises(CheckpointError, match=r"no whole checkpoint among 10 \(.*bytes.*\), 5 \(MANIFEST"):
        Checkpointer(folder, config()).restore(target)


def test_older_ones_go_only_after_a_newer_one_is_verified(tmp_path, small, monkeypatch):
    folder, saver = tmp_path, Checkpointer(tmp_path, config(keep=2))
    for step in (1, 2, 3, 4):
        saver.save(step, small[1], {})
    saver.wait()
    assert checkpoint.steps_found(folder) == [3, 4]
    delete_manifest(folder / "4")  # damaged ones do not count as kept
    saver.save(5, small[1], {})
    saver.wait()
    assert checkpoint.steps_found(folder) == [3, 4, 5]
    monkeypatch.setattr(checkpoint, "find_damage", lambda path, *_, **__: "d/x: expected 2 bytes, found 1")
    saver.save(6, small[1], {})
    with pytest.raises(CheckpointError, match="step 6 .*damaged right after it was written: d/x"):
        saver.wait()
    assert checkpoint.steps_found(folder) == [3, 4, 5, 6]
    saver.close()


def test_later_checkpoints_of_an_abandoned_run_are_kept_and_named(two_saved, small, capfd):
    folder, _, _ = two_saved
    saver = Checkpointer(folder, config(keep=1))
    saver.save(6, small[1], {})
    saver.close()
    assert checkpoint.steps_found(folder) == [6, 10]
    assert "holds later checkpoints [10]" in capfd.readouterr().err


def test_same_step_is_saved_once(tmp_path, small):
    saver = Checkpointer(tmp_path, config())
    saver.save(3, small[1], {"first": True})
    saver.save(3, small[1], {"first": False})
    saver.close()
    saver.close()
    assert checkpoint.read_metadata(Point(tmp_path, 3)) == {"first": True}


@pytest.mark.parametrize("surface", ["check", "save", "wait", "close"])
def test_regular_file_in_the_way_surfaces_and_keeps_older_ones(tmp_path, small, surface):
    target, state = small
    saver = Checkpointer(tmp_path, config(keep=1))
    saver.save(5, state, {"at": 5})
    saver.wait()
    (tmp_path / "10").write_text("in the way")
    saver.save(10, state, {})
    calls = {"save": lambda: saver.save(15, state, {}), "wait": saver.wait, "close": saver.close}
    if surface == "check":
        concurrent_wait(saver)
    with pytest.raises(CheckpointError) as failure:
        calls.get(surface, saver.check)()
    message = str(failure.value)
    assert "\n" not in message
    assert "step 10" in message
    assert str(tmp_path / "10") in message
    saver.check()
    saver.close()
    (tmp_path / "10").unlink()
    restored, metadata = Checkpointer(tmp_path, config()).restore(target)
    assert bits(restored) == bits(state)
    assert metadata == {"at": 5}


def concurrent_wait(saver):
    """Lets the background work end without asking for its result."""
    saver._writer.submit(lambda: None).result(timeout=30)


def test_write_error_in_the_background_surfaces(tmp_path, small, monkeypatch):
    saver = Checkpointer(tmp_path, config())

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_manifest", full)
    saver.save(4, small[1], {})
    concurrent_wait(saver)
    with pytest.raises(CheckpointError, match="step 4 .*/4: OSError: .*No space left on device"):
        saver.check()
    saver.close()
    assert checkpoint.steps_found(tmp_path) == []


def test_checkpoint_folder_that_cannot_be_made_surfaces(tmp_path, small):
    (tmp_path / "run").write_text("a file")
    saver = Checkpointer(tmp_path / "run" / "checkpoints", config(asynchronous=False))
    with pytest.raises(CheckpointError, match="step 1 could not be written to .*/run/checkpoints/1"):
        saver.save(1, small[1], {})
    saver.close()


def test_synchronous_save_is_whole_on_return(tmp_path, small):
    saver = Checkpointer(tmp_path, config(asynchronous=False))
    saver.save(1, small[1], {})
    assert newest_whole(tmp_path) == Point(tmp_path, 1)
    saver.close()


def test_state_may_be_donated_right_after_save_returns(tmp_path):
    mesh = mesh_of((1, 2, 4))
    split, everywhere = jax.NamedSharding(mesh, jax.P(("fsdp", "ep"))), jax.NamedSharding(mesh, jax.P())
    step = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    state = {
        "w": jax.device_put(np.arange(1 << 20, dtype=np.float32), split),
        "bias": jax.device_put(np.zeros(1 << 16, np.float32), everywhere),
        "step": jax.device_put(np.int32(0), everywhere),
    }
    state = step(state)
    saver = Checkpointer(tmp_path, config())
    held = []  # references to donated states must not disturb the save, nor the save the donation
    for number in (1, 4, 7):
        held.append(state)
        saver.save(number, state, {})
        for _ in range(3):
            state = step(state)
    saver.close()
    assert len(held) == 3
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    for number in (1, 4, 7):
        restored, _ = checkpoint.restore(checkpoint.whole(tmp_path, number), target)
        assert int(restored["step"]) == number
        np.testing.assert_array_equal(restored["w"], np.arange(1 << 20, dtype=np.float32) + number)
        np.testing.assert_array_equal(restored["bias"], np.full(1 << 16, number, np.float32))


def test_resume_point(two_saved, tmp_path, capfd):
    checkpoints, _, _ = two_saved
    run = tmp_path / "run"
    shutil.copytree(checkpoints, run / "checkpoints", ignore=shutil.ignore_patterns("run"))
    own = run / "checkpoints"
    assert resume_point(own, "never") is None
    assert resume_point(own, "auto") == Point(own, 10)
    assert resume_point(tmp_path / "fresh", "auto") is None
    for path in (run, own, own / "10"):
        assert resume_point(tmp_path / "fresh", str(path)) == Point(own, 10)
    assert resume_point(tmp_path / "fresh", str(own / "5")).step == 5
    (tmp_path / "hollow").mkdir()
    for wrong in (own / "7", tmp_path / "hollow", tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="allowed is auto, never, or PATH") as refusal:
            resume_point(own, str(wrong))
        assert repr(str(wrong)) in str(refusal.value)
    with pytest.raises(ConfigError, match="holds 5, 10"):
        resume_point(own, str(own / "7"))
    assert capfd.readouterr().err == ""


def test_only_an_unfinished_save_means_a_fresh_start(tmp_path, capfd):
    (tmp_path / "unfinished-save-1").mkdir()
    assert resume_point(tmp_path, "auto") is None
    assert "never finished" in capfd.readouterr().err


@pytest.mark.parametrize("change", [{"every": -1}, {"keep": 0}, {"asynchronous": 1}])
def test_config_is_checked(change):
    with pytest.raises(ConfigError, match=r"checkpoint\." + next(iter(change))):
        CheckpointConfig(**change)


def test_reading_the_config_imports_neither_orbax_nor_jax():
    code = "import sys; from ep_jax.checkpoint import CheckpointConfig; assert not {'jax', 'orbax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
