#!/usr/bin/env bash
# Makes a home as a user would have it, with the code that is checked out, and packs what is state:
# bash tests/contract/old_home/make.sh NEW.tar.xz
#
# home.tar.xz was made by commit d1e5ac1 and stays as it is: a test that fails on it has found homes of users that no
# longer answer. Make a further one, beside it, when a later version writes something that this one does not have.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
root="$(cd "$here/../../.." && pwd)"
target="$(realpath "$1")"
test ! -e "$target" || { echo "$target exists; a home of an earlier version is never replaced" >&2; exit 1; }

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
cp "$here/campaign.yaml" "$here/sweep.yaml" "$place"
cd "$place"
export HACRL_HOME="$place/home" PYTHONPATH="$root" OMP_NUM_THREADS=1
hacrl() { "${PYTHON:-$root/.venv/bin/python}" -m flows.cli "$@"; }

hacrl run campaign.yaml
hacrl sweep sweep.yaml
hacrl store pin old-home/ben@1
hacrl store gc --campaign old-home --keep-last 1 --grace 0s --yes    # collects ada@1; ben@1 is pinned
hacrl export old-home/ben checkpoint
hacrl eval checkpoint --benchmark arithmetic --limit 8 --max-tokens 20

# Not state: servers, logs of servers, pictures, locks.
rm -rf home/prefect home/logs
find home -name '*.png' -delete
find home -name '*.lock' -delete
if grep -rlaF -e "$place" -e "$root" home checkpoint; then
  echo "these files name a folder of this machine; nothing was packed" >&2
  exit 1
fi
tar --sort=name --owner=0 --group=0 --numeric-owner -cf - home checkpoint | xz -9e > "$target"
ls -l "$target"
