"""What only a GPU can show: streams, events, page-locking, memory. Each against the resident run, bit for bit.

Every run poisons slots with NaN before each copy and puts a long kernel in front of each chunk: a copy that does
not wait for compute, or compute that does not wait for a copy, changes the result.
"""

import copy
import gc
import os
import warnings

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
import torch.nn.functional as F
from stream_gpu_cases import MODELS, SLEEP_CYCLES, WIDTH, Block, Net
from torch import Tensor, nn

from ramtorch_core import attach
from ramtorch_core.memory.device import Device

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


def steps_equal(
    net: nn.Module,
    *,
    steps: int = 4,
    microbatches: int = 1,
    amp: torch.dtype | None = None,
    device: str = "cuda",
    **options: object,
) -> None:
    """Train `net` streamed, and a copy resident on the GPU with the same optimizer on the host; compare everything."""
    reference, masters = copy.deepcopy(net).to(device), copy.deepcopy(net)
    streamer = attach(net, device=device, poison=True, host_memory=1 << 40, **options)  # type: ignore[arg-type]
    ours = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3, foreach=True)
    theirs = torch.optim.AdamW([p for p in masters.parameters() if p.requires_grad], lr=1e-3, foreach=True)
    try:
        for step in range(steps):
            losses = []
            for model in (reference, net):
                torch.manual_seed(step)
                total = []
                for _ in range(microbatches):
                    ids = torch.randint(0, 512, (8, 64), device=device)
                    with torch.autocast("cuda", dtype=amp or torch.bfloat16, enabled=amp is not None):
                        loss = F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten()) / microbatches
                    loss.backward()
                    total.append(loss.detach())
                losses.append(torch.stack(total))
            assert torch.equal(*losses), f"losses differ in step {step}: {losses}"
            for (name, mine), other, master in zip(
                net.named_parameters(), reference.parameters(), masters.parameters(), strict=True
            ):
                assert (mine.grad is None) == (other.grad is None), name
                if mine.grad is not None and other.grad is not None:
                    assert torch.equal(mine.grad.cpu(), other.grad.cpu()), f"gradient of {name} differs in step {step}"
                    master.grad, other.grad = other.grad.cpu(), None
            ours.step()
            ours.zero_grad()
            theirs.step()
            with torch.no_grad():
                for other, master in zip(reference.parameters(), masters.parameters(), strict=True):
                    other.copy_(master)
        for name, buffer in reference.named_buffers():
            assert torch.equal(buffer, net.get_buffer(name)), f"buffer {name} differs"
    finally:
        streamer.close()
    for (name, mine), master in zip(net.named_parameters(), masters.named_parameters(), strict=True):
        assert torch.equal(mine, master[1]), f"{name} differs at the end"


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("amp", [None, torch.bfloat16, torch.float16], ids=["float32", "bf16", "fp16"])
def test_training_equals_the_resident_run(window: int, activations: str, amp: torch.dtype | None) -> None:
    steps_equal(Net(Block), window=window, activations=activations, amp=amp, resident_below=4096)


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
@pytest.mark.parametrize("name", list(MODELS))
def test_every_kind_of_chunk_equals_the_resident_run(name: str, activations: str) -> None:
    steps_equal(Net(MODELS[name]), activations=activations, amp=torch.bfloat16, resident_below=4096)


@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=["float32", "bf16"])
def test_accumulated_microbatches_equal_the_resident_run(amp: torch.dtype | None) -> None:
    steps_equal(Net(Block), microbatches=3, amp=amp, resident_below=4096)


def test_leaves_equal_the_resident_run() -> None:
    steps_equal(Net(Block), chunks="leaves", resident_below=0, amp=torch.bfloat16)


def test_a_model_without_chunks_equals_the_resident_run() -> None:
    steps_equal(Net(Block), resident_below=1 << 30, amp=torch.bfloat16)


def test_tied_embedding_and_head_equal_the_resident_run() -> None:
    net = Net(Block)
    net.head.weight = net.embed.weight
    steps_equal(net, resident_below=4096, amp=torch.bfloat16)


def test_the_callers_own_stream_is_respected() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        steps_equal(Net(Block), resident_below=4096, amp=torch.bfloat16)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_a_device_that_is_not_the_current_one_equals_the_resident_run(activations: str) -> None:
    assert torch.cuda.current_device() == 0
    before = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    steps_equal(Net(MODELS["dropout"]), device="cuda:1", activations=activations, resident_below=4096)
    assert torch.cuda.max_memory_allocated(0) == before
    assert torch.cuda.current_device() == 0


def test_pinned_chunks_compute_the_same_forward_and_gradients() -> None:
    net = Net(Block)
    reference = copy.deepcopy(net).cuda()
    ids = torch.randint(0, 512, (8, 64), device="cuda")
    streamer = attach(net, device="cuda", pin=["blocks.0", "blocks.3"], resident_below=4096, host_memory=1 << 40)
    for model in (net, reference):
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    assert net.blocks[0].up.weight.is_cuda
    assert not net.blocks[1].up.weight.is_cuda
    for mine, other in zip(net.parameters(), reference.parameters(), strict=True):
        assert mine.grad is not None
        assert mine.device == mine.grad.device
        assert torch.equal(mine.grad.cpu(), other.grad.cpu())
    streamer.close()
    assert all(not parameter.is_cuda for parameter in net.parameters())


def test_a_parameter_used_outside_of_its_chunk_gets_a_copy_that_stays() -> None:
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.table, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.linear(self.first(x), self.table.weight))

    net = Outside()
    reference = copy.deepcopy(net).cuda()
    streamer = attach(net, device="cuda", chunks="leaves", resident_below=0, host_memory=1 << 40)
    x = torch.randn(16, WIDTH, device="cuda")
    for _ in range(3):
        for model in (net, reference):
            model.zero_grad()
            model(x).square().mean().backward()
        assert torch.equal(net.table.weight.grad, reference.table.weight.grad.cpu())
        assert torch.equal(net.first.weight.grad, reference.first.weight.grad.cpu())
    reasons = {weight.name: reason for weight, reason in streamer.census.reasons.items()}
    assert reasons == {"table.weight": "used outside of its chunk's forward"}
    streamer.close()


def test_weights_on_the_device_are_slots_and_copies_and_nothing_else() -> None:
    """Resident Linear weights 6 x 2 MiB; two slots of 1 MiB under bf16, and the small tensors."""
    net = Net(Block)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    streamer = attach(net, device="cuda", resident_below=4096, host_memory=1 << 40)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        streamer.prepare()
    allocated = torch.cuda.memory_allocated() - before
    assert streamer.device_weight_bytes() <= allocated <= streamer.device_weight_bytes() + 4 * 512
    largest = max(group.nbytes for group in streamer.groups)
    assert streamer.device_weight_bytes() == 2 * largest + streamer._inventory.rest.nbytes
    streamer.close()


def test_memory_is_flat_while_the_host_runs_ahead() -> None:
    net = Net(lambda: Block(dropout=0.1))
    streamer = attach(net, device="cuda", resident_below=4096, host_memory=1 << 40)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    peaks = []
    for step in range(50):
        ids = torch.randint(0, 512, (4, 64), device="cuda")
        F.cross_entropy(net(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[-1] == peaks[1]
    streamer.close()


def test_memory_that_is_locked_already_is_used_unlocked_and_later_kernels_run() -> None:
    device = Device("cuda")
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    assert device.page_lock(memory.data_ptr(), memory.nbytes)
    assert not device.page_lock(memory.data_ptr(), memory.nbytes)
    assert torch.ones(8, device="cuda").sum().item() == 8
    device.page_unlock(memory.data_ptr())


def test_a_failed_page_lock_costs_speed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "page_lock", lambda *_: False)
    steps_equal(Net(Block), resident_below=4096, amp=torch.bfloat16)


def test_an_error_in_a_step_leaves_an_engine_that_works() -> None:
    net = Net(Block)
    reference = copy.deepcopy(net).cuda()
    streamer = attach(net, device="cuda", resident_below=4096, poison=True, host_memory=1 << 40)
    ids = torch.randint(0, 512, (8, 64), device="cuda")

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError("in backward")

    output = net(ids)
    output.register_hook(fail)
    with pytest.raises(ZeroDivisionError, match="in backward"):
        output.sum().backward()
    with pytest.raises(IndexError):
        net.blocks[2](torch.randn(8, 64, WIDTH, device="cuda"))[100]
    for model in (net, reference):
        model(ids).sum().backward()
    for mine, other in zip(net.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad.cpu())
    streamer.close()


def test_masters_may_be_written_while_the_device_still_computes() -> None:
    """A forward without gradients, then at once new weights: the forward must have used the old ones."""
    net = Net(Block)
    reference = copy.deepcopy(net).cuda()
    streamer = attach(net, device="cuda", resident_below=4096, host_memory=1 << 40)
    ids = torch.randint(0, 512, (8, 64), device="cuda")
    with torch.no_grad():
        expected = reference(ids)
        for _ in range(2):
            output = net(ids)
            for parameter in net.parameters():
                parameter.data.add_(1.0)
            assert torch.equal(output, expected)
            for parameter in net.parameters():
                parameter.data.sub_(1.0)
            net.load_state_dict(reference.state_dict())
    streamer.close()


def test_close_gives_the_device_memory_back_at_once() -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    net = Net(Block)
    streamer = attach(net, device="cuda", resident_below=4096, host_memory=1 << 40)
    ids = torch.randint(0, 512, (4, 64), device="cuda")
    F.cross_entropy(net(ids).flatten(0, 1), ids.flatten()).backward()
    del ids
    gc.disable()
    try:
        streamer.close()
        assert torch.cuda.memory_allocated() - before <= 16 << 20  # cuBLAS keeps its workspace
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_training_goes_on_while_a_forked_child_lives() -> None:
    """As with a DataLoader's workers: the parent's copies must keep reading what the parent writes."""
    net = Net(Block)
    reference = copy.deepcopy(net).cuda()
    streamer = attach(net, device="cuda", resident_below=4096, poison=True, host_memory=1 << 40)
    ids = torch.randint(0, 512, (8, 64), device="cuda")
    reader, writer = os.pipe()
    net(ids).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.read(reader, 1)
        os._exit(0)
    try:
        for model in (net, reference):
            model.zero_grad()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.5)
            model(ids).sum().backward()
        for mine, other in zip(net.parameters(), reference.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad.cpu())
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)
        streamer.close()


def test_the_first_copy_waits_for_what_used_the_slots_memory_before() -> None:
    """The allocator may hand out memory that waiting kernels still read."""
    net = Net(Block)
    streamer = attach(net, device="cuda", resident_below=4096, host_memory=1 << 40)
    largest = 2 << 20
    x = torch.full((largest // 4,), 3.0, device="cuda")
    torch.cuda._sleep(50 * SLEEP_CYCLES)
    y = x * 2
    del x
    net(torch.randint(0, 512, (4, 64), device="cuda")).sum().backward()
    assert torch.equal(y, torch.full_like(y, 6.0))
    streamer.close()
