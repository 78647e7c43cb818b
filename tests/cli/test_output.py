"""Tables, numbers, JSON and progress. Run: pytest tests/cli/test_output.py"""

import io
import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.color import ColorSystem
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from mlxstacks.cli import _show_warning, output
from mlxstacks.cli.answers import wrapped, write_answer
from mlxstacks.cli.execute import _log_to_stderr


def printed(item: object, width: int = 80) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, highlight=False).print(item)
    return stream.getvalue()


def test_table_keeps_its_text_at_80_columns() -> None:
    path = "language_model.model.layers.14.mlp.switch_mlp.down_proj"
    text = printed(output.table(["module", "kept"], [[path, "97.8%"]]))
    assert path in text
    assert max(map(len, text.splitlines())) <= 80
    folded = printed(output.table(["module", "kept"], [[path * 2, "97.8%"]]))
    assert path * 2 in "".join(line.split(" 97")[0].strip() for line in folded.splitlines())


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (["a", "b"], "a, b"),
        ((2, 4.0), "2, 4"),
        ([], None),
        ({"lr": 1e-05, "keys": ["a", "b"], "on": True, "off": None},
         "lr: 1e-05; keys: a, b; on: yes; off: -"),
        ([{"name": "chat", "data": {}}, {"rank": 2}], "chat, rank: 2"),
        (3, 3),
        (None, None),
    ],
)  # fmt: skip
def test_settings_are_shown_as_a_person_writes_them(value: object, shown: output.Cell) -> None:
    assert output.setting(value) == shown


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_table_without_room_is_told_row_by_row(width: int) -> None:
    columns = [f"measure {number}" for number in range(8)]
    rows: list[list[output.Cell]] = [
        [f"arm {row}", *(1000 * row + n for n in range(7))] for row in (1, 2)
    ]
    text = printed(output.table(columns, rows, title="t"), width)
    assert max(map(len, text.splitlines())) <= width
    for row in rows:
        for cell in row[1:]:
            assert f"{cell:,}" in text
    if width < 80:
        assert "measure 3" in text
        assert text.index("arm 1") < text.index("1,006") < text.index("arm 2")


def test_no_head_of_a_column_is_cut() -> None:
    columns = ["cell", "status", "trained", "buffers", "bytes", "guard", "seconds", "at least"]
    row = ["rank-2_seed-0_layers-all", "planned", "20,736", "786", "28.7 MB", "fits", None, 6.2]
    for width in range(79, 110):
        words = printed(output.table(columns, [row]), width).split()
        assert {"least", "buffers"} <= set(words), width


def test_the_name_of_a_cell_of_a_sweep_breaks_at_an_underscore() -> None:
    columns = ["cell", "status", "trained", "buffers", "bytes", "guard", "seconds", "at least"]
    row = ["rank-2_seed-0_layers-all_down_proj", "planned", "20,736", "786", "28.7 MB", "fits",
           None, 6.2]  # fmt: skip
    words = printed(output.table(columns, [row]), 80).split()
    assert {"rank-2_seed-0_", "layers-all_down_", "proj"} <= {*words}


def test_no_line_in_a_file_ends_in_blanks(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        console = output.console()
        console.file = file
        console.print(output.table(["module", "size"], [["down_proj", None], ["a", "41 MB"]]))
        console.print("text ", markup=False)
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line for line in lines if line.endswith(" ")] == []
    assert any("down_proj" in line for line in lines)


def test_numbers_go_right_and_markup_is_text() -> None:
    text = printed(output.table(["a [b]", "n"], [["[red]x[/red]", 1], ["y", 1234], ["z", None]]))
    assert "a [b]" in text
    assert "[red]x[/red]" in text
    lines = [line.rstrip() for line in text.splitlines()]
    ends = [line[-5:] for line in lines if line.strip() and line.strip()[0] in "[yz"]
    assert ends == ["    1", "1,234", "    -"]


def test_names_that_begin_with_a_digit_are_no_numbers() -> None:
    text = printed(output.table(["module", "size"], [["0 mlp.down_proj", "41 MB"]]))
    head = text.splitlines()[1]
    assert head.startswith(" module ")
    assert head.rstrip().endswith(" size")


def test_json_refuses_nan(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        output.print_json({"loss": float("nan")})
    output.print_json({"loss": None})
    assert json.loads(capsys.readouterr().out) == {"loss": None}


def test_a_title_is_text_too() -> None:
    title = "1: a[b] [/red]"
    assert title in printed(output.table(["a column this wide"], [["text"]], title=title))


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_json_is_json_whatever_the_terminal_can_show(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """Also for a path whose bytes are not UTF-8."""
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding=encoding, errors="backslashreplace")
    monkeypatch.setattr("sys.stdout", stream)
    document = {"path": "\u00fc \udcff", "model": COMMANDS}
    output.print_json(document)
    assert json.loads(written.getvalue()) == document
    assert not commands_in(written.getvalue().decode(encoding))


# ESC, the C1 character that terminals read as ESC [, bell, DEL, and text from right to left
COMMANDS = "\x1b]0;title\x07 \x9b31m \x7f \u202egnp.exe"


def commands_in(text: str) -> set[str]:
    return set(text) & set("\x1b\x07\x9b\x7f\u202e")


def test_nothing_printed_commands_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of files and tensors, answers of models: whatever way they come to the screen."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    console = output.console()
    for item in (COMMANDS, Text(COMMANDS), Panel(COMMANDS, title=COMMANDS),
                 output.details({"file": COMMANDS})):  # fmt: skip
        console.print(item, markup=False)
    output.write(COMMANDS, error=True)
    output.note(COMMANDS)
    write_answer(COMMANDS)  # a character a piece
    _log_to_stderr(1)
    logging.getLogger("mlxstacks").info(COMMANDS)
    _show_warning(COMMANDS, UserWarning, "a.py", 1)
    out, err = capsys.readouterr()
    assert out.count("title") + err.count("title") == 10
    assert not commands_in(out + err)


def test_styles_of_ours_still_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    console = output.console()
    console.file, console._force_terminal, console._color_system = (
        stream,
        True,
        ColorSystem.STANDARD,
    )
    console.print("name\x1b[2J", style="bold", markup=False)
    assert stream.getvalue() == "\x1b[1mname\\x1b[2J\x1b[0m\n"


def test_values_are_shown_however_long_their_names_are() -> None:
    narrow = printed(output.details({"name": "some words", "shares bytes with": "copies"}), 20)
    assert [line.rstrip() for line in narrow.splitlines()] == [
        "name: some words", "shares bytes with:", "copies"
    ]  # fmt: skip


def test_a_cell_holds_no_commands_to_the_terminal() -> None:
    text = printed(output.details({"base": "\x1b[31mred", "name": "\u00fc"}))
    assert "\\x1b[31mred" in text
    assert "\u00fc" in text


def test_a_note_breaks_between_words_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        tty = True

        def isatty(self) -> bool:
            return self.tty

    text = "a model " * 15 + "/a/path/that-is-long"
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("COLUMNS", "40")
    output.note(text)
    lines = stream.getvalue().splitlines()
    assert len(lines) > 3
    assert max(map(len, lines)) <= 40
    assert " ".join(lines) == text
    folded = output.wrapped_on_terminal(f"  {text}", "error: ").splitlines()
    assert max(map(len, (f"error: {folded[0]}", *folded[1:]))) <= 40
    stream.tty = False
    assert output.wrapped_on_terminal(text, "error: ") == text
    output.note(text)
    assert stream.getvalue().splitlines()[-1] == text


def test_no_line_with_a_command_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stderr", stream)
    line = "the store has no router; `mlxstacks route train '/disk one/a store'` trains one"
    prose = "a remark that is longer than the forty columns of this terminal"
    output.note(f"{line}\n{prose}")
    assert line in stream.getvalue().splitlines()
    assert prose not in stream.getvalue().splitlines()
    console = output.console()
    console.print(line, markup=False)
    console.print(prose, markup=False)
    lines = capsys.readouterr().out.splitlines()
    assert line in lines
    assert prose not in lines


def test_a_narrow_table_of_a_fuse_is_whole() -> None:
    """Numbers keep their width, a head with a stroke breaks there, and texts fold."""
    columns = ["module", "policy", "delta/step", "correlation", "survival", "noise", "artifact"]
    row = ["3 down_proj", "promote-6", "0.201", "0.987", "99.9%", "0.163", "0.00%"]
    total = ["total of 6 modules", "", *row[2:]]
    text = printed(output.table(columns, [total, row]))
    assert max(map(len, text.splitlines())) <= 80
    assert [text.count(cell) for cell in row] == [1, 1, 2, 2, 2, 2, 2]
    assert [word in text for word in ("delta", "/step", "artifact")] == [True] * 3


@given(st.text(st.sampled_from("ab \n"), max_size=60), st.integers(4, 12))
def test_answers_break_between_words(text: str, width: int) -> None:
    """Lines fit, words stay whole, and nothing but blanks is lost; whatever the pieces are."""
    made = "".join(wrapped([text[:7], text[7:8], text[8:]], width))
    assert made == "".join(wrapped(list(text), width))
    assert made.split() == [part for word in text.split() for part in pieces_of(word, width)]
    fitting = (line for line in made.split("\n") if line.strip())
    assert all(len(line.rstrip()) <= width or line.startswith(" ") for line in fitting)
    assert made.count("\n") >= text.count("\n")


def pieces_of(word: str, width: int) -> list[str]:
    return [word[at : at + width] for at in range(0, len(word), width)]


def test_an_answer_reads_as_it_was_where_it_fits() -> None:
    code = "def f(x):\n    return x\n"
    assert "".join(wrapped([code], 40)) == code
    lines = "".join(wrapped(["It has resilience", ", perseverance."], 20)).split("\n")
    assert lines == ["It has resilience,", "perseverance."]


NUMBERS = st.floats(0, 1).map(lambda value: f"{value:.5f}")
WORDS = st.sampled_from(
    ["better", "no difference shown", "routed - ungated", "12 switch_mlp.down_proj", "+2.3"]
)
INTERVALS = st.tuples(*[st.integers(-99, 99)] * 3).map(lambda n: f"{n[0]} ({n[1]} to {n[2]})")
HEADS = st.sampled_from(["p (Holm)", "points, 95%", "delta/step", "outcome", "share (95%)"])


@given(
    st.lists(st.tuples(HEADS, st.sampled_from([NUMBERS, WORDS, INTERVALS])), min_size=1, max_size=8)
    .flatmap(
        lambda columns: st.tuples(
            st.just([head for head, _ in columns]),
            st.lists(st.tuples(WORDS, *[kind for _, kind in columns]), min_size=1, max_size=3),
        )
    ),
    st.integers(40, 120),
)  # fmt: skip
def test_no_number_of_a_table_is_cut_and_no_line_is_too_long(
    drawn: tuple[list[str], list[tuple[str, ...]]], width: int
) -> None:
    heads, rows = drawn
    text = printed(output.table(["name", *heads], rows), width)
    assert max(map(len, text.splitlines())) <= width
    words = (word.strip("()") for row in rows for cell in row for word in cell.split())
    assert all(word in text for word in words if len(word) < 10)
