#!/bin/sh
# Creates a certificate authority and the certificates of the servers in docker-compose.yml, signed by it.
# docker/secrets.sh calls it. Run it alone to renew the certificates of a running site, then restart the containers:
#   sh docker/certificates.sh [SECRETS]
set -eu
umask 077
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
secrets=${1:-$here/../secrets}
days=3650
command -v openssl >/dev/null || { echo "openssl was not found; it is needed to create certificates" >&2; exit 1; }
new=$(mktemp -d "$secrets/.certificates.XXXXXX")
trap 'rm -rf "$new"' EXIT

key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$new/$1.key" 2>/dev/null; }
request() { openssl req -new -key "$new/$1.key" -subj "/CN=$2" -out "$new/$1.csr"; }

certificate() { # server, its DNS names, extended key usage
    key "$1"
    request "$1" "$1"
    cat >"$new/$1.ext" <<EOF
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = $3
subjectAltName = $2
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
EOF
    openssl x509 -req -in "$new/$1.csr" -extfile "$new/$1.ext" -CA "$new/ca.crt" -CAkey "$new/ca.key" \
        -set_serial "0x$(openssl rand -hex 15)" -days "$days" -sha256 -out "$new/$1.crt" 2>/dev/null
    rm "$new/$1.csr" "$new/$1.ext"
}

key ca
request ca "Sluice internal CA"
cat >"$new/ca.ext" <<EOF
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
EOF
openssl x509 -req -in "$new/ca.csr" -extfile "$new/ca.ext" -signkey "$new/ca.key" \
    -set_serial "0x$(openssl rand -hex 15)" -days "$days" -sha256 -out "$new/ca.crt" 2>/dev/null

certificate postgres DNS:postgres serverAuth
certificate valkey DNS:valkey serverAuth
# The parts of SeaweedFS also use this certificate as clients of each other, and accept no other.
certificate s3 DNS:s3 serverAuth,clientAuth

# The authority's key is deleted, so nobody can sign another certificate that the containers trust. Renewing creates
# a new authority.
rm "$new/ca.key" "$new/ca.csr" "$new/ca.ext"
if [ "$(id -u)" = 0 ]; then chown "$(stat -c %u:%g "$secrets")" "$new"/*; fi
mv "$new"/* "$secrets"
