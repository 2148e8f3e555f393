"""Tensors and events: devices, host memory, slots and gradients. No schedules."""
