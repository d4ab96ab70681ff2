"""Do the wheel and the sdist work outside the checkout, with the lowest and the newest versions that pyproject allows?

python tests/matrix.py [lowest] [newest] [verify] [EXTRA ...]   # make matrix: all of them; make dist: newest alone

Builds both, looks at what is in them, and makes an environment for each word: pip installs the wheel, with pins made of
the lower bounds (lowest), without any (newest), or with one extra by itself; torch is that of constraints.txt in all.
There a model is trained, and tests of the unpacked sdist run; with an extra those of the command line alone.
Environments lie in a temporary folder, each of which is removed before the next one is made.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOOLS = ("build", "twine")
TESTS = (
    "tests/adapters",
    "tests/training/test_checkpoint.py",
    "tests/test_trainer.py",
    "tests/demo/test_model.py",
    "tests/cli/test_cli_main.py",
)
NEEDED = (
    "pytest",
    "pytest-timeout",
    "hypothesis",
    "jsonschema",
    "opacus",
    "prv-accountant",
    "pytorch-optimizer",
    "cryptography",
    "pycryptodome",
)
"""What the tests above import, of the extras dev and federated."""
DATA = (
    "demo/model/model.safetensors",
    "demo/model/tokenizer.json",
    "reporting/templates/report.html.j2",
    "version.py",
    "py.typed",
)
WHOLE = ("lowest", "newest")
AUDITOR = "verify"
EXTRAS = ("federated", "quant", "trl", "prv", "tensorboard", "wandb", "trackio")
IN_SDIST = (
    "tests/conftest.py",
    "docs/testing.md",
    "configs/popri.yaml",
    "pyproject.toml",
    "constraints.txt",
    "Makefile",
)
JUNK = re.compile(r"(^|/)(\.git/|__pycache__/|\.venv/|runs/)|\.(pyc|key)$")
TRAINING = """
import sys
from privlora import fine_tune
from privlora.demo import model_path, private_records
privacy = dict(noise_multiplier=1.0, delta=1e-4, steps=2, expected_batch_size=8, public_dataset_size=64)
print(fine_tune(str(model_path()), private_records(64, seed=1), privacy=privacy, output=sys.argv[1]).epsilon)
"""


def requirements() -> list[str]:
    """Of the package itself and of what its tests need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    return [*project["dependencies"], *(line for line in extras if name_of(line) in NEEDED)]


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=]", requirement)[0]


def lowest() -> list[str]:
    """A pin for each lower bound."""
    bounds = (re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", line) for line in requirements())
    return [f"{bound[1]}=={bound[2]}" for bound in bounds if bound and bound[1] != "torch"]


def call(*command: object, at: Path, **environment: str) -> None:
    # Outside the checkout, and without its sources.
    known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([str(each) for each in command], cwd=at, check=True, env=known | environment)


def environment(folder: Path) -> Path:
    """Its Python."""
    venv.create(folder, with_pip=True)
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def build(place: Path) -> tuple[Path, Path]:
    """(wheel, sdist), whose contents and long description are as they should be."""
    python = environment(place / "tools")
    call(python, "-m", "pip", "install", "--quiet", *TOOLS, at=place)
    call(python, "-m", "build", "--outdir", place / "dist", ROOT, at=place)
    (wheel,), (sdist,) = (place / "dist").glob("*.whl"), (place / "dist").glob("*.tar.gz")
    call(python, "-m", "twine", "check", "--strict", wheel, sdist, at=place)
    names = zipfile.ZipFile(wheel).namelist()
    strangers = [name for name in names if not re.match(r"privlora(-[\d.]+\.dist-info)?/", name)]
    missing = [name for name in DATA if f"privlora/{name}" not in names]
    with tarfile.open(sdist) as archive:
        inside = [name.partition("/")[2] for name in archive.getnames()]
        archive.extractall(place / "sdist")  # Debian's Python 3.11 knows no filter
    missing += [name for name in IN_SDIST if name not in inside]
    junk = [name for name in [*names, *inside] if JUNK.search(name)]
    if strangers or missing or junk:
        raise SystemExit(f"not of the wheel: {strangers}; missing: {missing}; junk: {junk}")
    return wheel, next((place / "sdist").iterdir())


def try_out(which: str, wheel: Path, sources: Path, place: Path) -> None:
    python = environment(place / which)
    pins = place / f"{which}.txt"
    pins.write_text(
        "\n".join(
            [(ROOT / "constraints.txt").read_text(encoding="utf-8"), *(lowest() if which == "lowest" else ())]
        ),
        encoding="utf-8",
    )
    extra = which not in WHOLE
    needed = ("pytest", "pytest-timeout") if extra else NEEDED
    wanted = [line for line in requirements() if name_of(line) in needed]
    call(
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--prefer-binary",
        "--constraint",
        pins,
        f"{wheel}[{which}]" if extra else wheel,
        *wanted,
        at=place,
    )
    call(python, "-m", "pip", "check", at=place)
    for command in (["--version"], ["methods"]):
        call(python, "-m", "privlora", *command, at=place)
    call(python, "-c", TRAINING, place / f"{which}-run", at=place)
    tests = ("tests/cli/test_cli_main.py",) if extra else TESTS
    call(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, at=sources, OMP_NUM_THREADS="1")
    if extra:
        return
    # Each pydantic writes the schema of docs/ in its own way.
    quick = ("--quick", "--deselect", "tests/test_settings_reference.py::test_pages_are_those_of_the_source")
    call(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *quick, at=sources, OMP_NUM_THREADS="1")


def try_verify(place: Path) -> None:
    """The wheel of packaging/verify in an environment of its own, where nothing brings torch along."""
    call(
        tools := place / "tools" / "bin" / "python", "-m", "pip", "install", "--quiet", "hatchling", at=place
    )
    build = (
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        place / "verify-dist",
        ROOT / "packaging/verify",
    )
    call(tools, *build, at=place)
    python = environment(place / AUDITOR)
    call(python, "-m", "pip", "install", "--quiet", *(place / "verify-dist").glob("*.whl"), at=place)
    call(python, "-m", "pip", "check", at=place)
    call(python, "-c", "from importlib.util import find_spec; assert find_spec('torch') is None", at=place)
    call(python.parent / "privlora-verify", "--help", at=place)
    given = ("--epsilon", "3", "--delta", "1e-5", "--steps", "100", "--sample-rate", "0.01")
    call(python.parent / "privlora-verify", "calibrate", *given, at=place)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        wheel, sources = build(place)
        for which in sys.argv[1:] or (*WHOLE, AUDITOR, *EXTRAS):
            print(f"== {which}", flush=True)
            if which == AUDITOR:
                try_verify(place)
            else:
                try_out(which, wheel, sources, place)
            shutil.rmtree(place / which)


if __name__ == "__main__":
    main()
