"""Help, versions, and commands that must start without torch."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from logging import getLogger
from pathlib import Path

import pytest
from cli_cases import CHECKING, Call, check

import privlora
from privlora.cli.commands import app_of
from privlora.demo import model_path
from privlora.lab.cli import lab

COMMANDS = [command.callback.__name__ for command in app_of().registered_commands if command.callback]
IN_LAB = [command.callback.__name__ for command in lab.registered_commands if command.callback]
ALL = [[name] for name in COMMANDS] + [["lab", name] for name in IN_LAB]
BY_THEMSELVES = {"demo", "diagnose", "methods", "settings"}


def isolated(code: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own, with an empty cache of calibrations."""
    source = str(Path(privlora.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "PRIVLORA_CACHE": str(cache)}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("columns", ["60", "120"])
def test_every_command_has_help_and_json(columns: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert (len(COMMANDS), IN_LAB) == (16, ["compare", "diagnose"])
    for words in ALL:
        shown = call(*words, "--help")
        assert shown.code == 0
        assert f"Usage: privlora {' '.join(words)} " in shown.out
        assert "--json" in shown.out
        assert "\\[" not in shown.out
        assert max(map(len, shown.out.splitlines())) <= int(columns)


def test_every_command_without_arguments_or_with_wrong_ones_is_refused_in_a_line(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for words in ALL:
        wrong = [["--no-such-option"], ["a", "b", "c", "--no-such-option=3"]]
        for argv in ([[]] if words[-1] not in BY_THEMSELVES else []) + wrong:
            shown = call(*words, *argv)
            check(shown)
            first, *more = shown.err.splitlines()
            assert first.startswith("error: "), (words, argv)
            assert all(line.startswith("  - ") for line in more), shown.err


def test_without_a_command_help_is_shown(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = call()
    assert shown.code == 0
    assert all(f" {name} " in shown.out for name in [*COMMANDS, "lab"])
    assert "…" not in shown.out
    shown = call("lab")
    assert shown.code == 0
    assert all(f" {name} " in shown.out for name in IN_LAB)


def test_version(call: Call) -> None:
    assert call("--version").out == f"privlora {privlora.__version__}\n"


def test_what_settings_say_of_privacy_never_imports_transformers(tmp_path: Path) -> None:
    """A plan prints it first, a second after the command, and studies tell what is wrong with their runs by it."""
    code = (
        "import sys\nimport privlora.training.promise, privlora.lab.studies.settings\n"
        "print({'transformers', 'peft', 'datasets', 'matplotlib', 'sklearn'} & set(sys.modules))"
    )
    ended = isolated(code, tmp_path)
    assert ended.stdout == "set()\n", ended.stderr


def test_light_commands_never_import_torch(tmp_path: Path) -> None:
    commands = """
        --help
        methods --help
        train none.yaml
        plan none.yaml
        resume none
        budget none
        trian
        report none --annex
        push none owner/name
        push used owner/name
        lab diagnose --figures nose-ratio
        lab diagnose --also nobody
        train used.yaml
        train long.yaml
        train long.yaml data.path=none.jsonl
        settings privacy
        settings --schema
        calibrate --epsilon 3 --delta 1e-5 --steps 10 --sample-rate 0.1 --bands 0
    """
    lines = [line.split() for line in commands.strip().splitlines()]
    run = {
        "model": {"name": str(model_path())},
        "data": {"path": "records.jsonl", "max_length": 999},
        "privacy": {"noise_multiplier": 1, "delta": 1e-5, "expected_batch_size": 2, "public_dataset_size": 9},
        "adapter": {"target_modules": ["q_prj"]},
        "run": {"output": "used"},
    }
    (tmp_path / "records.jsonl").write_text('{"text": null}\n')
    (tmp_path / "used.yaml").write_text(json.dumps({**run, "federation": {"clients": 2, "rounds": 1}}))
    (tmp_path / "long.yaml").write_text(json.dumps({**run, "privacy": {**run["privacy"], "steps": 3}}))
    (tmp_path / "used/private").mkdir(parents=True)
    (tmp_path / "used/private/config.resolved.yaml").write_text((tmp_path / "used.yaml").read_text())
    code = (
        "import os, sys\nfrom privlora.cli import main\n"
        f"os.chdir({str(tmp_path)!r})\nfor argv in {lines!r}: main(argv)\n"
        "print({'torch', 'transformers', 'peft', 'datasets', 'dp_accounting', 'scipy.stats'} & set(sys.modules))"
    )
    ended = isolated(code, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "set()"
    for words in (
        "no run in 'none'",
        "did you mean 'noise-ratio'?",
        "'nobody' is not a private method on both factors",
        "'used' holds a run already",
        "bands=0: ",
    ):
        assert words in ended.stderr


def test_a_wrong_folder_is_told_before_anything_slow_is_imported(tmp_path: Path) -> None:
    """verify, report, export and push of nothing and of a run that goes on."""
    (tmp_path / "runs/half/private").mkdir(parents=True)
    (tmp_path / "runs/half/private/config.resolved.yaml").touch()
    forms = (
        ["verify"],
        ["report", "--annex"],
        ["push", "owner/name"],
        ["export", "out", "--merge"],
        ["report"],
    )
    lines = [[name, f"runs/{run}", *more] for name, *more in forms for run in ("haf", "half")]
    code = (
        f"import os, sys\nfrom privlora.cli import main\nos.chdir({str(tmp_path)!r})\n"
        f"codes = [main(argv) for argv in {lines!r}]\n"
        "heavy = {'torch', 'transformers', 'peft', 'dp_accounting', 'scipy', 'matplotlib', 'numpy'}\n"
        "print(codes, heavy & set(sys.modules))"
    )
    ended = isolated(code, tmp_path)
    assert ended.stdout.splitlines()[-1] == f"{[2] * 10} set()", ended.stderr
    assert ended.stderr.count("Fix: did you mean the run 'runs/half'?") == 5
    assert ended.stderr.count("the run in 'runs/half' is not finished") == 5
    assert ended.stderr.count("\n") == 10  # nothing is said of work before


def test_whoever_checks_a_release_needs_no_torch(tmp_path: Path, finished: Path) -> None:
    """report --annex, verify and a plain export: by the files alone, also where there are evaluations."""
    run = str(shutil.copytree(finished / "run", tmp_path / "run"))
    lines = [["report", run, "--annex"], ["verify", run], ["export", run, f"{run}-out", "--as-lora"]]
    code = (
        "import sys\nfrom privlora.cli import main\n"
        f"codes = [main(argv) for argv in {lines!r}]\n"
        "print(codes, {'torch', 'transformers', 'peft', 'datasets'} & set(sys.modules))"
    )
    ended = isolated(code, tmp_path)
    assert ended.stdout.splitlines()[-1] == "[0, 0, 0] set()", ended.stderr
    assert ended.stderr == f"{CHECKING}\n" * 3


def test_calibrate_takes_less_than_five_seconds_of_a_core(tmp_path: Path) -> None:
    line = "calibrate --epsilon 3 --delta 1e-5 --sample-rate 0.006452263332997278 --steps 300 --json"
    code = (
        f"import sys\nfrom privlora.cli import main\ncode = main({line.split()!r})\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = isolated(code, tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["noise_multiplier"] == pytest.approx(0.6413173180230283, rel=1e-4)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < 5  # processor time, since the machine of the tests may be shared


def test_ctrl_c_while_commands_are_imported(tmp_path: Path) -> None:
    """In a text that is executed, as where a dataclass is made: CPython remembers such interruptions."""
    (tmp_path / "typer.py").write_text("exec('raise KeyboardInterrupt')")
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom privlora.cli import main\nsys.exit(main(['demo']))"
    ended = isolated(code, tmp_path)
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr == "interrupted: nothing was started or changed\n"


def test_a_mistyped_command_is_hinted_at(call: Call) -> None:
    for typed in ("trian", "trane", "Train"):
        check(call(typed), f"there is no command '{typed}'. Fix: did you mean 'train'?")


def test_what_a_table_does_not_need_is_not_imported(tmp_path: Path) -> None:
    """Each of them takes tenths of a second."""
    asked = (
        "import sys; from privlora.cli import main; main(['methods']); print([*sys.modules], file=sys.stderr)"
    )
    loaded = isolated(asked, tmp_path).stderr.splitlines()[-1]
    left_out = ("transformers.modeling_utils", "transformers.pytorch_utils", "peft", "matplotlib", "datasets")
    assert [name for name in left_out if f"'{name}'" in loaded] == []


def test_a_kernel_that_nothing_uses_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    told = getLogger("bitsandbytes.backends.cpu.ops")
    told.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "no module")
    told.warning("anything else")
    assert caplog.messages == ["anything else"]


def test_a_setting_given_to_resume_is_answered(call: Call) -> None:
    for name in ("privacy.bands", "target_epsilon"):
        outcome = call("resume", "runs/notes", f"{name}=8")
        assert outcome.code == 2
        assert f"'{name}' is given, and settings of a run cannot change" in outcome.err
    assert "other settings take a new run" in outcome.err
    assert "\n" not in outcome.err.strip()
    assert "settings of a run" not in call("resume", "runs/notes", "other").err


def test_parts_of_what_was_typed_show_nothing_of_a_file(tmp_path: Path, call: Call) -> None:
    config = tmp_path / "Noel" / "c.yaml"
    config.parent.mkdir()
    config.write_text("data: {path: a.jsonl, format: Noel}\n")
    told = call("train", config).err.replace(str(tmp_path), "")
    assert "Noel" not in told.replace("/Noel/c.yaml", "")
    assert "'Noel'" in call("train", config, "data.format=Noel").err
