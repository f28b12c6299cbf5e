"""The watchdog, on processes that train a number: one that hangs in a step is ended, all others are left alone."""

import os
import subprocess
import sys
import time

TIMEOUT_S, CODE = 2.0, 77
PROGRAM = f"""
import sys, time
import jax, jax.numpy as jnp
from jax.experimental import io_callback
from ep_jax.watchdog import Watchdog

slow_compile_s, step_s, hangs_at = map(float, sys.argv[1:])

def work(step):
    time.sleep(600 if step == hangs_at else step_s)

@jax.jit
def train_step(state, step):
    time.sleep(slow_compile_s)  # while it is traced
    io_callback(work, None, step, ordered=True)
    return state + step

state = jnp.float32(0)
with Watchdog({TIMEOUT_S}, {CODE}) as watchdog:
    for step in range(1, 6):
        watchdog.enter(f"step {{step}}", limited=step > 1)
        state = jax.block_until_ready(train_step(state, jnp.float32(step)))
        jax.effects_barrier()
print("state", state)
"""


def run(slow_compile_s=0.0, step_s=0.0, hangs_at=0):
    """(exit code, stdout, stderr, seconds) of a process of its own."""
    began = time.monotonic()
    command = [sys.executable, "-c", PROGRAM, str(slow_compile_s), str(step_s), str(hangs_at)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    return ended.returncode, ended.stdout, ended.stderr, time.monotonic() - began


def test_a_hang_in_a_step_ends_the_process_and_is_named():
    code, out, errors, seconds = run(hangs_at=3)
    assert code == CODE, errors
    assert out == ""
    first, *stacks = errors.strip().splitlines()
    assert first == "hang: step 3 has not ended within 2 s; stacks of all threads follow"
    assert any("in work" in line for line in stacks)  # where it hangs
    assert any('"<string>"' in line and "in <module>" in line for line in stacks)  # who waits for it
    assert seconds < 60


def test_a_slow_compilation_is_no_hang():
    code, out, errors, _ = run(slow_compile_s=3 * TIMEOUT_S)
    assert (code, out) == (0, "state 15.0\n"), errors


def test_steps_in_time_are_left_alone():
    code, out, errors, seconds = run(step_s=TIMEOUT_S * 0.3)
    assert (code, out) == (0, "state 15.0\n"), errors
    assert seconds > TIMEOUT_S


def test_zero_watches_nothing():
    program = "from ep_jax.watchdog import Watchdog; import threading, time\n"
    program += "with Watchdog(0, 77) as dog: dog.enter('step 1'); time.sleep(0.5); print(threading.active_count())"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "1\n"
