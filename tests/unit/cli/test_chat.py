"""The chat's painter: accepted draft tokens in colour, nothing else."""

from eyas.cli.chat import DRAFT_COLOURS, Painter


def test_colours_depend_on_the_position_in_the_draft() -> None:
    painter = Painter(True)
    assert painter.paint("a", 0) == f"\033[38;5;{DRAFT_COLOURS[0]}ma\033[0m"
    assert painter.paint("a", 1) != painter.paint("a", 0)
    assert painter.paint("a", 99) == painter.paint("a", len(DRAFT_COLOURS) - 1)


def test_other_tokens_and_disabled_painters_leave_the_text() -> None:
    assert Painter(True).paint("a", None) == "a"
    assert Painter(False).paint("a", 0) == "a"
    assert Painter(False).legend(4) == ""


def test_line_breaks_stay_outside_the_colour() -> None:
    assert Painter(True).paint("a\n\nb", 0).split("\n")[1] == ""


def test_the_legend_names_each_position() -> None:
    legend = Painter(True).legend(3)
    assert [f"draft {i}" in legend for i in (1, 2, 3, 4)] == [True, True, True, False]
