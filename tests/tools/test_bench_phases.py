"""Where a step's time goes: kernels by phase and pass, collectives apart, exposed and idle time of each device."""

import pytest

from ep_jax.profiling import Event
from tools.bench.phases import collective_of, phase_of, phases_of, scopes_of

MODEL = "jit(step)/shard_map"
BACKWARD = f"{MODEL}/transpose(jvp())/while/body/eval_jaxpr/checkpoint"
SCOPES = {
    "fusion.1": f"{MODEL}/jvp()/while/body/eval_jaxpr/attention/dot_general",
    "fusion.2": f"{BACKWARD}/rematted_computation/experts/erh,ehf->erf/dot_general",
    "fusion.3": f"{BACKWARD}/experts/erh,ehf->erf/dot_general",
    "all-to-all-start.4": f"{MODEL}/jvp()/while/body/eval_jaxpr/dispatch/all_to_all",
    "fusion.5": "jit(step)/optimizer/dot_general",
}


def kernel(device: int, operation: str, start_ms: float, ms: float, name: str = "kernel", **stats) -> Event:
    plane, stats = f"/device:GPU:{device}", ({"hlo_op": operation} if operation else {}) | stats
    return Event(plane=plane, line="Stream #7", name=name, start_ns=start_ms * 1e6, duration_ns=ms * 1e6, stats=stats)


def test_a_step_is_sorted_by_phase_and_pass():
    first = [
        kernel(0, "fusion.1", 0, 4),
        kernel(0, "all-to-all-start.4", 2, 6, "ncclDevKernel_SendRecv"),  # 2 of 6 ms beside attention, 1 beside experts
        kernel(0, "fusion.2", 7, 3),
        kernel(0, "fusion.3", 12, 5),  # 2 ms after anything else
        kernel(0, "fusion.5", 17, 2),
        kernel(0, "", 19, 1, "MemcpyD2H"),
    ]
    second = [kernel(1, "fusion.1", 0, 8), kernel(1, "while.9", 0, 30)]  # the loop itself is not a kernel
    phases = phases_of([*first, *second], SCOPES, steps=1)
    assert phases.by_phase == {
        "attention": {"forward": 6.0},  # mean of 4 and 8
        "experts": {"recomputed": 1.5, "backward": 2.5},
        "optimizer": {"forward": 1.0},
        "no scope": {"forward": 0.5},
    }
    assert phases.collectives == {"all-to-all": 3.0}
    assert phases.step == pytest.approx((20 + 8) / 2)
    assert phases.exposed == pytest.approx((3 + 0) / 2)  # from 4, when attention ends, to 7, when experts begin
    assert phases.idle == pytest.approx((2 + 0) / 2)
    assert phases.longest[0] == {"phase": "attention", "pass": "forward", "kernel": "kernel", "ms": 6.0}
    table = phases.table().splitlines()
    assert table[1].split() == ["attention", "6.00", "0.00", "0.00", "6.00", "42.9"]
    assert table[-1].split() == ["traced", "step", "14.00", "100.0"]


def test_times_are_of_one_step_of_those_traced():
    kernels = [kernel(0, "fusion.1", start, 4) for start in (0, 5)]
    phases = phases_of(kernels, SCOPES, steps=2)
    assert phases.by_phase == {"attention": {"forward": 4.0}}
    assert (phases.step, phases.idle) == (4.5, 0.5)


def test_without_gpus_threads_are_summed_and_nothing_is_said_about_idling():
    events = [
        Event(plane="/host:CPU", line=f"thread {i}", name="x", start_ns=0, duration_ns=2e6, stats={"hlo_op": operation})
        for i, operation in enumerate(("fusion.1", "fusion.1", "fusion.3"))
    ]
    events.append(Event(plane="/host:CPU", line="python", name="main", start_ns=0, duration_ns=9e6, stats={}))
    phases = phases_of(events, SCOPES, steps=1)
    assert phases.by_phase == {"attention": {"forward": 4.0}, "experts": {"backward": 2.0}}
    assert (phases.step, phases.exposed, phases.idle) == (6.0, None, None)
    assert "idle" not in phases.table()


def test_a_trace_without_kernels_is_refused():
    with pytest.raises(ValueError, match="no kernels"):
        phases_of([], SCOPES, steps=1)


def test_a_gpus_own_scopes_count_where_the_program_says_nothing():
    phases = phases_of([kernel(0, "", 0, 1, name_scope="jit(step)/shard_map/jvp(loss)/exp")], {}, steps=1)
    assert phases.by_phase == {"loss": {"forward": 1.0}}


@pytest.mark.parametrize(
    ("path", "phase"),
    [
        ("jit(step)/shard_map/transpose(jvp(loss))/cd,dv->cv/dot_general", ("loss", "backward")),
        (f"{MODEL}/jvp()/while/body/eval_jaxpr/router/top_k", ("router", "forward")),
        (f"{MODEL}/jvp()/while/body/eval_jaxpr/route/cumsum", ("route", "forward")),
        (f"{BACKWARD}/(attention/psum_invariant:latent/psum_invariant)", ("attention", "backward")),
        (f"{MODEL}/jvp()/while/body/dynamic_slice", ("rest of the model", "forward")),
        (f"{BACKWARD}/rematted_computation/mul", ("rest of the model", "recomputed")),
        ("jit(step)/while/body/eval_jaxpr/add", ("rest of the model", "forward")),  # one device: no shard_map is left
        ("jit(step)/optimizer/jit(_where)/select_n", ("optimizer", "forward")),
        ("", ("no scope", "forward")),
    ],
)
def test_phases_by_the_path_of_an_operation(path, phase):
    assert phase_of(path) == phase


@pytest.mark.parametrize(
    ("kernel_name", "operation", "kind"),
    [
        ("ncclDevKernel_SendRecv", "all-to-all-start.3", "all-to-all"),
        ("ncclDevKernel_SendRecv", "ragged-all-to-all-start", "ragged-all-to-all"),
        ("ncclDevKernel_ReduceScatter_Sum_f32", "async-start.2", "reduce-scatter"),
        ("ncclDevKernel_AllGather_RING_LL", "", "all-gather"),
        ("ncclKernel_new", "custom", "other collective"),
        ("nvjet_sm90_tst", "custom-call.3", None),
    ],
)
def test_collectives_by_instruction_or_kernel(kernel_name, operation, kind):
    assert collective_of(kernel_name, operation) == kind


def test_scopes_are_read_from_a_programs_text():
    text = """
  %fusion.1 = f32[8]{0} fusion(%p), kind=kLoop, metadata={op_type="mul" op_name="jit(step)/mul" stack_frame_id=4}
  ROOT all-to-all.2 = (f32[1]{0}) all-to-all(%fusion.1), metadata={op_name="jit(step)/all_to_all"}
  %copy.3 = f32[8]{0} copy(%p)
"""
    assert scopes_of(text) == {"fusion.1": "jit(step)/mul", "all-to-all.2": "jit(step)/all_to_all"}
