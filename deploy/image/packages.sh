#!/bin/sh
# packages.sh FOLDER
#
# Installs Loraplex from the checkout that this script is in into a new virtual environment, with the
# versions of deploy/requirements.lock. The image's first stage runs it, and so does
# `make image-check`, in a clean folder.
#
#   EXTRAS         of pyproject.toml, separated by commas
#   TORCH_BACKEND  uv's: cpu, or a CUDA version; empty: what the package index has
#   UV             the command of uv
set -eu
folder=${1:?usage: packages.sh FOLDER}
uv=${UV:-uv}
checkout=$(cd "$(dirname "$0")/../.." && pwd)
"$uv" venv --quiet --python "${PYTHON:-python3}" "$folder"
cd "$checkout"
"$uv" pip install --quiet --no-cache --python "$folder/bin/python" \
    --constraints deploy/requirements.lock \
    ${TORCH_BACKEND:+--torch-backend "$TORCH_BACKEND"} ".${EXTRAS:+[$EXTRAS]}"
install -m 0755 deploy/operations/backup.sh "$folder/bin/loraplex-backup"
install -m 0755 deploy/operations/restore.sh "$folder/bin/loraplex-restore"
