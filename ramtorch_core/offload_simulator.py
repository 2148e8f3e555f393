"""Simulates weights that stream through a GPU: `python -m ramtorch_core.offload_simulator --help`."""

from ramtorch_core.simulate.offload_command import main

if __name__ == "__main__":
    raise SystemExit(main())
