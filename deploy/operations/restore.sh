#!/bin/sh
# restore.sh DIRECTORY
#
# Puts what backup.sh wrote into the empty installation that LORAPLEX_DATABASE, LORAPLEX_STORE and
# LORAPLEX_DATA_DIR name: an empty PostgreSQL database, or none of SQLite's files. No server runs.
set -eu
umask 077
directory=${1:?usage: restore.sh DIRECTORY}
data_dir=${LORAPLEX_DATA_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/loraplex}
store=${LORAPLEX_STORE:-$data_dir/store}
mkdir -p "$data_dir"

case ${LORAPLEX_DATABASE:-} in
    postgresql*) pg_restore --exit-on-error --no-owner --single-transaction \
        --dbname "$(printf %s "$LORAPLEX_DATABASE" | sed 's/^postgresql+psycopg/postgresql/')" \
        "$directory/database.dump" ;;
    *) file=${LORAPLEX_DATABASE:-sqlite:///$data_dir/loraplex.db}
        if [ -e "${file#sqlite:///}" ]; then echo "${file#sqlite:///} is there already" >&2; exit 1; fi
        cp "$directory/loraplex.db" "${file#sqlite:///}" ;;
esac
case $store in
    s3://*) aws s3 sync ${S3_ENDPOINT:+--endpoint-url "$S3_ENDPOINT"} "$directory/store" "${store%%\?*}" ;;
    *) mkdir -p "${store#file://}" && cp -a "$directory/store/." "${store#file://}/" ;;
esac
if [ -z "${LORAPLEX_SECRET:-}" ]; then cp "$directory"/secret* "$data_dir/"; fi

loraplex db upgrade
