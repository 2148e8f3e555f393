"""Errors, interruptions and the lifetime of what a step holds."""

import contextlib
import gc
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_cases import Chain, accumulate, assert_same_gradients, batches, pipeline, run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ramtorch_core.engine.pipeline.crew import Crew
from ramtorch_core.engine.pipeline.executor import Executor
from ramtorch_core.engine.pipeline.stages import resolve_entries
from ramtorch_core.errors import RamtorchError
from ramtorch_core.memory.device import Device

pytestmark = pytest.mark.timeout(20)
CUTS = ["blocks.1", "blocks.2", "blocks.3"]


class BackwardError(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("in backward")


class Fragile(Chain):
    """Raises at a chosen place in the microbatch whose label sum is chosen."""

    place: str | None = None

    def training_step(self, batch: Any) -> Tensor:
        x, y, bad = batch
        for i, block in enumerate(self.blocks):
            if bad and self.place == f"forward {i}":
                raise ArithmeticError(self.place)
            x = block(x)
            if bad and self.place == f"backward {i}":
                x = BackwardError.apply(x)
        if bad and self.place == "loss":
            raise ArithmeticError("loss")
        return F.cross_entropy(self.head(x), y)


def marked(bad: int | None, count: int = 5) -> list[Any]:
    return [(*item, m == bad) for m, item in enumerate(batches(count))]


@pytest.mark.parametrize("schedule", ["gpipe", "staggered_1b1f", "zb_h1", "zbv"])
@pytest.mark.parametrize("place", [*(f"{p} {i}" for p in ("forward", "backward") for i in range(4)), "loss"])
def test_an_error_anywhere_reaches_the_caller_and_the_next_step_is_exact(place: str, schedule: str) -> None:
    model = Fragile()
    with pipeline(model, CUTS) as executor:
        for bad in (0, 3, 4):
            model.place = place
            with pytest.raises(ArithmeticError) as error:
                run(executor, model.training_step, marked(bad), schedule)
            frames = [frame.name for frame in traceback.extract_tb(error.tb)]
            assert "backward" in frames if place.startswith("backward") else "training_step" in frames
            assert all(p.grad is None for p in model.parameters())
            model.place = None
            reference = Chain()
            reference.load_state_dict(model.state_dict())
            accumulate(reference, reference.training_step, batches(5))
            assert_same_gradients(model, reference, run(executor, model.training_step, marked(None), schedule))


def test_an_error_in_a_checkpoint_leaves_threads_that_work_even_if_it_is_kept() -> None:
    model = Fragile()
    model.place = "forward 1"

    def training_step(batch: Any) -> Any:
        return checkpoint(model.training_step, batch, use_reentrant=False)

    with pipeline(model, CUTS) as executor:
        with pytest.raises(ArithmeticError) as kept:
            run(executor, training_step, marked(2))
        reference = Chain()
        reference.load_state_dict(model.state_dict())
        accumulate(reference, reference.training_step, batches(5))
        assert_same_gradients(model, reference, run(executor, model.training_step, marked(None)))
    assert kept.tb is not None


def test_user_code_cannot_swallow_the_abort_of_a_step() -> None:
    """The other microbatches wait inside the user's `except Exception`."""
    model = Chain()

    def training_step(item: Any) -> Tensor:
        x, y, bad = item
        if bad:
            raise ArithmeticError
        try:
            return F.cross_entropy(model(x), y)
        except Exception:
            return F.cross_entropy(model.head(x), y)

    with pipeline(model, CUTS) as executor, pytest.raises(ArithmeticError):
        run(executor, training_step, marked(2))


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, StopIteration])
def test_errors_that_are_no_ordinary_exceptions_reach_the_caller_too(error: type[BaseException]) -> None:
    def training_step(item: Any) -> Tensor:
        raise error

    with pipeline(Chain(), CUTS) as executor, pytest.raises(error):
        run(executor, training_step, batches(3))


def test_ctrl_c_ends_a_step_whose_drivers_wait_and_the_next_step_works() -> None:
    model = Chain()
    main = threading.main_thread().ident
    assert main is not None
    interrupted = threading.Event()

    def handler(*_: Any) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def training_step(item: Any) -> Tensor:
        x, y = item
        x = model.blocks[1](model.blocks[0](x))
        if not interrupted.is_set():
            signal.pthread_kill(main, signal.SIGINT)
            assert interrupted.wait(10)
        return F.cross_entropy(model.head(model.blocks[3](model.blocks[2](x))), y)

    before = signal.signal(signal.SIGINT, handler)
    try:
        with pipeline(model, CUTS) as executor:
            with pytest.raises(KeyboardInterrupt):
                run(executor, training_step, batches(4))
            assert run(executor, training_step, batches(4)).gradients
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("instruction", range(1, 170, 3))
def test_an_interruption_at_any_instruction_leaves_a_crew_that_works(instruction: int) -> None:
    crew = Crew("interrupted")
    left = instruction

    def trace(frame: Any, event: str, _value: Any) -> Any:
        nonlocal left
        if frame.f_code is not Crew.run.__code__:
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            crew.run([lambda: None, lambda: None], lambda _: None)
    finally:
        sys.settrace(former)
    ran: list[int] = []
    crew.run([lambda: ran.append(1), lambda: ran.append(2)], lambda _: None)
    assert sorted(ran) == [1, 2]
    crew.close()
    assert not any(thread.name.startswith("interrupted") for thread in threading.enumerate())


@pytest.mark.parametrize("order", [[0, 2, 1], [0, 1, 1]])
def test_a_stage_entered_out_of_order_or_twice_is_refused_by_name(order: list[int]) -> None:
    model = Chain(3)

    def training_step(item: Any) -> Tensor:
        x, y = item
        for i in order:
            x = model.blocks[i](x)
        return F.cross_entropy(model.head(x), y)

    entered = r"module 'blocks\.1', which begins stage 1, was entered while"
    with pipeline(model, ["blocks.1", "blocks.2"]) as executor, pytest.raises(RamtorchError, match=entered):
        run(executor, training_step, batches(2))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return gradient * b, gradient * a


def test_a_function_that_takes_an_earlier_stages_tensor_unseen_is_refused_not_wrong() -> None:
    model = Chain()

    def training_step(item: Any) -> Tensor:
        x, y = item
        first = model.blocks[0](x)
        x = model.blocks[3](model.blocks[2](model.blocks[1](first)))
        return F.cross_entropy(model.head(Square.apply(x, first)), y)

    with pipeline(model, CUTS) as executor, pytest.raises(RamtorchError, match=r"stage 0 met a part .* cut elsewhere"):
        run(executor, training_step, batches(2))


def test_a_loss_with_several_elements_is_refused_like_in_plain_torch() -> None:
    model = Chain()
    with pipeline(model, CUTS) as executor, pytest.raises(RuntimeError, match="scalar"):
        run(executor, lambda item: model(item[0]), batches(2))


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_step_holds_no_activation_after_it_without_the_collector(without_collector: None) -> None:
    """A reference cycle keeps every activation alive until the collector happens to run."""
    model = Chain()
    alive: list[weakref.ref[Tensor]] = []

    def training_step(item: Any) -> dict[str, Tensor]:
        x, y = item
        kept = []
        for block in model.blocks:
            x = block(x)
            alive.append(weakref.ref(x))
            kept.append(x)
        return {"loss": F.cross_entropy(model.head(x + kept[0]), y)}

    with pipeline(model, CUTS) as executor:
        for schedule in ("gpipe", "staggered_1b1f", "zb_h1"):
            result = run(executor, training_step, batches(4), schedule)
            assert len(alive) >= 16
            assert [ref for ref in alive if ref() is not None] == []
        del result


def test_an_error_leaves_nothing_alive_once_it_is_dropped(without_collector: None) -> None:
    model = Fragile()
    model.place = "backward 1"
    alive: list[weakref.ref[Tensor]] = []
    model.blocks[2].register_forward_hook(lambda m, a, out: alive.append(weakref.ref(out)))
    with pipeline(model, CUTS) as executor:
        try:
            run(executor, model.training_step, marked(2))
        except ArithmeticError as error:
            traceback.clear_frames(error.__traceback__)
        assert alive
        assert [ref for ref in alive if ref() is not None] == []


def test_activations_in_memory_are_bounded_by_the_schedule() -> None:
    """At most S microbatches of 1F1B, all of gpipe, one at a time of sequential."""
    most = {}
    for schedule in ("sequential", "staggered_1b1f", "gpipe"):
        model = Chain()
        live: set[int] = set()
        peak = [0]

        def watch(module: nn.Module, args: Any, out: Tensor, live: set[int] = live, peak: list[int] = peak) -> None:
            number = id(out.grad_fn)
            live.add(number)
            peak[0] = max(peak[0], len(live))
            weakref.finalize(out, live.discard, number)

        model.blocks[0].up.register_forward_hook(watch)
        with pipeline(model, CUTS) as executor:
            run(executor, model.training_step, batches(8), schedule)
        most[schedule] = peak[0]
    assert most["sequential"] == 1
    assert most["staggered_1b1f"] <= 4 < most["gpipe"] == 8


def test_an_executor_that_is_dropped_takes_its_threads_with_it() -> None:
    before = set(threading.enumerate())
    model = Chain()
    stages = resolve_entries(model, CUTS, 4)
    executor = Executor(stages, [Device("cpu")] * 4)
    run(executor, model.training_step, batches(2))
    started = [thread for thread in threading.enumerate() if thread not in before]
    assert started
    del executor
    gc.collect()
    for thread in started:
        thread.join(5)
    assert not any(thread.is_alive() for thread in started)


def test_threads_outlive_a_step_and_are_reused_by_the_next() -> None:
    model = Chain()
    names: list[set[str]] = []
    with pipeline(model, CUTS) as executor:
        for _ in range(3):
            used: set[str] = set()

            def training_step(item: Any, used: set[str] = used) -> Tensor:
                used.add(threading.current_thread().name)
                return model.training_step(item)

            run(executor, training_step, batches(8))
            names.append(used)
        alive = {thread.name for thread in threading.enumerate()}
        assert set.union(*names) <= alive
        assert len(set.union(*names)) <= 4  # as many as 1F1B has microbatches under way
    executor.close()  # a second time


def test_two_executors_train_two_models_in_one_process_at_the_same_time() -> None:
    models = [Chain(), Chain()]
    references = [Chain(), Chain()]
    for model, reference in zip(models, references, strict=True):
        reference.load_state_dict(model.state_dict())
        accumulate(reference, reference.training_step, batches(6))
    with pipeline(models[0], CUTS) as first, pipeline(models[1], CUTS[:2]) as second:
        results: dict[int, Any] = {}

        def work(index: int, executor: Executor) -> None:
            results[index] = run(executor, models[index].training_step, batches(6))

        threads = [
            threading.Thread(target=work, args=(i, executor), name=f"caller-{i}")
            for i, executor in enumerate((first, second))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for i in range(2):
        assert_same_gradients(models[i], references[i], results[i])


def test_a_model_inside_another_pipeline_is_called_plainly() -> None:
    """A frozen, pipelined teacher used while a student trains: its entries belong to another executor."""
    teacher, student = Chain(), Chain()
    with pipeline(teacher, CUTS), pipeline(student, CUTS) as executor:

        def training_step(item: Any) -> Tensor:
            with torch.no_grad():
                target = teacher(item[0])
            return F.mse_loss(student(item[0]), target)

        reference = Chain()
        reference.load_state_dict(student.state_dict())
        result = run(executor, training_step, batches(3))
        accumulate(reference, lambda item: F.mse_loss(reference(item[0]), teacher(item[0]).detach()), batches(3))
    assert_same_gradients(student, reference, result)


def test_a_crew_runs_every_job_and_grows_only_when_needed() -> None:
    crew = Crew("crew")
    lock, ran = threading.Lock(), []

    def job() -> None:
        with lock:
            ran.append(threading.current_thread().name)

    def never(error: BaseException) -> None:
        raise AssertionError(error)

    try:
        crew.run([job] * 3, never)
        crew.run([job] * 2, never)
        assert len(ran) == 5
        assert set(ran) <= {"crew-0", "crew-1", "crew-2"}
    finally:
        crew.close()
    crew.close()
    crew.run([job], never)  # closed crews start anew
    crew.close()
    assert len(ran) == 6
