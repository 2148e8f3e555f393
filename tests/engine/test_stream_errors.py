"""After an error anywhere the original exception surfaces, and the next step is exact."""

import gc
import traceback
import weakref

import pytest
import torch
from stream_cases import (
    WIDTH,
    Block,
    Stack,
    assert_same,
    data,
    descend,
    every_mode,
    every_policy,
    sgd,
    stack,
    state_of,
    stream,
    streaming,
)
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ramtorch_core import ConfigurationError, HostMemoryError, attach, offload
from ramtorch_core.engine import inventory
from ramtorch_core.engine.inventory import Inventory


class Boom(Exception):
    """The user's own."""


class Bomb(nn.Module):
    """Raises in forward, in backward, or in a recompute, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.when, self.calls, self.kind = nn.Linear(WIDTH, WIDTH), "", 0, Boom

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.when == "recompute" and self.calls % 2 == 0:
            self.raise_it()
        y = self.lin(x).tanh()
        if self.when == "forward":
            self.raise_it()
        if self.when == "backward":
            y.register_hook(lambda _: self.raise_it())
        return y

    def raise_it(self) -> None:
        raise self.kind("users own message")


def bombs() -> Stack:
    return Stack(Block(), Bomb(), Block(dropout=0.2), Block())


def raised(model: nn.Module, where: str, kind: type[BaseException]) -> str:
    """Make a step fail there; returns the traceback."""
    bomb = model.blocks[1]
    bomb.when, bomb.calls, bomb.kind = where, 0, kind

    def step() -> None:
        y = model(data(50))
        if where == "output hook":
            y.register_hook(lambda _: bomb.raise_it())
        if where == "loss":
            bomb.raise_it()
        y.square().mean().backward()

    with pytest.raises(kind, match="users own message") as caught:
        step()
    bomb.when, bomb.calls = "", 0
    return "".join(traceback.format_exception(caught.value))


PLACES = ["forward", "backward", "recompute", "loss", "output hook"]


@every_mode
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", [Boom, KeyboardInterrupt])
def test_an_error_surfaces_with_the_users_frame_and_the_next_step_is_exact(mode, where, kind):
    if where == "recompute" and mode["activations"] == "keep":
        pytest.skip("nothing is recomputed")
    torch.manual_seed(0)
    plain, model = bombs(), bombs()
    model.load_state_dict(plain.state_dict())
    optimizers = [sgd(each.parameters()) for each in (plain, model)]
    with streaming(model, **mode) as streamer:
        for index in range(4):
            if index != 2:
                text = raised(model, where, kind)
                assert "raise_it" in text
                assert not any(slot.in_use for slot in streamer.window.slots)
                model.zero_grad()
            results = []
            for each, optimizer in zip((plain, model), optimizers, strict=True):
                torch.manual_seed(index)
                results.append([descend(each, optimizer, index), state_of(each)])
            assert_same(results[1], results[0])


@every_mode
def test_an_error_in_a_later_microbatch_keeps_the_gradients_of_the_earlier_ones_or_drops_them(mode):
    model = bombs()
    with streaming(model, **mode):
        model.eval()
        model(data(0)).square().mean().backward()
        first = state_of(model)
        raised(model, "forward", Boom)
        assert_same(state_of(model), first)
        model(data(1)).square().mean().backward()
        found = state_of(model)
    plain = bombs()
    plain.load_state_dict(model.state_dict())
    plain.eval()
    for index in (0, 1):
        plain(data(index)).square().mean().backward()
    assert_same(found, state_of(plain))


@every_policy
def test_errors_without_gradients_leave_no_trace(mode):
    model = bombs()
    model.eval()
    with streaming(model, **mode) as streamer:
        expected = model(data())
        model.blocks[1].when = "forward"
        for guard in (torch.no_grad, torch.inference_mode):
            with pytest.raises(Boom), guard():
                model(data())
        assert not any(slot.in_use for slot in streamer.window.slots)
        model.blocks[1].when = ""
        assert torch.equal(model(data()), expected)


@every_policy
def test_an_error_that_user_code_catches_inside_of_a_forward_is_no_error(mode):
    class Forgiving(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                try:
                    x = block(x)
                except Boom:
                    x = x * 2
            return x

    def build():
        torch.manual_seed(0)
        model = Forgiving(Block(), Bomb(), Block())
        model.blocks[1].when = "forward"
        return model

    plain, model = build(), build()
    with streaming(model, **mode):
        for each in (plain, model):
            optimizer = sgd(p for n, p in each.named_parameters() if "blocks.1" not in n)
            for index in range(3):
                descend(each, optimizer, index)
        assert_same(state_of(model), state_of(plain))


@every_policy
def test_a_wrong_shape_raises_torchs_own_error_and_the_next_step_works(mode):
    model = stack()
    with streaming(model, **mode):
        with pytest.raises(RuntimeError, match="shape"):
            model(torch.ones(3, WIDTH + 1))
        model(data()).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


# --- bad input --------------------------------------------------------------------------------------------------------


def refused(match: str, model: nn.Module | None = None, error: type[Exception] = ConfigurationError, **options) -> None:
    model = model or stack()
    addresses = [p.data_ptr() for p in model.parameters() if not is_lazy(p)]
    with pytest.raises(error, match=match):
        stream(model, **options)
    assert [p.data_ptr() for p in model.parameters() if not is_lazy(p)] == addresses
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("window", [0, -1, 1.5, True, "2", None])
def test_a_window_below_one_slot_is_refused(window):
    refused("window=.*at least 1 slot", window=window)


@pytest.mark.parametrize("pin", [-1, [4], [-1], ["blocks.9"]])
def test_pins_out_of_range_are_refused(pin):
    refused("pin", pin=pin)


def test_more_pins_than_chunks_keep_all_resident_with_one_warning():
    model = stack()
    with pytest.warns(UserWarning, match="pin=9 exceeds the number of chunks, 4") as caught:
        streamer = stream(model, pin=9)
    assert len(caught) == 1
    model(data()).sum().backward()
    assert streamer.device_weight_bytes() == sum(p.nbytes for p in model.parameters())
    streamer.close()


def test_an_unknown_activation_policy_is_refused():
    refused("activations='forget': use one of 'keep', 'checkpoint'", activations="forget")


def test_unknown_chunk_names_are_refused():
    refused("no module is named 'blocks.9'|matches no module", chunks=["blocks.9"])


def test_an_unknown_device_is_refused():
    refused("not supported", device="meta")
    if torch.cuda.device_count() == 0:
        refused("has 0 CUDA devices", device="cuda")


def test_parameters_on_the_meta_device_are_refused_by_name():
    with torch.device("meta"):
        model = stack()
    refused(r"'blocks\.0\.norm\.weight' is on the meta device.*to_empty", model)


def test_lazy_parameters_are_refused_by_name():
    refused(r"'blocks\.1\.weight' is not initialised", Stack(Block(), nn.LazyLinear(3)))


def test_attaching_twice_is_refused_also_by_way_of_a_part_or_a_whole():
    model = stack()
    whole = nn.Sequential(model)
    with streaming(model):
        for again, chunks in ((model, "blocks.*"), (whole, "0.blocks.*")):
            with pytest.raises(ConfigurationError, match="streamed already"):
                attach(again, device="cpu", chunks=chunks)
    with streaming(whole, chunks="0.blocks.*"), pytest.raises(ConfigurationError, match="streamed already"):
        stream(model)


def test_too_little_host_memory_is_refused_before_anything_is_allocated():
    refused("host memory.*pin=", error=HostMemoryError, host_memory=1)


def test_inference_needs_no_host_memory_beyond_the_shadows():
    model = stack()
    half = sum(2 * p.numel() for p in model.parameters())
    for training, needed in ((False, half), (True, half + sum(p.nbytes for p in model.parameters()))):
        stream(model, training=training, host_memory=needed).close()
        refused("host memory", model, HostMemoryError, training=training, host_memory=needed - 1)


@every_policy
@pytest.mark.parametrize("place", ["receive", "finish"])
def test_an_error_while_gradients_travel_leaves_nothing_even_if_its_traceback_is_kept(mode, place, monkeypatch):
    plain, model = stack(), stack()
    model.load_state_dict(plain.state_dict())
    with streaming(model, **mode) as streamer:
        with monkeypatch.context() as patch:
            patch.setattr(streamer.gradients, place, lambda *_: (_ for _ in ()).throw(MemoryError(place)))
            with pytest.raises(MemoryError, match=place) as kept:
                model(data()).sum().backward()
        model.zero_grad()
        for each in (plain, model):
            for parameter in each.parameters():
                parameter.data.add_(0.1)
        losses = [each(data(1)).sum() for each in (plain, model)]
        del kept  # a task that dies late must not take another step with it
        for loss in losses:
            loss.backward()
        assert_same(losses[1], losses[0])
        assert_same(state_of(model), state_of(plain))


def test_abandoning_a_step_whose_error_is_still_kept_does_not_touch_the_next_one():
    model, plain = bombs().eval(), bombs().eval()
    plain.load_state_dict(model.state_dict())
    with streaming(model) as streamer:
        model.blocks[1].when = "backward"
        with pytest.raises(Boom) as kept:
            model(data()).sum().backward()
        streamer.abandon()
        model.blocks[1].when = ""
        model.zero_grad()
        loss = model(data(1)).sum()
        del kept
        loss.backward()
        plain(data(1)).sum().backward()
        assert_same(state_of(model), state_of(plain))


def test_a_device_that_is_too_small_for_the_resident_chunks_leaves_a_plain_module(monkeypatch):
    place, calls = Inventory.place_residents, []

    def full(inventory: Inventory, device: torch.device) -> None:
        place(inventory, device)
        calls.append(device)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("users own message")

    model = stack()
    with monkeypatch.context() as patch:
        patch.setattr(Inventory, "place_residents", full)
        with pytest.raises(torch.OutOfMemoryError, match="users own message"):
            attach(model, device="cpu", chunks="blocks.*", pin=1, resident_below=0)
    assert len(calls) == 2  # to the device, and back
    assert not any("forward" in vars(module) for module in model.modules())
    with streaming(model):
        model(data()).sum().backward()


def test_memory_that_only_garbage_holds_counts_as_available(monkeypatch: pytest.MonkeyPatch) -> None:
    class Held:
        def __init__(self) -> None:
            self.itself = self

    gc.disable()
    try:
        held = weakref.ref(Held())
        monkeypatch.setattr(inventory, "available_bytes", lambda: 1 << 30 if held() is None else 1)
        attach(stack(), device="cpu", resident_below=0, chunks="leaves").close()
    finally:
        gc.enable()


def test_an_error_of_what_measures_leaves_a_plain_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise Boom

    net = stack()
    with monkeypatch.context() as patched:
        patched.setattr(offload, "tune_lazily", fail)
        with pytest.raises(Boom):
            attach(net, device="cpu", window="auto")
    assert all("forward" not in vars(module) for module in net.modules())
    attach(net, device="cpu").close()
