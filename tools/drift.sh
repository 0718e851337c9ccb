#!/usr/bin/env bash
# What is generated must be what is committed: modules from notebooks, clean notebooks, the README.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
fail() { echo "drift: $1" >&2; git --no-pager diff --stat >&2; exit 1; }
test -z "$(git status --porcelain)" || { git status --short >&2; fail 'the working tree has changes; commit them first'; }
$bin/nbdev-export
test -z "$(git status --porcelain)" || fail 'synth_lab/ is not what nbdev-export makes of the notebooks'
$bin/nbdev-clean
test -z "$(git status --porcelain)" || fail 'a notebook is not clean; run nbdev-clean'
$bin/python tools/readme.py --check || fail 'README.md is stale'
echo 'no drift: modules, notebooks and README are what the notebooks say'
