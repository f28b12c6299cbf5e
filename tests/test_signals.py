"""SIGTERM: default action until armed, a flag afterwards, also twice; nothing imports JAX."""

import signal
import socket
import subprocess
import sys
import time

PROGRAM = """
import sys, time
from ep_jax.signals import TerminationRequest

with TerminationRequest() as termination:
    print("entered", flush=True)
    if "arm" in sys.argv:
        termination.arm()
        print("armed", flush=True)
    deadline = time.monotonic() + 20
    while not termination.requested_anywhere() and time.monotonic() < deadline:
        time.sleep(0.01)
    print("saving", flush=True)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        time.sleep(0.01)
    print("saved", termination.requested, "jax" in sys.modules, flush=True)
print("left", flush=True)
time.sleep(20)
"""


def start(*arguments):
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True)


def expect(process, line):
    assert process.stdout.readline().strip() == line


def test_before_it_is_armed_the_default_action_applies():
    with start() as process:
        expect(process, "entered")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == -signal.SIGTERM
        assert process.stdout.read() == ""


def test_two_signals_save_once_and_the_default_action_returns_afterwards():
    with start("arm") as process:
        expect(process, "entered")
        expect(process, "armed")
        process.send_signal(signal.SIGTERM)
        expect(process, "saving")
        process.send_signal(signal.SIGTERM)
        expect(process, "saved True False")
        expect(process, "left")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == -signal.SIGTERM


def test_an_earlier_handler_is_put_back():
    from ep_jax.signals import TerminationRequest

    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        mine = signal.getsignal(signal.SIGTERM)
        with TerminationRequest() as termination:
            assert signal.getsignal(signal.SIGTERM) is mine
            termination.arm()
            assert not termination.requested_anywhere()
            signal.raise_signal(signal.SIGTERM)
            assert termination.requested_anywhere()
        assert signal.getsignal(signal.SIGTERM) is mine
        assert seen == []
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_blocking_call_is_continued_not_broken():
    code = (
        "import os, sys\nfrom ep_jax.signals import TerminationRequest\n"
        "with TerminationRequest() as t:\n t.arm()\n print('armed', flush=True)\n"
        " print(os.read(0, 4), t.requested, flush=True)\n"
    )
    arguments = [sys.executable, "-c", code]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        expect(process, "armed")
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.stdin.write("data")
        process.stdin.flush()
        expect(process, "b'data' True")
        assert process.wait(timeout=10) == 0


def test_the_default_action_also_applies_after_jax_distributed_has_taken_the_signal():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    code = (
        "import jax, time\njax.config.update('jax_platforms', 'cpu')\n"
        f"jax.distributed.initialize('localhost:{port}', 1, 0)\n"
        "from ep_jax.signals import TerminationRequest\n"
        "with TerminationRequest():\n print('entered', flush=True)\n time.sleep(20)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        expect(process, "entered")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == -signal.SIGTERM
