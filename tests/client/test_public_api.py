"""`import sluice`: the public names, what they load, and the page that lists them."""

import inspect
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import sluice
from sluice.methods import plan_from_dict
from sluice.privacy.accountant import Accountant
from sluice.privacy.accountant import epsilon as read_epsilon
from sluice.privacy.events import PoissonGaussian, Query
from sluice.privacy.relation import Relation

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/api-python.md"
EVENT = PoissonGaussian(query=Query.SUM, bound=1.0, noise_stddev=1.1, sampling_prob=0.01, steps=1000)
PLAN = {"kind": "dpgan", "sampling_prob": 0.01, "steps": 1000, "noise_multiplier": 1.1}


def signature(name, function, *, method=True):
    """A call with its parameters and defaults, without types."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in list(inspect.signature(function).parameters.values())[method:]
    ]
    return name + re.sub(r"<[^,()]*>+", "...", str(inspect.Signature(parameters)))


def members(cls):
    for name, member in [pair for owner in (cls, *cls.__bases__) for pair in vars(owner).items()]:
        if isinstance(member, property) and not name.startswith("_"):
            yield name
        elif inspect.isfunction(member) and not name.startswith("_"):
            yield signature(name, member)


def summary():
    """The public signature as docs/api-python.md prints it."""
    lines = []
    for name in sorted(sluice.__all__):
        value = getattr(sluice, name)
        if isinstance(value, str):
            lines.append(f"sluice.{name}")
        elif inspect.isfunction(value):
            lines.append(signature(f"sluice.{name}", value, method=False))
        elif issubclass(value, Exception):
            lines.append(f"class sluice.{name}({value.__base__.__name__})")
        else:
            lines.append(signature(f"class sluice.{name}", value.__init__))
            text = ";  ".join(member.replace(" ", "\0") for member in members(value))
            wrapped = textwrap.wrap(text, 112, initial_indent="    ", subsequent_indent="    ")
            lines += [line.replace("\0", " ") for line in wrapped]
    return "\n".join(lines)


def test_the_page_lists_the_public_signature():
    text = summary()
    if f"```text\n{text}\n```" not in PAGE.read_text(encoding="utf-8"):
        pytest.fail(f"paste this into the text block of docs/api-python.md:\n{text}")
    assert len(text.splitlines()) < 60


def test_importing_the_library_loads_no_other_package():
    code = (
        "import sys, time; began = time.process_time(); import sluice; dir(sluice)\n"
        "import json; print(json.dumps([time.process_time() - began, sorted(sys.modules)]))"
    )
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, check=True, cwd=ROOT / "src")
    seconds, loaded = json.loads(done.stdout)
    assert {name.split(".")[0] for name in loaded} - {"sluice", "__main__"} <= sys.stdlib_module_names
    assert seconds < 0.1


def test_every_public_name_is_there_and_no_other():
    assert set(dir(sluice)) == set(sluice.__all__) == {*sluice._MODULES, "__version__"}
    assert sluice.__version__ == "0.1.0"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = sluice.nonsense


@pytest.mark.parametrize("accountant", Accountant)
@pytest.mark.parametrize("relation", Relation)
def test_epsilon_of_an_event_a_plan_their_json_and_plain_numbers_agree(accountant, relation):
    how = {"delta": 1e-5, "relation": relation, "accountant": accountant}
    expected = read_epsilon(EVENT, **how).epsilon
    numbers = {"noise_multiplier": 1.1, "sampling_prob": 0.01, "steps": 1000}
    assert sluice.epsilon(EVENT, **how) == expected
    assert sluice.epsilon(EVENT.to_dict(), **how) == expected
    assert sluice.epsilon(**numbers, **how) == expected
    assert sluice.epsilon(PLAN, **how) == sluice.epsilon(plan_from_dict(PLAN), **how)
    assert sluice.epsilon(EVENT, EVENT, **how) == read_epsilon([EVENT, EVENT], **how).epsilon > expected


@pytest.mark.parametrize(
    ("costs", "options"),
    [
        ([], {}),
        ([EVENT], {"delta": 0.0}),
        ([EVENT], {"relation": "friends"}),
        ([EVENT], {"accountant": "guess"}),
        ([{"kind": "magic"}], {}),
        ([{"version": 99, "kind": "gaussian"}], {}),
    ],
)
def test_epsilon_of_what_cannot_be_accounted_for_is_a_problem(costs, options):
    with pytest.raises(sluice.Problem):
        sluice.epsilon(*costs, **{"delta": 1e-5} | options)
