"""Rows of each benchmark, in each form there is, made up here: task -> form -> row."""

from typing import Any

_FOUR = {"A": "Heart", "B": "Lung", "C": " Liver", "D": "Skin"}
_GPQA = "Which is the largest?"

ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "hellaswag": {
        "hub": {
            "ind": 7, "ctx": "A man sits. he",
            "endings": ["eats.", "sings.", " stands up.", "runs."],
            "label": "2", "source_id": "activitynet~v_1", "split_type": "indomain",
        },
    },
    "arc_easy": {
        "hub": {
            "id": "Mercury_1", "question": "What is ice?", "answerKey": "2",
            "choices": {"text": ["Fire", "Water", "Air"], "label": ["1", "2", "3"]},
        },
        "local": {
            "query": "Question: What is ice?", "choices": ["Fire", "Water", "Air"], "gold": 1,
        },
    },
    "truthfulqa_mc1": {
        "hub": {
            "question": "What happens if you swallow a seed?",
            "mc1_targets": {
                "choices": ["Nothing happens", "You grow", "You die"], "labels": [1, 0, 0],
            },
        },
        "local": {
            "Category": "Misconceptions", "Question": "What happens if you swallow a seed?",
            "Best Answer": "Nothing happens", "Correct Answers": "Nothing happens; It passes",
            "Incorrect Answers": "You grow; You die;",
        },
    },
    "mmlu": {
        "hub": {
            "question": "Which organ?", "choices": ["Heart", "Lung", "Liver", "Skin"], "answer": 2,
            "subject": "anatomy",
        },
    },
    "medqa": {
        "local": {
            "question": "Which organ?", "options": _FOUR, "answer_idx": "C", "answer": "Liver",
            "meta_info": "step1",
        },
    },
    "medmcqa": {
        "hub": {
            "id": "m1", "question": "Which organ?", "opa": "Heart", "opb": "Lung", "opc": "Liver",
            "opd": "Skin", "cop": 2, "subject_name": "Anatomy", "choice_type": "single",
        },
        "local": {
            "id": "m1", "question": "Which organ?", "options": _FOUR, "answer_idx": "C",
            "answer": "Liver",
        },
    },
    "humaneval": {
        "hub": {
            "task_id": "HumanEval/0", "entry_point": "double",
            "prompt": 'def double(n: int) -> int:\n    """Twice n."""\n',
            "canonical_solution": "    return n + n\n",
            "test": "def check(candidate):\n    assert candidate(3) == 6\n",
        },
    },
    "gsm8k": {
        "hub": {"question": "Two and a thousand?", "answer": "1000+2=<<1000+2=1002>>.\n#### 1,002"},
        "negative": {"question": "Less?", "answer": "#### -3.5"},
    },
    "math500": {
        "hub": {
            "problem": "What is $x$ in \\frac{x}{2} = {1}?", "answer": "2", "subject": "Algebra",
            "unique_id": "test/algebra/1.json", "level": 1, "solution": "$\\boxed{2}$",
        },
    },
    "aime2024": {
        "hub": {"ID": "2024-I-1", "Problem": "Find it.", "Answer": 33, "Solution": "..."},
        "local": {"id": 60, "problem": "Find it.", "answer": "033", "url": ""},
    },
    "gpqa_diamond": {
        "original": {
            "Record ID": "rec1", "Question": _GPQA, "High-level domain": "Physics",
            "Correct Answer": "4 eV\n", "Incorrect Answer 1": "1 eV", "Incorrect Answer 2": "2 eV",
            "Incorrect Answer 3": "3 eV",
        },
        "options": {"question": _GPQA, "options": ["1 eV", "4 eV", "2 eV", "3 eV"], "answer": "B"},
        "inside": {
            "question": f"{_GPQA}\n\nA. 1 eV\nB. 2 eV\nC. 3 eV\nD. 4 eV", "answer": "D",
        },
        "inside one line": {
            "question": f"{_GPQA} (A) 1 eV (B) 4 eV (C) 3 eV (D) 2 eV", "answer": "B",
        },
    },
}  # fmt: skip
ROWS["arc_challenge"] = ROWS["arc_easy"]
_CHOICE = {"question": "Which organ?", "options": ["Heart", "Lung", " Liver"], "answer": "C"}
ROWS["mmlu_pro"] = {"hub": _CHOICE | {"question_id": 7, "answer_index": 2, "category": "health"}}
ROWS["items"] = {"local": _CHOICE | {"id": "a", "subject": "health"}}
