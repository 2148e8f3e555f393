"""Whatever constructors and commands are given, they work, or say which argument cannot, and never fail deep inside.

RAMTORCH_EXAMPLES=1000 pytest tests/test_bad_arguments.py      # that many of each kind, chosen at random
"""

import contextlib
import os
from typing import Any

import pytest
from bad_arguments_cases import Target, calls, problem
from bad_flags_cases import lines, refusal_problem, said
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from ramtorch_core import ConfigurationError, PlanError
from ramtorch_core.plan.check import check
from ramtorch_core.plan.schedule import Schedule

EXAMPLES = int(os.environ.get("RAMTORCH_EXAMPLES", "0"))

pytestmark = [
    pytest.mark.timeout(60 + 2 * EXAMPLES),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("quiet"),
]


def examples(count: int) -> settings:
    """So many, the same ones each time, unless more are asked for."""
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(
        max_examples=EXAMPLES or count,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=checks,
    )


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of trainers say nothing."""
    monkeypatch.setattr("logging.Logger.isEnabledFor", lambda *_: False)


@examples(200)
@given(calls())
def test_bad_arguments_work_or_are_named(call: tuple[Target, dict[str, Any]]) -> None:
    target, arguments = call
    try:
        target.use(arguments)
    except Exception as error:
        event(f"{target.name}: {type(error).__name__}")
        wrong = problem(error, target.arguments)
        if wrong is not None:
            raise AssertionError(f"{target.name}({arguments}): {wrong}") from error
    else:
        event(f"{target.name}: works")


@examples(100)
@given(lines())
def test_command_lines_work_or_name_a_flag_and_exit_with_2(line: tuple[str, list[str]]) -> None:
    command, words = line
    code, output, errors = said(command, words)
    event(f"{command}: {code}")
    assert code in (0, 2)
    if code == 2:
        assert refusal_problem(words, errors) is None
    else:
        assert output
        assert not errors


@examples(50)
@given(st.text("0123FBIW \n", max_size=24))
def test_any_text_is_a_schedule_that_can_run_or_is_refused(text: str) -> None:
    with contextlib.suppress(ConfigurationError, PlanError):
        check(Schedule.parse(text))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("window"), "KeyError is not what users are told to expect"),
        (TypeError("'<' not supported between instances of 'str' and 'int'"), "names none of window, pin"),
    ],
)
def test_an_error_that_helps_nobody_is_a_problem(error: Exception, words: str) -> None:
    assert words in (problem(error, ["window", "pin"]) or "")
    assert problem(ConfigurationError("window=0: at least 1 slot is needed"), ["window", "pin"]) is None


def test_a_refusal_that_names_neither_flag_nor_value_is_a_problem() -> None:
    assert refusal_problem(["--width=3"], "offload_simulator: it cannot be") is not None
    assert refusal_problem(["--width=3"], "offload_simulator: width=3: too few") is None
