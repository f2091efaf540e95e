#!/usr/bin/env bash
# Makes a token for a Ray cluster, unless there is one, in a file that only its user can read.
#
#   cluster/make_token.sh FOLDER      # FOLDER/auth_token, mode 600; FOLDER, mode 700
#
# Whoever has the token runs code on the cluster. Ray's own `ray get-auth-token --generate` leaves a
# file that everybody on the machine can read.
set -euo pipefail

if [[ $# -ne 1 ]]; then
    echo "usage: $0 FOLDER" >&2
    exit 2
fi
folder=$1
token="$folder/auth_token"

umask 077
mkdir -p "$folder"
chmod 700 "$folder"
if [[ ! -s "$token" ]]; then
    # Written whole beside it first: two calls at once end with one token.
    new=$(mktemp "$folder/.auth_token.XXXXXX")
    trap 'rm -f "$new"' EXIT
    od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$new"
    ln "$new" "$token" 2> /dev/null || [[ -s "$token" ]] || mv "$new" "$token"
fi
chmod 600 "$token"
echo "$token"
