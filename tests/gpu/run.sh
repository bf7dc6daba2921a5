#!/usr/bin/env bash
# What only a GPU can show, in under 8 minutes: the conformance of every attention backend, the numbers of our kernels,
# their bandwidth beside the card's own, tokens/s. Needs a GPU and the extra `test`.
#
#   bash tests/gpu/run.sh [FOLDER]     FOLDER (default gpu-results): conformance.xml, results.json, results.md
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python="${PYTHON:-python3}"
out="${1:-gpu-results}"
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "torch sees no GPU here, so there is nothing to run: this script checks what only a GPU can show" >&2
  exit 1
fi
mkdir -p "$out"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
unset TRITON_INTERPRET
started=$SECONDS
timeout 240 "$python" -m pytest -q -m gpu tests/gpu --junitxml="$out/conformance.xml" -o junit_family=xunit2
conformance=$?
[ $conformance -eq 124 ] && echo "conformance did not end in 240 s" >&2
timeout $((470 - (SECONDS - started))) "$python" tests/gpu/bench.py --out "$out"
bench=$?
echo "done in $((SECONDS - started)) s: conformance exit $conformance, benchmark exit $bench; see $out/results.md"
exit $((conformance > bench ? conformance : bench))
