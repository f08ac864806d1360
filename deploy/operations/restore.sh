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

restore_postgres() {
    # Roles are the server's, not the database's: a dump names this one and does not bring it.
    psql --quiet --no-psqlrc --set ON_ERROR_STOP=1 --dbname "$1" <<'SQL'
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'loraplex_tenant') THEN
        CREATE ROLE loraplex_tenant NOLOGIN;
    END IF;
    IF NOT pg_has_role(current_user, 'loraplex_tenant', 'MEMBER') THEN
        EXECUTE format('GRANT loraplex_tenant TO %I', current_user);
    END IF;
END $$
SQL
    pg_restore --exit-on-error --no-owner --single-transaction --dbname "$1" "$directory/database.dump"
}

case ${LORAPLEX_DATABASE:-} in
    postgresql*) restore_postgres \
        "$(printf %s "$LORAPLEX_DATABASE" | sed 's/^postgresql+psycopg/postgresql/')" ;;
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
