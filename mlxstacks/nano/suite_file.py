"""nano's identity suite as a file for `mlxstacks identity`: the sample persona's 20 questions.

None of them is in what the persona was trained on; the base was trained to answer all of them
without a name.
"""

import json

from mlxstacks.nano.identity import persona_prompts
from mlxstacks.nano.settings import Persona

FILE = "suite.json"


def suite_text() -> str:
    """The file: `prompts`, each with category, prompt, required and forbidden."""
    rows = [
        {
            "category": one.category,
            "prompt": one.prompt,
            "required": list(one.required),
            "forbidden": list(one.forbidden),
        }
        for one in persona_prompts(Persona(), suite=True)
    ]
    return json.dumps({"prompts": rows}, indent=2) + "\n"
