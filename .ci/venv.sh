#!/bin/sh
# venv.sh FOLDER REQUIREMENT...   A virtual environment with these, pinned by constraints.txt, on a bare Debian too:
# there python3 comes without the module that brings pip into an environment.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
shift
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "engram-core needs Python 3.11 or newer; $("$python" --version) was found (make PYTHON=python3.12 picks another)" >&2
  exit 2
}
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv ca-certificates
  else
    echo "this Python has no ensurepip, so it can't make a virtual environment: apt-get install python3-venv" >&2
    exit 2
  fi
fi
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$here/constraints.txt" "$@"
