#!/bin/sh
# system.sh
#
# Makes a Debian system with Python ready for Loraplex, as root: what it needs from Debian, and its
# user. The image's second stage runs it.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update
# The compiler: Triton compiles its launchers when a kernel first runs, the engine its kernels for
# the CPU. The rest: deploy/operations/backup.sh and restore.sh.
apt-get install -y --no-install-recommends g++ libc6-dev postgresql-client sqlite3 awscli
rm -rf /var/lib/apt/lists/*
useradd --system --uid 10001 --create-home loraplex
install -d -m 0700 -o loraplex -g loraplex /var/lib/loraplex
