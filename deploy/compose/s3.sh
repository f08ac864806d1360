#!/bin/sh
# SeaweedFS reads its callers from a file; this writes it from the environment, then serves.
set -eu
umask 077
cat > /tmp/s3.json <<JSON
{"identities": [{"name": "loraplex",
  "credentials": [{"accessKey": "$S3_ACCESS_KEY", "secretKey": "$S3_SECRET_KEY"}],
  "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}
JSON
exec weed server -dir=/data -s3 -s3.port=8333 -s3.config=/tmp/s3.json
