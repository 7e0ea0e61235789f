"""The native core's own tests, in C++: kernels of every instruction set fuzzed against double
precision and against themselves row by row. They run under sanitizers, and for AArch64 under an
emulator.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SUITES = ("linear", "rowwise", "attention", "program")


def find(*names: str) -> str:
    """The first of some programs that is on the path or beside this Python; skips if none is."""
    path = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    found = [place for name in names if (place := shutil.which(name, path=path))]
    if not found:
        pytest.skip(f"{names[0]} is not installed")
    return found[0]


def run(*command: str | Path) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def build(name: str, compiler: str, *options: str) -> Path:
    """Builds the driver in a folder of its own, which the next run finds up to date."""
    cmake, make = find("cmake"), find("ninja", "make")
    generator = "Ninja" if Path(make).name == "ninja" else "Unix Makefiles"
    folder = ROOT / "build" / "native-tests" / name
    run(
        cmake,
        *("-S", ROOT, "-B", folder, "-G", generator),
        *(f"-DCMAKE_MAKE_PROGRAM={make}", f"-DCMAKE_CXX_COMPILER={compiler}"),
        *("-DEYAS_TESTS=ON", *options),
    )
    run(cmake, "--build", folder, *([] if generator == "Ninja" else ["--parallel", "2"]))
    return folder / "tests" / "native" / "native_tests"


def check_sanitizer(compiler: str, sanitizer: str, folder: Path) -> None:
    """Skips if an empty program can't be built with it, or doesn't run."""
    source, program = folder / "empty.cc", folder / "empty"
    source.write_text("int main() {}\n")
    built = subprocess.run([compiler, f"-fsanitize={sanitizer}", source, "-o", program])
    if built.returncode != 0 or subprocess.run([program]).returncode != 0:
        pytest.skip(f"{compiler} makes no programs with -fsanitize={sanitizer} that run here")


@pytest.mark.parametrize(
    ("sanitizer", "suites"),
    [("address,undefined", ("pool", *SUITES)), ("thread", ("pool", "program"))],
)
def test_sanitizers(sanitizer: str, suites: tuple[str, ...], tmp_path: Path) -> None:
    compiler = find(os.environ.get("CXX", "c++"))
    check_sanitizer(compiler, sanitizer, tmp_path)
    driver = build(sanitizer.replace(",", "-"), compiler, f"-DEYAS_SANITIZE={sanitizer}")
    output = run(driver, *suites)
    for suite in suites:
        assert f"baseline {suite}" in output or suite == "pool"


def test_aarch64() -> None:
    compiler = find("aarch64-linux-gnu-g++")
    emulator = find("qemu-aarch64", "qemu-aarch64-static")
    driver = build(
        "aarch64",
        compiler,
        *("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"),
        "-DCMAKE_EXE_LINKER_FLAGS=-static",
    )
    output = run(emulator, driver)
    for suite in SUITES:
        assert f"neon {suite}" in output
        assert f"baseline {suite}" in output
    # A processor without dot products.
    assert "not on this machine" in run(emulator, "-cpu", "cortex-a57", driver, "rowwise")
