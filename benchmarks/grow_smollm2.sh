#!/usr/bin/env bash
# What benchmarks/RESULTS.md says of SmolLM2 under "A domain grown from its gaps", and what is to be
# measured there next: a stack trained on preferences, a third domain, killed once and taken back,
# and the routed stacks taught to one adapter. About an hour of two idle cores, with OpenBLAS
# preloaded; a step that is done is not done again.
#
#   benchmarks/grow_smollm2.sh REAL_MODEL/dense DATA EMPTY_DIRECTORY
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd) model=$(realpath "$1") data=$(realpath "$2")
mkdir -p "$3" && cd "$3"
export PYTHONPATH=$here
mlxstacks() { python -m mlxstacks "$@"; }
# Files of a store, by hash.
state() { find "$1" -type f ! -name '*.lock' -exec sha256sum {} + | sort; }

if [ ! -e outcomes ]; then
  for d in medical:medmcqa math:gsm8k_train; do
    name=${d%:*}
    mlxstacks run stack-smollm2 --set layers=20-29 --set model="$model" --set data="$data" \
      --set save_path=store \
      --set "domains=[{name: $name, data: {sources: [${d#*:}.jsonl], validation_rows: 64}}]"
    mlxstacks stacks disable store "$name"
  done
  mlxstacks stacks enable store medical
  mlxstacks stacks enable store math
  mlxstacks route discover store --model "$model" --single-cap 160 --samples-per-domain 16 \
    --save-path outcomes
  mlxstacks route train store --model "$model" --targets outcomes --install --epochs 16 \
    --learning-rate 2e-3 --normalise-features --validation-groups 80 --save-path router
fi

# 75 questions for code, 25 of mathematics and 25 of medicine that no stack saw; 600 rows of code.
if [ ! -e asked.jsonl ]; then
  python - "$data" <<'PYTHON'
import json, pathlib, random, sys

def rows(name):
    lines = (pathlib.Path(sys.argv[1]) / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]

def short(row):
    return len(row["instruction"] + row.get("input", "") + row["output"]) < 300

code = [row for row in rows("code_alpaca") if short(row)]
random.Random(1).shuffle(code)
asked = ["\n\n".join(filter(None, (row["instruction"], row.get("input")))) for row in code[:75]]
asked += [row["question"] for row in rows("gsm8k_test")[:25]]
for row in [row for row in rows("medqa") if len(row["question"]) < 400][:25]:
    options = "\n".join(f"{key}. {text}" for key, text in row["options"].items())
    asked.append(f"{row['question']}\n\n{options}")
random.Random(2).shuffle(asked)
pathlib.Path("new").mkdir(exist_ok=True)
pathlib.Path("new/code.jsonl").write_text("".join(json.dumps(r) + "\n" for r in code[75:675]))
messages = [{"messages": [{"role": "user", "content": text}]} for text in asked]
pathlib.Path("asked.jsonl").write_text("".join(json.dumps(m) + "\n" for m in messages))
PYTHON
  mlxstacks generate --routed --store-path store --model "$model" --prompts asked.jsonl \
    --max-tokens 1 > answers.txt
fi

# DPO on the last stack of math: solutions against the same with another last result.
if [ ! -e preferred ]; then
  [ -e pairs ] || python -m benchmarks.preference_pairs "$data/gsm8k_test.jsonl" pairs
  rm -rf aligned && cp -r store aligned
  mlxstacks align --store-path aligned --domain math --model "$model" --data pairs --iters 40 \
    --batch-size 4 --steps-per-eval 20 --learning-rate 5e-5 --max-seq-length 320 \
    --save-path preferred
fi

# Killed in the middle of its training, gone on with, taken back.
grow=(grow store --model "$model" --domain code --data new --samples-per-domain 24 --rows 200
  --yes all --save-path grown)
if [ ! -e grown ]; then
  state store > before
  python -m mlxstacks "${grow[@]}" 2> killed.log &
  until grep -q '^grow: .*train: .*loss' killed.log || ! kill -0 $! ; do sleep 2; done
  kill -9 $! && wait $! || true
  state store | diff before - && echo "killed: the store is as it was"
  if mlxstacks "${grow[@]}"; then
    mlxstacks stacks list store
    cp -r store undone && mlxstacks stacks undo undone
    state undone | sed 's/ undone/ store/' | diff before - || echo "undone, but for what is shown"
  fi
fi

mlxstacks distill store --model "$model" --layers 20-29 --rank 8 --iters 120 --batch-size 4 \
  --learning-rate 5e-4 --max-seq-length 224 --steps-per-eval 40 --save-path student
