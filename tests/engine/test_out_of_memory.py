"""A device out of memory: torch's error, with the knobs that help and by how much."""

from typing import Any

import pytest
import torch
from stream_cases import data, stack
from torch import nn

from ramtorch_core import OffloadModel, attach
from ramtorch_core.engine.out_of_memory import add_advice, advise_streaming, advising

MESSAGE = "CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of 8.00 GiB."


def raising(wanted: str = "2.00 KiB") -> Any:
    def forward(*_: Any) -> Any:
        raise torch.OutOfMemoryError(MESSAGE.format(wanted))

    return forward


def attached(model: nn.Module, **options: Any) -> Any:
    return attach(model, device="cpu", chunks="blocks.*", resident_below=0, **options)


def test_the_error_of_a_forward_keeps_its_type_and_message_and_names_the_knobs() -> None:
    model = stack(6)
    model.blocks[5].down.forward = raising()
    streamer = attached(model, window=4, pin=2, activations="keep")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(data())
    text = str(caught.value)
    assert text.startswith(MESSAGE.format("2.00 KiB") + "\n(ramtorch: weights hold ")
    assert text.count("(ramtorch:") == 1
    slot = streamer.window.nbytes
    assert f"pass window=3 instead of 4, which frees {slot / 1e6:.2f} MB" in text
    one = sum(p.nbytes for p in model.blocks[0].parameters())
    assert f"pin 1 chunks instead of 2, which frees {4 * one / 1e6:.2f} MB with gradients and two moments" in text
    assert "pass activations='checkpoint'" in text
    assert "n_microbatches=" in text
    del model.blocks[5].down.forward
    model(data()).sum().backward()
    streamer.close()


def test_as_many_slots_and_chunks_are_named_as_free_what_was_wanted() -> None:
    model = stack(6)
    streamer = attached(model, window=4, pin=2)
    streamer.prepare()
    slot = streamer.window.nbytes
    text = advise_streaming(streamer, 2 * slot)
    assert f"pass window=2 instead of 4, which frees {2 * slot / 1e6:.2f} MB" in text
    text = advise_streaming(streamer, 1 << 40)
    assert "window=2 instead of 4" in text
    assert "pin 0 chunks instead of 2" in text
    assert "activations='checkpoint'" not in text
    streamer.close()


def test_with_the_smallest_knobs_smaller_chunks_and_batches_are_left() -> None:
    model = stack(3)
    streamer = attached(model)
    streamer.prepare()
    text = advise_streaming(streamer)
    assert "window=1 instead of 2" in text
    assert "take turns" in text
    assert "chunks=): the largest, 'blocks.0'" in text
    assert "pin " not in text
    streamer.close()


def test_a_step_of_a_list_of_chunks_names_the_knobs_also_in_its_backward() -> None:
    with OffloadModel(list(stack(2).blocks), device="cpu") as model:

        def fail(output: Any) -> Any:
            output.register_hook(raising())
            return output.sum()

        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate[\s\S]*\(ramtorch: .*window=1"):
            model.step(data(), loss_fn=fail)


def test_other_errors_stay_as_they_are() -> None:
    error = RuntimeError("CUDA error: out of order")
    add_advice(error, lambda wanted: pytest.fail("no memory was wanted"))
    assert str(error) == "CUDA error: out of order"


@pytest.mark.parametrize(
    ("wanted", "nbytes"), [("1.50 GiB", 3 << 29), ("20.00 MiB", 20 << 20), ("512 bytes", 512), ("much", 0)]
)
def test_how_much_was_wanted_is_read_from_the_message(wanted: str, nbytes: int) -> None:
    asked: list[int] = []
    with pytest.raises(torch.OutOfMemoryError), advising(lambda found: asked.append(found) or "less"):  # type: ignore[func-returns-value]
        raising(wanted)()
    assert asked == [nbytes]
