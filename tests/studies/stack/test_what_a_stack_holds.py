"""What a stack gains, cut into a random stack's part, form and content. No model is loaded.

Run: pytest tests/studies/stack/test_what_a_stack_holds.py
"""

from benchmarks.what_a_stack_holds import answers_dealt, tables
from mlxstacks.studies.route.served import random_name


def test_shares_of_a_gain_add_up_to_it() -> None:
    whole = [
        {"tolu": {"tolu": 4.0 + seed}, random_name("tolu"): {"tolu": 1.0 + seed / 4}}
        for seed in range(3)
    ]
    form = {
        kind: [{"tolu": {"tolu": share * of_seed["tolu"]["tolu"]}} for of_seed in whole]
        for kind, share in (("words", 0.5), ("answers", 0.75))
    }
    lines = tables(whole, form, ["tolu"]).splitlines()
    assert lines[2].startswith("| tolu | +5.00 (+2.52 to +7.48)")
    assert lines[3].startswith("| a random stack, of the norm of its own | +1.25 (")
    shares = [cell.split("%")[0].strip() for cell in lines[-1].split("|")[3:-1]]
    assert shares == ["25", "25", "50", "75"]


def test_answers_change_places_and_questions_stay() -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"q{n}"},
                {"role": "assistant", "content": f"a{n}"},
            ]
        }
        for n in range(20)
    ]
    dealt = answers_dealt(rows, seed=0)
    assert [row["messages"][0] for row in dealt] == [row["messages"][0] for row in rows]
    answers = [row["messages"][1]["content"] for row in dealt]
    assert sorted(answers) == sorted(f"a{n}" for n in range(20))
    assert sum(answer == f"a{n}" for n, answer in enumerate(answers)) < 5
