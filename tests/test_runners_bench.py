"""Measurement: the arithmetic on given numbers, and that every trial does the work it claims. No time is judged."""

from __future__ import annotations

import json

import pytest
import torch

from runners import bench
from runners.bench import Workload, measure, probe_memory, run_trial, token_ids
from runners.bench_report import BenchReport, Memory, PackageFigures, labels_of, ratio, spread
from runners.clock import Clock, ClockedMethod
from runners.errors import UserError
from runners.files import require_writable, write_text
from runners.machine import describe, peak_memory, physical_cores
from runners.package import open_package
from runners.session import Session
from tests.packages import L, Program, V, write_package


def figures(name: str, path: str) -> PackageFigures:
    one = spread([1.0])
    return PackageFigures(
        name=name,
        path=path,
        program_sha256="0" * 64,
        memory=Memory(peak_bytes=2, imports_bytes=1),
        load_seconds=one,
        first_token_seconds=one,
        prefill_tokens_per_second=one,
        decode_tokens_per_second=one,
        step_seconds=one,
        outside_seconds=one,
        outside_share=one,
        binding_seconds=one,
    )


@pytest.mark.parametrize(
    ("packages", "labels"),
    [
        ([("a", "dist/a")], ["a"]),
        ([("a", "dist/a"), ("b", "dist/b")], ["a", "b"]),
        ([("a", "dist/a"), ("a", "old/a")], ["a (dist/a)", "a (old/a)"]),
        ([("a", "dist/a"), ("a", "dist/a")], ["a (dist/a) #1", "a (dist/a) #2"]),
    ],
)
def test_labels_tell_packages_apart(packages, labels):
    assert labels_of([figures(*package) for package in packages]) == labels


def test_percentiles():
    found = spread(list(range(101)))
    assert (found.median, found.p10, found.p90, found.p99, found.n) == (50, 10, 90, 99, 101)


def test_ratio_of_equal_pairs_has_no_width():
    found = ratio("decode", [2.0] * 5)
    assert (found.median, found.low, found.high) == (2, 2, 2)


def test_ratio_interval_contains_the_median_and_lies_within_the_data():
    found = ratio("decode", [1.0, 1.1, 0.9, 1.3, 1.2])
    assert 0.9 <= found.low < found.median == 1.1 < found.high <= 1.3


def test_ids_are_fixed_and_inside_the_vocabulary():
    assert token_ids(5, 50, start=3) == token_ids(8, 50)[3:]
    assert token_ids(3, 100_000) == [1, 7920, 15839]
    assert set(token_ids(200, 7)) == {1, 2, 3, 4, 5, 6}


def test_two_packages_alternate():
    assert [bench.order(trial, 2) for trial in range(4)] == [[0, 1], [1, 0], [0, 1], [1, 0]]
    assert bench.order(1, 1) == [0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt_tokens": 0}, "--prompt-tokens is 0; expected 1 or more"),
        ({"new_tokens": 0}, "--new-tokens is 0"),
        ({"trials": 0}, "--trials is 0"),
        ({"warmup": -1}, "--warmup is -1; expected 0 or more"),
        ({"at": 5, "prompt_tokens": 6}, "--at is 5, which lies within the prompt of 6"),
    ],
)
def test_an_impossible_workload_is_refused(values, message):
    with pytest.raises(UserError, match=message):
        Workload(**values)


def test_a_workload_beyond_the_context_is_refused_before_anything_runs(tmp_path):
    package = open_package(write_package(tmp_path / "toy", Program(b"no program")))
    with pytest.raises(UserError, match=rf"takes {L + 1} tokens .* holds {L}"):
        measure([package], Workload(prompt_tokens=L, new_tokens=1), None, describe(), lambda stage: None)


def test_the_machine_is_described():
    machine = describe()
    assert machine.cpu
    assert 1 <= machine.physical_cores == physical_cores() <= machine.logical_cores
    assert machine.memory_bytes > peak_memory() > 0
    assert machine.versions["executorch"] != "not installed"


def test_files_are_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "out.json"
    write_text(file, "first")
    with pytest.raises(UnicodeEncodeError):
        write_text(file, "second \udce9")
    assert file.read_text() == "first"
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        require_writable(tmp_path / "absent" / "out.json")
    with pytest.raises(UserError, match="is a directory"):
        require_writable(tmp_path)


@pytest.fixture(scope="module")
def package(toy_program, tmp_path_factory):
    return open_package(write_package(tmp_path_factory.mktemp("bench") / "toy", toy_program))


@pytest.mark.export
@pytest.mark.parametrize(("at", "position"), [(None, 15), (40, 45)])
def test_a_trial_does_the_work_it_claims(package, at, position):
    clock = Clock()
    session = Session.open(package, clock=clock)
    session.prefill([9, 9, 9])
    trial = run_trial(session, clock, Workload(prompt_tokens=10, new_tokens=5, at=at))
    assert session.tokens == tuple(token_ids(position, V))
    assert len(trial.steps) == 5
    assert min(trial.first_token, *trial.steps) > 0
    assert all(0 < x < y < z for x, y, z in zip(trial.binding, trial.outside, trial.steps, strict=True))


class Slow:
    """A method each of whose parts takes a known time, by a clock that only it moves."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.now, self.order = seconds, 0.0, []

    def _part(self, name: str) -> None:
        self.order.append(name)
        self.now += self.seconds[name]

    def set_inputs(self, inputs) -> None:
        self._part("set_inputs")

    def execute(self) -> None:
        self._part("execute")

    def get_outputs(self, clone_outputs=True):
        self._part("get_outputs")
        return ["cloned" if clone_outputs else "shared"]


def test_a_clock_tells_the_program_from_the_binding(monkeypatch):
    slow, clock = Slow({"set_inputs": 1.0, "execute": 10.0, "get_outputs": 2.0}), Clock()
    monkeypatch.setattr("runners.clock.perf_counter", lambda: slow.now)
    method = ClockedMethod(slow, clock)
    assert method.call((), clone_outputs=False) == ["shared"]
    assert method.call(()) == ["cloned"]
    assert slow.order == 2 * ["set_inputs", "execute", "get_outputs"]
    assert (clock.executing, clock.binding) == (20, 6)


@pytest.mark.export
def test_a_clock_changes_no_logits(package):
    clock = Clock()
    clocked, plain = Session.open(package, clock=clock), Session.open(package)
    assert torch.equal(clocked.prefill([5, 6, 7]), plain.prefill([5, 6, 7]))
    assert torch.equal(clocked.step(8), plain.step(8))
    assert clock.executing > 0


@pytest.mark.export
def test_a_comparison_reports_both_packages(package):
    work = Workload(prompt_tokens=10, new_tokens=3, trials=4, warmup=1)
    stages: list[str] = []
    report = measure([package, package], work, None, describe(), stages.append)
    assert BenchReport.model_validate_json(report.model_dump_json()) == report
    assert [figures.name for figures in report.packages] == ["toy", "toy"]
    for figures in report.packages:
        assert (figures.first_token_seconds.n, figures.step_seconds.n, figures.load_seconds.n) == (4, 12, 4)
        assert figures.outside_share.n == figures.outside_seconds.n == figures.binding_seconds.n == 12
        assert 0 < figures.outside_share.p10 <= figures.outside_share.p99 < 1
        assert figures.memory.peak_bytes > figures.memory.imports_bytes > 0
    assert [each.name for each in report.ratios] == ["prefill", "decode"]
    assert stages[-1] == "trial 4 of 4"


@pytest.mark.export
def test_a_failing_memory_probe_passes_its_message_on(package, tmp_path):
    lost = open_package(write_package(tmp_path / "toy", Program(package.program_path.read_bytes())))
    (tmp_path / "toy" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"process of its own failed: .*has no manifest\.json"):
        probe_memory(lost, Workload(), 1)


def test_report_is_plain_json(tmp_path):
    """The machine's description, a dataclass, is part of it."""
    report = BenchReport(
        machine=describe(),
        threads=1,
        prompt_tokens=1,
        new_tokens=1,
        trials=1,
        warmup=0,
        decode_position=1,
        packages=[],
        ratios=[],
    )
    assert json.loads(report.model_dump_json())["machine"]["physical_cores"] == physical_cores()


def test_few_trials_have_no_interval():
    found = ratio("decode", [0.9, 0.95])
    assert (found.low, found.high) == (None, None)
    assert found.median == pytest.approx(0.925)
