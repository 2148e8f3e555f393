"""Optimizer steps on the host, one group of weights at a time, while backward goes on."""
