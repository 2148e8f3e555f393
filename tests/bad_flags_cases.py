"""Command lines, most of which cannot work."""

import contextlib
import functools
import io
import re
from collections.abc import Callable, Sequence

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from ramtorch_core.simulate import offload_command, pipeline_offload_command, schedule_command

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "schedule_simulator": schedule_command.main,
    "offload_simulator": offload_command.main,
    "pipeline_offload_simulator": pipeline_offload_command.main,
}
TEXTS = ["", "-1", "0", "1", "2", "7", "1.5", "nan", "inf", "-inf", "1e30", "1000000", "1e9", "1G", "-1M", "1:2"]
TEXTS += ["1:1:2", "0:0", "1:nan", "1,2", "1,", "a", "1,a", "keep", "checkpoint", "gpipe", "zbv,gpipe", "interleaved"]
TEXTS += ["first2", "first-1", "firstx", "first99", "first1G", "none", "host", "/dev/null", "/nonexistent/x", "1e-300"]
TEXTS += ["9" * 50, "--", "="]
FLAG_ALIASES = {"p": ["stages"], "m": ["microbatches"], "v": ["stages"], "layers": ["chunks"], "table": ["schedule"]}
ALONE = ("--json", "--choose", "--forward-only", "--vshape", "--help")


def flags(command: str) -> list[str]:
    """Those that its help lists."""
    text = said(command, ["--help"])[1]
    return sorted(set(re.findall(r"--[a-z0-9-]+", text)) - {"--help", "--plot"})


def said(command: str, words: Sequence[str]) -> tuple[int, str, str]:
    """Exit code, output, and errors."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            code = COMMANDS[command](words)
        except SystemExit as end:  # argparse's
            code = int(end.code or 0)
    return code, output.getvalue(), errors.getvalue()


@functools.cache
def lines() -> SearchStrategy[tuple[str, list[str]]]:
    """A command with one to four flags."""
    known = {command: flags(command) for command in COMMANDS}
    word = lambda flag: st.just(flag) if flag in ALONE else st.sampled_from(TEXTS).map(lambda text: f"{flag}={text}")
    return st.sampled_from(list(COMMANDS)).flatmap(
        lambda command: st.tuples(
            st.just(command),
            st.lists(st.sampled_from(known[command]), min_size=1, max_size=4, unique=True).flatmap(
                lambda names: st.tuples(*map(word, names)).map(list)
            ),
        )
    )


def refusal_problem(words: Sequence[str], errors: str) -> str | None:
    """What is wrong with the message of a command that refused its flags."""
    last = errors.strip().splitlines()[-1] if errors.strip() else ""
    names = [word.removeprefix("--").partition("=")[0] for word in words]
    called = [other for name in names for other in (name, name.replace("-", "_"), *FLAG_ALIASES.get(name, ()))]
    given = [text for word in words if (text := word.partition("=")[2])]
    if any(re.search(rf"\b{re.escape(name)}\b", last) for name in called) or any(text in last for text in given):
        return None
    return f"names none of {' '.join(words)}: {last}"
