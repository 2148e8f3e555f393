"""The follower learns a step's itinerary, issues the plan's transfers, and relearns after an excursion."""

import gc
import weakref
from contextlib import closing

import pytest
import torch
from stream_cases import assert_same, data, descend, sgd, stack, streaming
from torch import nn

from ramtorch_core import Streamer, attach
from ramtorch_core.plan.itinerary import Direction, format_itinerary, parse_itinerary, straight_itinerary
from ramtorch_core.plan.transfers import plan_transfers


def executed(streamer: Streamer) -> tuple[str, list[tuple[int, int, int]]]:
    """The last step's itinerary and transfers."""
    itinerary, transfers = streamer.follower.last
    return format_itinerary(itinerary), [(t.chunk, t.slot, t.needed_by) for t in transfers]


def planned(text: str, slots: int) -> list[tuple[int, int, int]]:
    return [(t.chunk, t.slot, t.needed_by) for t in plan_transfers(parse_itinerary(text), slots).transfers]


@pytest.mark.parametrize("window", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_after_two_equal_steps_no_copy_is_on_demand_and_transfers_equal_the_plan(window, activations):
    model = stack()
    with streaming(model, window=window, activations=activations) as streamer:
        optimizer = sgd(model.parameters())
        for index in range(2):
            descend(model, optimizer, index)
        learned = streamer.follower.on_demand
        assert learned > 0
        for index in range(3):
            descend(model, optimizer, index)
            text, transfers = executed(streamer)
            assert text == format_itinerary(straight_itinerary(range(4)))
            assert transfers == planned(text, min(window, 4))
        assert streamer.follower.on_demand == learned


@pytest.mark.parametrize("window", [1, 2, 3])
def test_copies_per_step_are_the_fewest_possible(window):
    model = stack()
    with streaming(model, window=window) as streamer:
        optimizer = sgd(model.parameters())
        for index in range(2):
            descend(model, optimizer, index)
        before = streamer.window.copied_bytes
        descend(model, optimizer, 2)
        group = streamer.groups[0].nbytes
        assert streamer.window.copied_bytes - before == (2 * 4 - window) * group


def test_after_an_excursion_the_old_plan_fits_again():
    model = stack()
    with streaming(model) as streamer:
        optimizer = sgd(model.parameters())
        for index in range(3):
            descend(model, optimizer, index)
        model.blocks[2](data()).sum().backward()  # an excursion
        before = streamer.follower.on_demand
        descend(model, optimizer, 4)
        descend(model, optimizer, 5)
        settled = streamer.follower.on_demand
        assert settled - before <= 4
        for index in range(3):
            descend(model, optimizer, index)
        assert streamer.follower.on_demand == settled


def test_a_new_order_is_learned_after_one_step():
    model = stack()

    def reverse(index):
        x = data(index)
        for block in reversed(model.blocks):
            x = block(x)
        x.sum().backward()

    with streaming(model) as streamer:
        for index in range(3):
            model(data(index)).sum().backward()
        for index in range(2):
            reverse(index)
        settled = streamer.follower.on_demand
        reverse(5)
        assert streamer.follower.on_demand == settled
        assert executed(streamer)[0] == "F3 F2 F1 F0 B0 B1 B2 B3"


def test_alternating_training_and_evaluation_are_both_learned():
    model = stack()
    with streaming(model) as streamer:
        optimizer = sgd(model.parameters())

        def epoch():
            for index in range(2):
                descend(model, optimizer, index)
            with torch.no_grad():
                for index in range(2):
                    model(data(index))

        for _ in range(3):
            epoch()
        settled = streamer.follower.on_demand
        epoch()
        assert streamer.follower.on_demand == settled


def test_a_step_that_leaves_the_plan_in_the_middle_is_exact():
    model = stack()
    skipping = [(0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2, 2, 3), (0, 1, 2, 3)]
    with streaming(model, window=2):
        for order in skipping:
            model.zero_grad()
            x = data()
            for index in order:
                x = model.blocks[index](x)
            x.sum().backward()
            found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            plain = stack()
            plain.load_state_dict(model.state_dict())
            x = data()
            for index in order:
                x = plain.blocks[index](x)
            x.sum().backward()
            assert_same(found, [p.grad for p in plain.parameters()])


def test_a_failed_step_teaches_nothing():
    model = stack()
    with streaming(model) as streamer:
        for _ in range(2):
            model(data()).sum().backward()
        before = streamer.follower.on_demand
        y = model(data())
        y.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()
        assert streamer.follower.visits == []
        for _ in range(2):
            model(data()).sum().backward()
        assert streamer.follower.on_demand - before <= 8
        assert executed(streamer)[0] == format_itinerary(straight_itinerary(range(4)))


def test_a_visit_of_an_abandoned_step_closes_nothing_of_the_next() -> None:
    net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    with closing(attach(net, device="cpu", chunks="*", resident_below=0)) as streamer:
        streamer.prepare()
        follower = streamer.follower
        old = follower.open(streamer.groups[0], Direction.FORWARD)
        follower.abandon_step()
        new = follower.open(streamer.groups[0], Direction.FORWARD)
        follower.close(old)
        assert new.slot.in_use
        follower.close(new)
        assert not new.slot.in_use


def test_slots_are_freed_with_the_engine_though_it_is_still_known():
    model = stack()
    with streaming(model) as streamer:
        for _ in range(3):
            model(data()).sum().backward()
        slots = [weakref.ref(slot) for slot in streamer.window.slots]
    gc.collect()
    assert slots
    assert not any(slot() for slot in slots)
    assert streamer.closed
