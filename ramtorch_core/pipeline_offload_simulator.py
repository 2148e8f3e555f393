"""Simulates pipelines whose stages stream: `python -m ramtorch_core.pipeline_offload_simulator --help`."""

from ramtorch_core.simulate.pipeline_offload_command import main

if __name__ == "__main__":
    raise SystemExit(main())
