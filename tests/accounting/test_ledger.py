import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import pytest
from accounting_cases import make_plan, poisson

import privlora.accounting.ledger as ledger_module
from privlora.accounting import Ledger, Plan, PoissonSampling, StepEvent, epsilon, read_ledger
from privlora.accounting.ledger_format import fingerprint
from privlora.errors import PrivacyError, RunError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def written(path, charges, **changes):
    """A ledger on the disk with that many charges."""
    plan = make_plan(**changes)
    with Ledger.create(path, plan) as ledger:
        for _ in range(charges):
            ledger.charge(plan.event)
    return plan


def test_charges_are_numbered_and_on_the_disk_when_charge_returns(path):
    plan = make_plan(steps=3)
    with Ledger.create(path, plan) as ledger:
        for step in (1, 2, 3):
            assert ledger.charge(plan.event) == step
            assert read_ledger(path).charges == step
            assert (ledger.charges, ledger.remaining) == (step, 3 - step)
        assert ledger.events() == [(plan.event, 3)]


def test_every_line_is_synced_before_the_next_thing_happens(path, monkeypatch):
    calls = []
    real_write, real_sync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda *a: calls.append("write") or real_write(*a))
    monkeypatch.setattr(os, "fsync", lambda *a: calls.append("sync") or real_sync(*a))
    plan = make_plan()
    with Ledger.create(path, plan) as ledger:
        assert calls == ["write", "sync", "sync"]  # the line, then the folder
        ledger.charge(plan.event)
        assert calls[3:] == ["write", "sync"]


def test_one_step_more_than_planned_is_refused(path):
    plan = make_plan(steps=2)
    with Ledger.create(path, plan) as ledger:
        ledger.charge(plan.event)
        ledger.charge(plan.event)
        with pytest.raises(PrivacyError, match="all 2 steps"):
            ledger.charge(plan.event)
    assert read_ledger(path).charges == 2


@pytest.mark.parametrize("other", [poisson(0.01, 0.9), poisson(0.02, 1.0)])
def test_an_event_that_was_not_planned_is_refused(path, other):
    with Ledger.create(path, make_plan()) as ledger, pytest.raises(PrivacyError, match="planned"):
        ledger.charge(other)
    assert read_ledger(path).charges == 0


def test_equal_events_of_other_number_types_are_the_same_event(path):
    with Ledger.create(path, make_plan(event=poisson(1, 2))) as ledger:
        ledger.charge(poisson(1.0, 2.0))
    assert read_ledger(path).charges == 1


def test_plan_survives_the_file(path):
    plan = written(path, 0, unit="user", records_per_user=4, target_epsilon=3.0)
    summary = read_ledger(path)
    assert summary.plan == plan
    assert set(summary.versions) == {"privlora", "dp-accounting"}
    assert date.fromisoformat(summary.created)


def test_runs_have_different_identifiers(tmp_path):
    written(tmp_path / "a", 0)
    written(tmp_path / "b", 0)
    assert read_ledger(tmp_path / "a").run_id != read_ledger(tmp_path / "b").run_id


def test_an_existing_ledger_is_never_written_over(path):
    written(path, 2)
    before = path.read_bytes()
    with pytest.raises(RunError, match="exists already"):
        Ledger.create(path, make_plan())
    assert path.read_bytes() == before


def test_resume_continues_the_count(path):
    plan = written(path, 2)
    with Ledger.open(path) as ledger:
        assert ledger.charge(plan.event) == 3
    summary = read_ledger(path)
    assert (summary.charges, summary.closed) == (3, False)


def test_taking_over_leaves_no_trace(path):
    """How often a run was resumed may depend on its records."""
    written(path, 2)
    before = path.read_bytes()
    for _ in range(3):
        Ledger.open(path).close()
    assert path.read_bytes() == before


def test_a_finished_run_cannot_be_continued(path):
    plan = make_plan()
    ledger = Ledger.create(path, plan)
    ledger.charge(plan.event)
    ledger.finish()
    assert read_ledger(path).closed
    with pytest.raises(RunError, match="closed"):
        ledger.charge(plan.event)
    with pytest.raises(RunError, match="over"):
        Ledger.open(path)
    ledger.close()  # again, without harm


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
def test_a_torn_last_line_is_dropped(path, kept):
    plan = written(path, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    last = lines.pop()
    path.write_bytes(b"".join(lines) + last[: int(kept * len(last))])
    assert read_ledger(path).charges == 2
    with Ledger.open(path) as ledger:
        assert ledger.charge(plan.event) == 3
    assert read_ledger(path).charges == 3


@pytest.mark.parametrize("content", [b"", b'{"type": "plan"'])
def test_a_ledger_without_its_first_line_is_refused(path, content):
    path.write_bytes(content)
    for function in (read_ledger, Ledger.open):
        with pytest.raises(RunError, match="first line"):
            function(path)


def test_a_missing_ledger_is_an_error(path):
    for function in (read_ledger, Ledger.open):
        with pytest.raises(RunError, match=r"cannot be (read|opened)"):
            function(path)
    assert not path.exists()


def _edit_line(number, old, new):
    def tamper(lines):
        assert old in lines[number]
        lines[number] = lines[number].replace(old, new)

    return tamper


@pytest.mark.parametrize(
    "tamper",
    [
        pytest.param(lambda lines: lines.pop(1), id="first charge removed"),
        pytest.param(lambda lines: lines.pop(0), id="plan removed"),
        pytest.param(lambda lines: lines.insert(2, lines[2]), id="charge repeated"),
        pytest.param(lambda lines: lines.append(lines[-1]), id="last charge repeated"),
        pytest.param(lambda lines: lines.insert(1, lines.pop(2)), id="charges swapped"),
        pytest.param(_edit_line(0, b'"noise_multiplier": 1.0', b'"noise_multiplier": 9.0'), id="more noise"),
        pytest.param(_edit_line(0, b'"steps": 5', b'"steps": 9'), id="longer plan"),
        pytest.param(_edit_line(1, b'"salt": "', b'"salt": "0'), id="salt changed"),
        pytest.param(_edit_line(-1, b'"salt"', b'"time"'), id="a clock"),
        pytest.param(_edit_line(-1, b'"step": 3', b'"step": 1'), id="last step renumbered"),
        pytest.param(_edit_line(-1, b'"charge"', b'"resume"'), id="last charge hidden"),
        pytest.param(_edit_line(-1, b'"charge"', b'"refund"'), id="unknown type"),
        pytest.param(lambda lines: lines.insert(1, b"\n"), id="blank line"),
        pytest.param(lambda lines: lines.insert(1, b"\xff\n"), id="not text"),
        pytest.param(lambda lines: lines.insert(1, b"[]\n"), id="not an object"),
    ],
)
def test_a_changed_ledger_is_refused(path, tamper):
    written(path, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    tamper(lines)
    path.write_bytes(b"".join(lines))
    for function in (read_ledger, Ledger.open):
        with pytest.raises(PrivacyError, match="not what was written"):
            function(path)
    assert path.read_bytes() == b"".join(lines)


def rewritten(path, *more):
    """The ledger with these lines at its end, its chain of hashes whole, as a faulty program could write it."""
    records = [json.loads(line) for line in path.read_bytes().splitlines()] + list(more)
    head, lines = None, []
    for record in records:
        lines.append(json.dumps({**record, "prev": head}, sort_keys=True).encode() + b"\n")
        head = ledger_module.digest(lines[-1])
    path.write_bytes(b"".join(lines))


def charge_line(step, event):
    return {"type": "charge", "step": step, "event": fingerprint(event), "salt": "00" * 8}


@pytest.mark.parametrize(
    ("steps", "line", "reason"),
    [
        pytest.param(
            3, charge_line(3, poisson(0.01, 0.5)), "another event than the plan's", id="another event"
        ),
        pytest.param(
            2, charge_line(3, make_plan().event), "charges step 3 after 2 of 2", id="more than planned"
        ),
        pytest.param(
            3, charge_line(2, make_plan().event), "charges step 2 after 2 of 3", id="a number twice"
        ),
        pytest.param(5, charge_line(4, make_plan().event), "charges step 4 after 2", id="a number left out"),
        pytest.param(
            3, {**charge_line(3, make_plan().event), "step": 3.0}, "charges step 3.0", id="no integer"
        ),
        pytest.param(
            3, {**charge_line(3, make_plan().event), "salt": "0"}, "16 hexadecimal digits", id="a short salt"
        ),
        pytest.param(3, {"type": "resume"}, "unknown type", id="a resume"),
        pytest.param(3, {**charge_line(3, make_plan().event), "time": "09:00"}, "time", id="a clock"),
    ],
)
def test_lines_that_no_run_writes_are_refused(path, steps, line, reason):
    """Also where the chain is whole."""
    written(path, 2, steps=steps)
    rewritten(path)
    assert read_ledger(path).charges == 2
    rewritten(path, line)
    for function in (read_ledger, Ledger.open):
        with pytest.raises(PrivacyError, match=reason):
            function(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"schema_version": 3', b'"schema_version": 3.0'),
        (b'"dataset": "letters"', b'"dataset": null'),
        (b'"expected_batch_size": 64.0', b'"expected_batch_size": true'),
        (b'"clip_norm": 1.0', b'"clip_norm": true'),
        (b'"noise_multiplier": 1.0', b'"noise_multiplier": 1' + 400 * b"0"),
        (b'"target_epsilon": null', b'"target_epsilon": true'),
        (b'"steps": 5', b'"steps": true'),
        (b'"method": "prism"', b'"method": "prism", "method": "prism"'),
        (b'"method": "prism"', b'"method":  "prism"'),
        (b'"type": "plan"', b'"type": "pl\\u0061n"'),
        (b'"run_id": "', b'"run_id": 7, "was": "'),
        (b'"created": "2', b'"created": "1'),
        (f'"created": "{date.today()}"'.encode(), b'"created": "2026-W48-1"'),
        (b'"privlora": "0.1.0"', b'"privlora": "0.1.' + 90 * b"1" + b'"'),
        (b"}\n", b"} \n"),
    ],
)
def test_a_plan_that_no_run_writes_is_refused(path, old, new):
    """Even where nothing else was written yet: no number of another kind, no key twice, no other spelling."""
    with Ledger.create(path, make_plan()):
        pass
    line = path.read_bytes()
    assert old in line
    path.write_bytes(line.replace(old, new))
    with pytest.raises(PrivacyError, match="line 1 is not what was written"):
        read_ledger(path)
    path.write_bytes(line)
    assert read_ledger(path).charges == 0


def test_a_run_is_named_by_a_text(path):
    with Ledger.create(path, make_plan()):
        pass
    record = json.loads(path.read_bytes())
    path.write_bytes(json.dumps({**record, "run_id": 1234567890123}, sort_keys=True).encode() + b"\n")
    with pytest.raises(PrivacyError, match="the identifier of a run"):
        read_ledger(path)


def test_nothing_may_follow_the_end(path):
    plan = make_plan()
    ledger = Ledger.create(path, plan)
    ledger.charge(plan.event)
    ledger.finish()
    last = path.read_bytes().splitlines(keepends=True)[-1]
    line = {"type": "close", "prev": ledger_module.digest(last)}
    with path.open("a") as file:
        file.write(json.dumps(line, sort_keys=True) + "\n")
    with pytest.raises(PrivacyError, match="follows the end"):
        read_ledger(path)


def test_two_holders_are_impossible(path):
    plan = make_plan()
    with Ledger.create(path, plan) as ledger:
        with pytest.raises(RunError, match="locked"):
            Ledger.open(path)
        code = f"from privlora.accounting import Ledger; Ledger.open({str(path)!r})"
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "RunError" in other.stderr
        assert ledger.charge(plan.event) == 1
    assert read_ledger(path).charges == 1


def test_a_full_disk_stops_the_run_and_leaves_no_half_line(path):
    """A file size limit gives what a full disk gives: a short write, then an error."""
    plan = make_plan()
    ledger = Ledger.create(path, plan)
    ledger.charge(plan.event)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 40, hard))
    try:
        with pytest.raises(RunError, match="cannot be written"):
            ledger.charge(plan.event)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    with pytest.raises(RunError, match="closed"):
        ledger.charge(plan.event)
    with Ledger.open(path) as resumed:
        assert resumed.charge(plan.event) == 2


def test_a_failed_sync_is_not_taken_for_a_charge(path, monkeypatch):
    plan = make_plan()
    ledger = Ledger.create(path, plan)
    before = path.read_bytes()

    def fail(file):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RunError, match="input/output error"):
        ledger.charge(plan.event)
    assert ledger.charges == 0
    assert path.read_bytes() == before


def test_a_ledger_that_could_not_be_started_leaves_no_file(path, monkeypatch):
    def fail(file, data):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(RunError, match="no space left"):
        Ledger.create(path, make_plan())
    assert not path.exists()


def test_a_failed_start_holds_the_lock_until_its_file_is_gone(path, monkeypatch):
    """Else another process could take the file over in between, and charge what is then removed."""
    unlink = Path.unlink
    tried = []

    def fail(file):
        raise OSError(errno.EIO, "input/output error")

    def open_then_unlink(self, *args, **options):
        with pytest.raises(RunError, match="locked"):
            Ledger.create(self, make_plan())
        tried.append(self)
        unlink(self, *args, **options)

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(Path, "unlink", open_then_unlink)
    with pytest.raises(RunError, match="input/output error"):
        Ledger.create(path, make_plan())
    assert tried == [path]
    assert not path.exists()


def test_a_file_that_vanished_before_the_lock_is_not_charged(path, monkeypatch):
    written(path, 1)
    lock = ledger_module.lock

    def late(file):
        path.unlink(missing_ok=True)
        lock(file)

    monkeypatch.setattr(ledger_module, "lock", late)
    for take in (Ledger.open, lambda p: Ledger.create(p, make_plan())):
        with pytest.raises(RunError, match="removed while it was opened"):
            take(path)


def test_no_line_holds_a_clock(path, monkeypatch):
    """Nor anything else that differs between runs of different speed, but random numbers."""
    files = []
    for number in range(2):
        name = path.with_name(str(number))
        plan = make_plan()
        with Ledger.create(name, plan) as ledger:
            for _ in range(3):
                ledger.charge(plan.event)
            ledger.finish()
        files.append([json.loads(line) for line in name.read_text().splitlines()])
    random = {"run_id", "salt", "prev"}
    for one, two in zip(*files, strict=True):
        assert {k: v for k, v in one.items() if k not in random} == {
            k: v for k, v in two.items() if k not in random
        }
    keys = {key for record in files[0] for key in record}
    assert keys == random | {"type", "schema_version", "created", "versions", "plan", "step", "event"}
    salts = {record["salt"] for records in files for record in records if "salt" in record}
    assert len(salts) == 6
    assert all(len(bytes.fromhex(salt)) == 8 for salt in salts)


def test_salts_are_the_operating_systems(path, monkeypatch):
    """One that is made of a clock, say, would tell how long each step took."""
    monkeypatch.setattr(ledger_module.secrets, "token_hex", lambda size: size * "5a")
    written(path, 2)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record.get("salt") for record in records] == [None, 8 * "5a", 8 * "5a"]


def test_a_charge_knows_the_lines_before_it(path):
    """By its hash two charges of step 2 differ, if the copies went on apart."""
    plan = written(path, 1)
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    for name in (path, copy):
        with Ledger.open(name) as ledger:
            ledger.charge(plan.event)
    one, two = read_ledger(path).charge_hashes, read_ledger(copy).charge_hashes
    assert one[0] == two[0]
    assert one[1] != two[1]
    lines = path.read_bytes().splitlines(keepends=True)
    assert one == tuple(ledger_module.digest(line) for line in lines[1:])


CHARGE_FOREVER = """
import os, sys
from privlora.accounting import Ledger
path, releases = sys.argv[1:]
ledger = Ledger.open(path)
out = os.open(releases, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while True:
    ledger.charge(ledger.plan.event)
    os.write(out, b"r")
"""


def test_kill_9_never_loses_a_release(tmp_path, path):
    """At any moment, at most one charge is ahead of the releases and none behind."""
    written(path, 0, steps=1_000_000)
    releases = tmp_path / "releases"
    total_before = 0
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", CHARGE_FOREVER, str(path), str(releases)])
        deadline = time.monotonic() + 20
        while not releases.exists() or releases.stat().st_size < total_before + 20:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        total_before = releases.stat().st_size
    with Ledger.open(path) as ledger:
        assert total_before <= ledger.charges <= total_before + 3
    assert read_ledger(path).charges == ledger.charges


def test_epsilon_is_of_the_charges_and_not_of_the_plan(path):
    plan = make_plan(event=poisson(0.1, 3.0), steps=4)
    with Ledger.create(path, plan) as ledger:
        assert ledger.epsilon() == 0
        ledger.charge(plan.event)
        ledger.charge(plan.event)
        assert ledger.epsilon() == epsilon([(plan.event, 2)], plan.delta)
        assert ledger.epsilon(1e-3) == epsilon([(plan.event, 2)], 1e-3)


def test_epsilon_follows_the_plans_adjacency(path):
    plan = written(path, 2, event=poisson(0.1, 3.0), adjacency="replace-one")
    expected = epsilon([(plan.event, 2)], plan.delta, adjacency="replace-one")
    assert read_ledger(path).epsilon() == expected
    assert expected > epsilon([(plan.event, 2)], plan.delta)


def test_no_epsilon_for_reproducible_noise(path):
    written(path, 1, insecure_noise=True)
    with pytest.raises(PrivacyError, match="NOT PRIVATE"):
        read_ledger(path).epsilon()


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 0},
        {"steps": 2.0},
        {"delta": 0.0},
        {"target_epsilon": 0.0},
        {"adjacency": "bounded"},
        {"unit": "row"},
        {"unit": "user"},
        {"records_per_user": 3},
        {"unit": "user", "records_per_user": 0},
        {"clip_norm": 0.0},
        {"clip_norm": float("inf")},
        {"expected_batch_size": 0.0},
        {"insecure_noise": 1},
    ],
)
def test_unusable_plans_are_refused(change):
    with pytest.raises(PrivacyError, match=r"steps|delta|epsilon|adjacency|unit|user|norm|batch|noise"):
        make_plan(**change)


def test_plans_with_unknown_fields_are_refused():
    with pytest.raises(PrivacyError, match="amnesty"):
        Plan.from_dict(make_plan().to_dict() | {"amnesty": True})


def test_fingerprint_of_a_plain_step_is_what_older_ledgers_hold():
    assert fingerprint(poisson(0.5, 2.0)) == "7575ea0f6e7a0335"


def test_projected_plan_survives_the_file_and_charges_nothing_else(path):
    event = StepEvent(PoissonSampling(0.02), 0.2, ((24, 768), (64, 2048)))
    with Ledger.create(path, make_plan(event=event)) as ledger:
        ledger.charge(StepEvent(PoissonSampling(0.02), 0.2, ((64, 2048), (24, 768))))
        with pytest.raises(PrivacyError, match="planned"):
            ledger.charge(StepEvent(PoissonSampling(0.02), 0.2))
    assert read_ledger(path).events() == [(event, 1)]


def test_projected_plan_under_replace_one_is_refused():
    with pytest.raises(PrivacyError, match="replace-one"):
        make_plan(event=StepEvent(PoissonSampling(0.02), 0.2, ((8, 64),)), adjacency="replace-one")
