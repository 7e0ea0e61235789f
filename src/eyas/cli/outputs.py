"""What the commands do with finished requests."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eyas.engine.output import RequestOutput


def checked(outputs: list["RequestOutput"]) -> list["RequestOutput"]:
    """The outputs; ValueError with the reason if a request failed, rather than a cut text."""
    for i, output in enumerate(outputs):
        for sample in output.outputs:
            if sample.error is not None:
                raise ValueError(f"prompt {i + 1} failed: {sample.error}")
    return outputs
