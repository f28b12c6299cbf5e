"""A training step with an emulated ep group drops what the step on the large mesh drops, and learns the same.

Run: python -m pytest tests/train/test_emulated_step.py
"""

import numpy as np

from tests.train.tiny_run import compiled_step, fresh_state, make_batch, take_steps, tiny_config


def test_a_step_on_two_devices_is_the_step_of_eight_shards():
    large = tiny_config((1, 1, 8), drops=True, ep__waves=2)
    small = tiny_config((1, 1, 2), drops=True, ep__waves=2, ep__emulated_shards=8, model__remat="exchanges")
    _, [wanted] = take_steps(large, fresh_state(large), [make_batch()])
    _, [found] = take_steps(small, fresh_state(small), [make_batch()])
    np.testing.assert_array_equal(found.drops.counts_NPE, wanted.drops.counts_NPE)
    assert (wanted.drops.counts_NPE.sum(axis=(0, 2))[1:] > 0).all()  # by senders and by receivers
    by_device_NDP = wanted.drops.source_counts_NDP.reshape(2, 2, 4, 3).sum(axis=2)
    np.testing.assert_array_equal(found.drops.source_counts_NDP, by_device_NDP)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=1e-5)
    assert "all-to-all" in compiled_step(large).as_text()
    assert "all-to-all" not in compiled_step(small).as_text()
