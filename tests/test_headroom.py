"""Memory is held while a program is launched for the first time, on every device, and given back whatever happens."""

import jax
import pytest

from ep_jax import headroom
from ep_jax.mesh import MeshConfig, make_mesh


def held_bytes(mesh):
    """By device, of arrays as large as what is held."""
    shards = [
        shard.data
        for array in jax.live_arrays()
        if array.nbytes == mesh.size * headroom.HEADROOM_BYTES
        for shard in array.addressable_shards
    ]
    return [shard.nbytes for shard in shards]


def test_nothing_is_held_without_several_gpus():
    mesh = make_mesh(MeshConfig(fsdp=4, ep=2))
    with headroom.headroom(mesh):
        assert held_bytes(mesh) == []


def test_every_device_holds_it_until_the_launch_is_over(monkeypatch):
    monkeypatch.setattr(headroom, "is_needed", lambda mesh: True)
    monkeypatch.setattr(headroom, "HEADROOM_BYTES", 12_345)
    mesh = make_mesh(MeshConfig(fsdp=4, ep=2))

    @headroom.headroom(mesh)
    def launch():
        assert held_bytes(mesh) == [12_345] * 8
        raise KeyError("the launch failed")

    with pytest.raises(KeyError, match="the launch failed"):
        launch()
    assert held_bytes(mesh) == []
