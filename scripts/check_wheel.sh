#!/usr/bin/env bash
# Builds the wheel, installs it into an empty virtual environment, and runs it outside the checkout.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$root/.venv/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

quietly() { # a command whose output is shown only if it fails
  "$@" >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
}

quietly "$python" -m build --wheel --outdir "$work/dist" "$root"
wheel=$(echo "$work"/dist/*.whl)
"$python" -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check "$wheel"

cd "$work"
unset PYTHONPATH
export WGPU_LORA_NO_TUNE=1 WGPU_LORA_SHARE_DIR=$work/share WGPU_LORA_DATA_DIR=$work/data
command=$work/env/bin/wgpu-lora
where=$("$work/env/bin/python" -c 'import wgpu_lora; print(wgpu_lora.__file__)')
case $where in "$work"/env/*) ;; *) echo "Something other than the wheel was imported: $where" >&2; exit 1 ;; esac
"$work/env/bin/python" - <<'PYTHON'
from importlib.metadata import files, metadata

names = {str(name) for name in files("wgpu-lora") or ()}
wanted = ["wgpu_lora/py.typed", "wgpu_lora/_assets/shaders", "wgpu_lora/_assets/recipes", "wgpu_lora/_assets/bricks", "/LICENSE", "/NOTICE"]
missing = [part for part in wanted if not any(part in name for name in names)]
assert not missing, f"the wheel lacks {missing}"
assert metadata("wgpu-lora")["License-Expression"] == "Apache-2.0"
PYTHON
measure='from wgpu_lora.protect.attestation.measurements import package; print(package()["sha256"])'
test "$("$work/env/bin/python" -c "$measure")" = "$(cd "$root" && "$python" -c "$measure")" ||
  { echo "The wheel and the checkout have different files, so that attestation tells them apart." >&2; exit 1; }
"$command" --version
"$command" info
quietly "$command" recipes list
quietly "$command" bench --list
quietly "$command" demo --max-steps 2 --output demo
test -f demo/adapter_model.safetensors
"$command" generate --adapter demo --prompt "Define a function kind_kettle(xs)." --max-new-tokens 8
echo "$(basename "$wheel") works without the checkout."
