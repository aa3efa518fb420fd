"""The benchmarks with peers that are not there: scheduling, equal work, figures, failures, the report."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import weights
from benchmarks.__main__ import _chosen
from benchmarks.commands import python, run
from benchmarks.engines.serve import answer
from benchmarks.environment import Environment, interpreter_of
from benchmarks.errors import PeerError, last_line
from benchmarks.making import made
from benchmarks.records import Report
from benchmarks.report import BEGIN, END, grids, markdown, write_into
from benchmarks.run import Plan, windows_of
from benchmarks.run import run as run_all
from benchmarks.schedule import order, request_of, require_equal_work
from benchmarks.wire import Answer, Facts, Options, Request, read_answer, read_facts, read_request, to_line
from benchmarks.worker import Worker
from runners.errors import UserError
from tests.counting_engine import CountingEngine
from tests.fake_peers import (
    DECODE,
    PREFILL,
    WORK,
    FakePeer,
    FakeWorker,
    fake_run,
    measured_of,
    report_of,
    workspace,
)


def test_every_point_is_measured_by_every_worker_in_turn() -> None:
    journal: list[tuple[str, str]] = []
    workers = {name: FakeWorker(name, 0.5, journal) for name in "abc"}
    trials = fake_run(workers)
    assert len(journal) == 3 * 2 * (WORK.rounds + WORK.warmup)
    for start in range(0, len(journal), 3):  # each turn: all three workers, one kind of work
        turn = journal[start : start + 3]
        assert sorted(name for name, _ in turn) == ["a", "b", "c"]
        assert len({kind for _, kind in turn}) == 1
    assert all(len(seconds) == WORK.rounds for seconds in trials.seconds.values())  # warm-up left out
    assert len(trials.bandwidth) == WORK.rounds


def test_no_worker_always_follows_the_same_other() -> None:
    orders = [order("abc", number) for number in range(6)]
    assert {each[0] for each in orders} == {"a", "b", "c"}
    assert {(each.index("a") < each.index("b")) for each in orders} == {True, False}
    assert all(sorted(each) == ["a", "b", "c"] for each in orders)


def test_all_get_the_same_ids() -> None:
    assert request_of(PREFILL, WORK) == Request("prefill", (1, 2, 3, 4))
    assert request_of(DECODE, WORK) == Request("decode", (7, 8, 9), (1, 2, 3, 4, 5, 6))


def test_ratios_are_paired_by_round_and_bandwidth_counts_weights_and_cache() -> None:
    journal: list[tuple[str, str]] = []
    workers = {"ours": FakeWorker("ours", 0.25, journal), "theirs": FakeWorker("theirs", 0.5, journal)}
    trials = fake_run(workers)
    # A slow machine in one round slows both: the ratio must not see it.
    for seconds in trials.seconds.values():
        seconds[2] *= 10
    report = report_of(measured_of(workers, trials), ["ours"])
    assert [(each.other, each.point) for each in report.comparisons] == [("theirs", PREFILL), ("theirs", DECODE)]
    for each in report.comparisons:
        assert (each.ratio.median, each.ratio.low, each.ratio.high) == (2.0, 2.0, 2.0)
    ours = report.peers[0]
    speeds = {speed.point: speed for speed in ours.speeds}
    assert speeds[PREFILL].tokens_per_second.median == 4.0
    assert speeds[PREFILL].bandwidth_share is None
    # 1000 bytes of weights, and 10 a position: 6 before decoding, then 1, 2 and 3 more
    assert speeds[DECODE].bandwidth_share == pytest.approx((1000 + 10 * 8) / 0.25 / 1e9)
    assert ours.memory_over_model == pytest.approx(4000 / (1200 + 10 * 64))
    assert ours.idle_share == 0.0


def test_few_rounds_have_no_interval() -> None:
    workers = {name: FakeWorker(name, 0.5, []) for name in "ab"}
    trials = fake_run(workers, replace(WORK, rounds=4))
    report = report_of(measured_of(workers, trials), ["a"])
    assert all(each.ratio.low is None for each in report.comparisons)
    assert "Too few rounds for intervals." in markdown(report)


def test_a_peer_that_fails_is_left_out_and_the_others_go_on() -> None:
    journal: list[tuple[str, str]] = []
    workers = {"a": FakeWorker("a", 0.5, journal), "b": FakeWorker("b", 0.5, journal, fails_at=5)}
    trials = fake_run(workers)
    assert trials.failures == {"b": "prefill 4: out of luck"}
    assert workers["b"].closed and not workers["a"].closed
    assert sum(name == "a" for name, _ in journal) == 2 * (WORK.rounds + WORK.warmup)
    report = report_of(measured_of(workers, trials), ["a", "b"])
    assert [peer.name for peer in report.peers] == ["a"]
    assert report.comparisons == []
    assert "b did not take part: prefill 4: out of luck" in markdown(report)


def test_idle_workers_that_take_the_processor_are_told_of() -> None:
    workers = {name: FakeWorker(name, 0.5, []) for name in "ab"}
    trials = fake_run(workers)
    trials.others_cpu["a"] = trials.own_cpu["a"] / 4
    text = markdown(report_of(measured_of(workers, trials), ["a"]))
    assert "While a was measured, idle workers took 25% of its time." in text
    assert "While b" not in text


@pytest.mark.parametrize(
    ("answer_given", "message"),
    [
        (Answer(seconds=(1.0,) * 3, tokens=(1,) * 3, position=8), "9 tokens were given, 8 are in its cache"),
        (Answer(seconds=(1.0,) * 2, tokens=(1,) * 2, position=9), "3 choices were asked for, 2 came"),
        (Answer(seconds=(1.0,) * 2, tokens=(1,) * 3, position=9), "not the same work"),
    ],
)
def test_unequal_work_is_refused(answer_given: Answer, message: str) -> None:
    request = request_of(DECODE, WORK)
    require_equal_work(request, Answer(seconds=(1.0,) * 3, tokens=(1,) * 3, position=9))
    with pytest.raises(PeerError, match=message):
        require_equal_work(request, answer_given)


def test_the_loop_feeds_what_it_is_told() -> None:
    engine = CountingEngine(Options("model", 1, 64))
    prefilled = answer(engine, Request("prefill", (1, 2, 3)))
    assert (prefilled.tokens, prefilled.position, engine.calls) == ((4,), 3, [3])
    decoded = answer(engine, Request("decode", (4, 5), (1, 2, 3)))
    assert (decoded.tokens, decoded.position, engine.calls) == ((5, 6), 5, [3, 3, 1, 1])
    assert len(decoded.seconds) == 2
    # each next token has probability one half
    assert answer(engine, Request("score", (1, 2, 3, 4))).nats == pytest.approx(3 * math.log(2))
    assert answer(engine, Request("peak")).peak_bytes > 0
    assert answer(engine, Request("decode", (1,))).position == 1  # from the very beginning


def test_messages_survive_the_wire() -> None:
    request = Request("decode", (4, 5), (1, 2, 3))
    assert read_request(to_line(request)) == request
    given = Answer(seconds=(0.5, 0.25), tokens=(1, 2), position=5)
    assert read_answer(to_line(given)) == given
    facts = Facts(2, 64, {"fake": "1"}, 3, 0.5)
    assert read_facts(to_line(facts)) == facts
    assert read_facts(to_line(Answer(error="no"))) == Answer(error="no")


def test_a_whole_run_with_processes(tmp_path: Path) -> None:
    peers = [
        FakePeer("good"),
        FakePeer("long", positions=(20,)),
        FakePeer("absent", "absent"),
        FakePeer("broken", "broken"),
        FakePeer("forgetful", "forgetful"),
        FakePeer("dying", "dying"),
    ]
    work = replace(WORK, rounds=5)
    plan = Plan(work, (6, 62), windows_of([1, 2, 3, 4, 5, 6, 7], tokens=7, window=3))
    measured = run_all(peers, plan, workspace(tmp_path), lambda: 1e9)
    report = report_of(measured, ["good"])
    assert [peer.name for peer in report.peers] == ["good", "long"]
    assert {each.name: each.reason for each in report.failures} == {
        "absent": "No matching distribution found for absent",
        "broken": "ValueError: no such kernel",
        "forgetful": "prefill 4: 4 tokens were given, 3 are in its cache: not the same work",
        "dying": "decode at 6: RuntimeError: the device was lost",
    }
    good, long = report.peers
    assert good.perplexity == pytest.approx(2.0)
    assert [speed.point.position for speed in good.speeds] == [4, 6]  # 62 and 3 tokens do not fit 64
    assert [speed.point.position for speed in long.speeds] == [4, 6, 20]
    assert {each.point.position for each in report.comparisons} == {4, 6}  # what both were measured at


def test_a_worker_stands_still_between_requests(tmp_path: Path) -> None:
    options = to_line(Options("model", 1, 64))
    worker = Worker((*python("tests.counting_engine"), options), {}, tmp_path / "log", 60, 60)
    try:
        for _ in range(500):  # a signal takes a moment
            if worker._info.status() == "stopped":
                break
            time.sleep(0.01)
        assert worker._info.status() == "stopped"
        assert worker.ask(Request("prefill", (1, 2))).position == 2
    finally:
        worker.close()
    with pytest.raises(PeerError, match="its process ended"):
        worker.ask(Request("peak"))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit('error: no such library')", "error: no such library"),
        ("print('hello')", "no description of itself: 'hello'"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
    ],
)
def test_a_worker_that_does_not_begin_is_named(code: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=message):
        Worker((sys.executable, "-c", code), {}, tmp_path / "log", 1 if "sleep" in code else 60, 60)


def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="No such file"):
        Worker((str(tmp_path / "python"),), {}, tmp_path / "log", 60, 60)


def test_the_last_error_line_is_found() -> None:
    text = (
        "Collecting x\nERROR: No matching distribution found for x\n\nWARNING: an error of no weight\nhint: see above"
    )
    assert last_line(text) == "ERROR: No matching distribution found for x"
    assert last_line("first\nsecond\n") == "second"
    assert last_line("") == "no message"


def test_an_environment_is_installed_again_until_it_was_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []

    def fake_command(command: tuple[str, ...], log: Path, variables: dict[str, str] | None = None) -> None:
        commands.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True, exist_ok=True)
        if "broken==1" in command:
            raise PeerError("ERROR: no broken==1")

    monkeypatch.setattr("benchmarks.environment.run", fake_command)
    with pytest.raises(PeerError, match="no broken==1"):
        interpreter_of(Environment("one", ("broken==1",)), tmp_path)
    for requirement in ("whole==1", "whole==1", "whole==2"):
        interpreter_of(Environment("one", (requirement,)), tmp_path)
    assert [command[-1] for command in commands if "pip" in command] == ["broken==1", "whole==1", "whole==2"]


def test_a_model_is_made_once_and_whole_or_not_at_all(tmp_path: Path) -> None:
    space = workspace(tmp_path)
    code = "import pathlib, sys; pathlib.Path(sys.argv[1], 'made').write_text('x')"
    folder, cost = made(space, "model", lambda folder: (sys.executable, "-c", code, str(folder)))
    assert (folder / "made").read_text() == "x"
    assert cost.cpu_seconds > 0
    again, same = made(space, "model", lambda folder: (sys.executable, "-c", "raise SystemExit(1)"))
    assert (again, same) == (folder, cost)
    with pytest.raises(PeerError, match="error: full disk"):
        made(space, "other", lambda folder: (sys.executable, "-c", "raise SystemExit('error: full disk')"))
    assert not space.model("other").exists()


def test_a_command_costs_what_its_children_cost_too(tmp_path: Path) -> None:
    work = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}], check=True)"
    assert run((sys.executable, "-c", code), tmp_path / "log").cpu_seconds > 0.3


def test_the_report_goes_between_its_marks(tmp_path: Path) -> None:
    workers = {name: FakeWorker(name, 0.5, []) for name in "ab"}
    report = report_of(measured_of(workers, fake_run(workers)), ["a"])
    file = tmp_path / "benchmarks.md"
    file.write_text(f"# Title\n\n{BEGIN}\nold figures\n{END}\n\nafter\n")
    write_into(file, report)
    write_into(file, report)  # again: it replaces what it wrote
    text = file.read_text()
    assert text.startswith("# Title\n") and text.endswith("\n\nafter\n")
    assert "old figures" not in text
    assert text.count("a: times as fast") == 1
    assert "1.00 (1.00 to 1.00)" in text
    assert [path.name for path in tmp_path.iterdir()] == ["benchmarks.md"]


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END}\n{BEGIN}", f"{BEGIN}\n{END}\n{BEGIN}\n{END}"])
def test_a_file_without_marks_is_refused(text: str, tmp_path: Path) -> None:
    workers = {name: FakeWorker(name, 0.5, []) for name in "ab"}
    report = report_of(measured_of(workers, fake_run(workers)), ["a"])
    file = tmp_path / "benchmarks.md"
    file.write_text(text)
    with pytest.raises(UserError, match="each once and in this order"):
        write_into(file, report)
    assert file.read_text() == text


def test_the_documentation_has_the_marks() -> None:
    text = (Path(__file__).parents[1] / "docs" / "benchmarks.md").read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert text.index(BEGIN) < text.index(END)


def test_every_row_has_as_many_cells_as_its_header() -> None:
    workers = {name: FakeWorker(name, 0.5, []) for name in "abc"}
    report = report_of(measured_of(workers, fake_run(workers)), ["a", "b"])
    for grid in grids(report):
        assert all(len(row) == len(grid.header) for row in grid.rows), grid.title
    assert Report.model_validate_json(report.model_dump_json()) == report


def test_an_unknown_peer_is_refused_with_those_there_are() -> None:
    assert _chosen(["none"]) == []
    assert [peer.name for peer in _chosen(["llama.cpp Q8_0"])] == ["llama.cpp Q8_0"]
    with pytest.raises(UserError, match=r"'llama': no such peer; expected one of: .*llama.cpp Q4_0"):
        _chosen(["llama"])


def test_cache_bytes_come_from_the_config(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert weights.cache_bytes(tmp_path, 2) == 2 * 5 * 2 * 8 * 2


def test_a_gguf_file_is_described_by_its_tensors(tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 64), np.float32))
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((8, 64), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = weights.of_gguf(path)
    assert found.described == f"{8 * 2048 / 768:.1f} bits a weight (F32 50%, F16 50%)"
    assert found.step_bytes == 2048  # tied: the table is the output layer, read whole
    assert found.file_bytes == path.stat().st_size
