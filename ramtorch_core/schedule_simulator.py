"""Simulates pipeline schedules: `python -m ramtorch_core.schedule_simulator --help`."""

from ramtorch_core.simulate.schedule_command import main

if __name__ == "__main__":
    raise SystemExit(main())
