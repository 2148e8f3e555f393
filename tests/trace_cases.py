"""Reading trace files."""

import gzip
import json
from os import PathLike
from pathlib import Path


def ranges_in(path: str | PathLike[str], letters: str) -> list[str]:
    """Labels of the engine's ranges with these first letters, in the order in which the host began them."""
    raw = Path(path).read_bytes()
    events = json.loads(gzip.decompress(raw) if str(path).endswith(".gz") else raw)["traceEvents"]
    named = [event for event in events if event.get("cat") == "user_annotation"]
    ordered = [str(event["name"]) for event in sorted(named, key=lambda event: event["ts"])]
    return [name for name in ordered if name[0] in letters and name[1:].isdigit()]


def ops_in(path: str | PathLike[str]) -> list[str]:
    """Labels of pipeline ops, in the order in which the host began them."""
    events = json.loads(Path(path).read_text())["traceEvents"]
    named = [event for event in events if event.get("cat") == "user_annotation" and event["name"][0].isdigit()]
    return [str(event["name"]) for event in sorted(named, key=lambda event: event["ts"])]
