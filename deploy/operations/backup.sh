#!/bin/sh
# backup.sh DIRECTORY
#
# Writes database, store and secret of the installation that LORAPLEX_DATABASE, LORAPLEX_STORE and
# LORAPLEX_DATA_DIR name, as the server has them, into a new DIRECTORY. The server may go on serving.
#
# Objects are never changed and have their content's name, so the order makes it whole: objects, then
# the database, then the objects that came meanwhile. Whatever the database names is there; objects
# that it does not name yet are collected by the first `loraplex gc` after a restore.
set -eu
umask 077
directory=${1:?usage: backup.sh DIRECTORY}
data_dir=${LORAPLEX_DATA_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/loraplex}
store=${LORAPLEX_STORE:-$data_dir/store}
python=${PYTHON:-python3}

copy_objects() {
    case $store in
        s3://*) aws s3 sync ${S3_ENDPOINT:+--endpoint-url "$S3_ENDPOINT"} "${store%%\?*}" "$directory/store" ;;
        *) mkdir -p "$directory/store" && cp -a "${store#file://}/." "$directory/store/" ;;
    esac
}

dump_database() {
    case ${LORAPLEX_DATABASE:-} in
        postgresql*) pg_dump --format=custom --no-owner --file "$directory/database.dump" \
            "$(printf %s "$LORAPLEX_DATABASE" | sed 's/^postgresql+psycopg/postgresql/')" ;;
        # The path behind sqlite:///, or the embedded one; the backup API copies a database in use.
        *) file=${LORAPLEX_DATABASE:-sqlite:///$data_dir/loraplex.db}
            "$python" -c 'import sqlite3, sys
source, target = map(sqlite3.connect, sys.argv[1:])
source.backup(target)' "${file#sqlite:///}" "$directory/loraplex.db" ;;
    esac
}

mkdir "$directory"
copy_objects
dump_database
copy_objects
# Without the secret no key of the backup would be known again. Keep it apart from the rest.
if [ -z "${LORAPLEX_SECRET:-}" ]; then cp "$data_dir"/secret* "$directory/"; fi
echo "$directory" >&2
