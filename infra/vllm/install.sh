#!/usr/bin/env bash
# Build the environment of the vLLM engine, .venv-vllm: vLLM for CUDA where there is a GPU, its CPU build otherwise.
# It is apart from .venv because vLLM and Prefect need different versions of fastapi.
#
#   infra/vllm/install.sh            what the machine has
#   infra/vllm/install.sh cpu|cuda   one of them
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
environment=${HACRL_VLLM_ENV:-$root/.venv-vllm}
base=${PYTHON:-$root/.venv/bin/python}
[ -x "$base" ] || base=$(command -v python3)

kind=${1:-auto}
if [ "$kind" = auto ]; then
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then kind=cuda; else kind=cpu; fi
fi
case $kind in cpu | cuda) ;; *) echo "install.sh: unknown build '$kind'; give cpu or cuda" >&2; exit 2 ;; esac

# The folder of wheels that pip has been told of, if any, holds for uv as well.
export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
backend=()
if [ -z "$UV_FIND_LINKS" ]; then
  unset UV_FIND_LINKS
  [ "$kind" = cuda ] || backend=(--torch-backend cpu) # elsewhere torch is the CUDA build, whose libraries are not in the lock
fi

# The same file, the same environment: nothing to do when it is already there.
case $kind in cpu) wanted=$here/requirements-cpu.lock ;; cuda) wanted=$here/requirements-cuda.in ;; esac
stamp=$environment/.hacrl-requirements
if [ -x "$environment/bin/python" ] && cmp -s "$wanted" "$stamp"; then
  echo "vLLM ($kind) is already in ${environment#"$root"/}"
  exit 0
fi

rm -rf "$environment"
"$base" -m venv --without-pip "$environment"
if uv=$(command -v uv || ls "$root/.venv/bin/uv" 2>/dev/null); then
  install() { "$uv" pip install --quiet "${backend[@]}" --python "$environment/bin/python" "$@"; }
else
  install() { "$base" -m pip --python "$environment/bin/python" install --quiet "$@"; }
fi
case $kind in
  cpu) install --no-deps -r "$wanted" ;; # every package is in the lock
  cuda) install -r "$wanted" ;;
esac
"$environment/bin/python" -c 'from importlib.util import find_spec; assert find_spec("vllm") and find_spec("torch")'
cp "$wanted" "$stamp"
echo "vLLM ($kind) is in ${environment#"$root"/}"
