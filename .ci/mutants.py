r"""Change the package at one position at a time, and list the changes that no fast test detects.

cosmic-ray generates the changes, and coverage selects the tests that run the changed line, fastest first. A line that
also runs at import is tested by all tests of its function or, outside of functions, by the tests of its module. A line
that runs in a fixture of a test module is tested by all tests that use the fixture.
Libraries are imported once, and each change is tested in a forked process. From the root of a checkout:

    pip install cosmic-ray coverage
    export COVERAGE_FILE=/tmp/coverage OMP_NUM_THREADS=1 PYTHONPATH=.:.ci
    coverage run --source=vision_attn -m pytest -p mutants -p no:xdist --durations=0 tests > /tmp/durations
    printf '[cosmic-ray]\nmodule-path = "vision_attn"\ntimeout = 0\ntest-command = ""\n' > /tmp/cosmic.toml
    cosmic-ray init /tmp/cosmic.toml /tmp/session.sqlite
    python .ci/mutants.py /tmp/session.sqlite /tmp/coverage /tmp/durations --count 300 --output /tmp/mutants.jsonl

One change is drawn at each of ``--count`` positions in the code. The sample depends only on ``--seed``. At the end, the
numbers of killed changes by package are printed, with 95 % intervals (Wilson). A second pass tests the survivors with
all tests, slow ones included, which takes minutes for each of them: ``--all-tests``. Survivors that are equivalent to
the code must be told from bugs by hand.
"""

import argparse
import ast
import difflib
import importlib
import importlib.abc
import importlib.util
import json
import os
import random
import re
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import coverage
import pytest
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from scipy.stats import binomtest

ROOT = Path.cwd()
LIBRARIES = "accelerate", "einx", "hypothesis", "matplotlib", "scipy.stats", "timm", "torch._dynamo", "torchvision"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Record the coverage of each test, with ``pytest -p mutants``."""
    coverage.Coverage.current().switch_context(item.nodeid)


pytest_runtest_call = pytest_runtest_setup


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef, request):
    """Record the coverage of a fixture of a module for all tests that use it."""
    if fixturedef.scope == "module":
        tests = [item for item in request.session.items if item.nodeid.startswith(f"{fixturedef.baseid}::")]
        users = [item.nodeid for item in tests if fixturedef.argname in item.fixturenames]
        coverage.Coverage.current().switch_context("\n".join(users))


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import one module of the package from a changed source."""

    def __init__(self, path, source):
        self.path, self.source = path, source
        self.name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def pytest_sessionstart(self):
        sys.meta_path.insert(0, self)  # first, because pytest imports the files on its command line

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        folder = [str((ROOT / self.path).parent)] if self.path.endswith("__init__.py") else None
        where = {"loader": self, "submodule_search_locations": folder}
        return importlib.util.spec_from_file_location(name, ROOT / self.path, **where)

    def exec_module(self, module):
        exec(compile(self.source, str(ROOT / self.path), "exec"), vars(module))


@cache
def annotations(path):
    """Return the spans of annotations, which are not evaluated."""
    nodes = list(ast.walk(ast.parse(Path(path).read_text())))
    found = [getattr(node, name, None) for node in nodes for name in ("annotation", "returns")]
    return [((x.lineno, x.col_offset), (x.end_lineno, x.end_col_offset)) for x in found if x is not None]


@cache
def functions(path):
    """Return the first line of decorators, the first and the last line of the body of each function, innermost last."""
    nodes = [x for x in ast.walk(ast.parse(Path(path).read_text())) if isinstance(x, ast.FunctionDef)]
    spans = [(min([x.lineno, *(d.lineno for d in x.decorator_list)]), x.body[0].lineno, x.end_lineno) for x in nodes]
    return sorted(spans, key=lambda span: span[0] - span[2])


def function_body(path, first, last):
    """Return None for lines in the body of a function, and otherwise the body that runs with them; empty for none."""
    found = [span for span in functions(path) if span[0] <= first and last <= span[2]]
    if not found:
        return range(0)
    _, body, end = found[-1]
    return None if first >= body else range(body, end + 1)


def draw(session, seed, count, only):
    """Draw positions of the code, and one change at each."""
    positions = defaultdict(list)
    with use_db(session, WorkDB.Mode.open) as work:
        for change in (item.mutations[0] for item in work.work_items):
            path, (start, end) = str(change.module_path), (change.start_pos, change.end_pos)
            if not any(first <= start and end <= last for first, last in annotations(path)):
                positions[path, start].append(change)
    generator = random.Random(seed)
    order = sorted(positions)
    generator.shuffle(order)
    order = [key for key in order if key[0].startswith(only)]
    return [generator.choice(sorted(positions[key], key=str)) for key in order[:count]]


class Tests:
    """Select the tests that run a line, fastest first."""

    def __init__(self, data_file, durations):
        self.data = coverage.CoverageData(data_file)
        self.data.read()
        self.files = {name[name.index("vision_attn/") :]: name for name in self.data.measured_files()}
        self.seconds = Counter()
        for seconds, file, test in re.findall(
            r"([\d.]+)s (?:call|setup) +(tests/[\w/]+\.py)::(\w+)", durations.read_text()
        ):
            self.seconds[f"{file}::{test}"] += float(seconds)

    def select(self, path, first, last, budget):
        """Select the tests of some lines within a budget.

        A line that runs at import, such as a default or a constant, belongs to the tests of everything that it defines:
        the body of its function, or the module. The import itself selects no test.
        """
        lines = self.data.contexts_by_lineno(self.files[path]) if path in self.files else {}
        body = function_body(path, first, last)
        wanted = range(first, last + 1) if body is None else body or lines
        contexts = (context for line in wanted for context in lines.get(line, ()) if context)
        tests = {test.partition("[")[0] for context in contexts for test in context.split("\n")}
        chosen, total = [], 0.0
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            total += self.seconds[test]
            if chosen and total > budget:
                return chosen, False
            chosen.append(test)
        return chosen, True


def attempt(path, source, tests, log, limit):
    """Run tests on a changed module in a fork; return the exit code, or None after the time limit."""
    child = os.fork()
    if not child:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        changed = Changed(path, source)
        sys.meta_path.insert(0, changed)  # for conftest.py
        plugins = ["-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        try:
            code = int(pytest.main(["-x", "-q", "--tb=line", *plugins, *tests], plugins=[changed]))
        except BaseException:  # the change ends the process, for example when a module is imported
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        os._exit(code)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


#: meaning of the exit codes of pytest; with all other codes, no test was run
STATUS = {0: "survived", 1: "killed", None: "timeout"}


def summarize(results):
    """Print the numbers of killed changes by package, without those that do not compile or could not be tested."""
    by_package = defaultdict(Counter)
    for result in results:
        package = "/".join(result["id"].split(":")[0].split("/")[:3]).removesuffix(".py")
        by_package[package][result["status"]] += 1
    for package, counts in sorted(by_package.items()):
        print(package, dict(counts), killed_rate(counts))
    total = sum(by_package.values(), Counter())
    print("all", dict(total), killed_rate(total))


def killed_rate(counts):
    killed, tested = counts["killed"] + counts["timeout"], sum(counts[name] for name in STATUS.values())
    if not tested:
        return "no change was tested"
    interval = binomtest(killed, tested).proportion_ci(method="wilson")
    return f"killed {killed} of {tested}: {killed / tested:.0%} ({interval.low:.0%} to {interval.high:.0%})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("session", type=Path, help="file written by `cosmic-ray init`")
    parser.add_argument("coverage", type=Path, help="data file of coverage with a context for each test")
    parser.add_argument("durations", type=Path, help="output of pytest --durations=0")
    parser.add_argument("--count", type=int, default=300, help="number of changes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--only", default="", help="prefix of the paths of the modules to change")
    parser.add_argument("--budget", type=float, default=90, help="seconds of tests for one change")
    parser.add_argument(
        "--worker",
        type=int,
        nargs=2,
        default=(0, 1),
        metavar=("I", "N"),
        help="test every Nth change, starting with the Ith",
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="file of JSON lines; changes in an existing file are skipped"
    )
    parser.add_argument("--all-tests", action="store_true", help="test the survivors in --output with all tests")
    parser.add_argument("--summary", action="store_true", help="print the summary of --output and exit")
    options = parser.parse_args()
    if options.summary:
        return summarize(read_results(options.output))

    for library in LIBRARIES:
        importlib.import_module(library)
    tests = Tests(options.coverage, options.durations)
    changes = draw(options.session, options.seed, options.count, options.only)
    first, workers = options.worker
    options.output.touch()
    known = {result["id"]: result["status"] for result in read_results(options.output)}
    checked = False
    for change in changes[first::workers]:
        path, row, end_row = str(change.module_path), change.start_pos[0], change.end_pos[0]
        name = f"{path}:{row}:{change.start_pos[1]}:{change.operator_name}:{change.occurrence}"
        source = (ROOT / path).read_text()
        operator = get_operator(change.operator_name)(**change.operator_args)
        changed = mutate_code(source, operator, change.occurrence)
        if (
            changed is None
            or changed == source
            or (known.get(name) != "survived" if options.all_tests else name in known)
        ):
            continue
        chosen, complete = tests.select(path, row, end_row, options.budget)
        log = options.output.with_suffix(f".{first}.log")
        if ">>>" in source and not path.endswith("__init__.py"):
            chosen.insert(0, path)  # doctests
        if options.all_tests:
            chosen, complete = ["-m", "not gpu"], True
        limit = 3600 if options.all_tests else 60 + 4 * options.budget
        if not checked and attempt(path, source, chosen, log, limit) != 0:
            sys.exit(f"the tests fail without a change: see {log}")
        checked = True
        status = "does not compile"
        if not chosen:
            status = "not tested: no test runs it"
        elif compiles(changed):
            code = attempt(path, changed, chosen, log, limit)
            if code not in STATUS:  # no test was run: because of the change, or also without it?
                code = 1 if attempt(path, source, chosen, log, limit) == 0 else code
            status = STATUS.get(code, f"not tested: pytest exits with {code}")
        lines = log.read_text(errors="replace").splitlines() if status in ("killed", "timeout") else []
        diff = difflib.unified_diff(source.splitlines(), changed.splitlines(), lineterm="", n=0)
        result = {
            "id": name,
            "status": status,
            "complete": complete,
            "all tests": options.all_tests,
            "diff": [line for line in diff if line[:3] not in ("---", "+++") and line[0] in "+-"],
            "by": [line for line in lines if line.startswith(("FAILED", "ERROR"))],
        }
        with options.output.open("a") as file:
            file.write(json.dumps(result) + "\n")
    return summarize(read_results(options.output))


def read_results(file):
    """Return the last result of each change, because a second pass adds results."""
    results = map(json.loads, file.read_text().splitlines())
    return {result["id"]: result for result in results}.values()


def compiles(source):
    try:
        compile(source, "changed", "exec")
    except SyntaxError:
        return False
    return True


if __name__ == "__main__":
    main()
