#!/bin/sh
# Creates what docker-compose.yml mounts: one file per secret and role, and the data directories.
# Run it once, as the user who runs `docker compose`:   sh docker/secrets.sh [SECRETS [DATA]]
set -eu
umask 077
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
secrets=${1:-$here/../secrets}
data=${2:-$here/../data}
# Files keep their owner inside a container, so the containers run as that owner: this user, or 10001 for root.
uid=$(id -u) gid=$(id -g)
if [ "$uid" = 0 ]; then uid=10001 gid=10001; fi

if [ -e "$secrets" ]; then
    echo "$secrets exists; it was not changed. docs/deploy.md says how to make new secrets." >&2
    exit 1
fi
new=$(mktemp -d "$secrets.XXXXXX")
trap 'rm -rf "$new"' EXIT

random() { od -An -v -N"$1" -tx1 /dev/urandom | tr -d ' \n'; }
put() { printf '%s' "$2" >"$new/$1"; }

# Every server has a certificate of this authority, and every client verifies it.
sh "$here/certificates.sh" "$new"
ca=/etc/sluice/ca.crt

# PostgreSQL: the owner of the tables, and one login per role.
database="postgres:5432/sluice?sslmode=verify-full&sslrootcert=$ca"
owner=$(random 24)
put postgres_password "$owner"
put migrate_database_url "postgresql://sluice:$owner@$database"
for role in service train publish sweep; do
    password=$(random 24)
    put "${role}_password" "$password"
    put "${role}_database_url" "postgresql://sluice_$role:$password@$database"
done

# Valkey: senders may add to a queue, workers may also take from their own queue. Keys are prefixed by the queue.
send='-@all +ping +hello +client|setinfo +multi +exec +sadd +smembers +exists +llen +lpush'
work="$send +rpush +rpop +brpop +watch +unwatch +discard +hset +hget +hdel +zadd +zrem +zrange"
work="$work +zrevrangebyscore +set +get +del +evalsha +script|load"
acl() { # role, keys, commands
    password=$(random 24)
    put "${1}_queue_url" "rediss://$1:$password@valkey:6379/0?ssl_cert_reqs=required&ssl_ca_certs=$ca"
    echo "user $1 on >$password resetchannels $2 $3" >>"$new/valkey_users.acl"
}
echo 'user default off' >"$new/valkey_users.acl"
acl service '~train:* ~publish:*' "$send"
acl sweep '~train:* ~publish:*' "$send"
acl train '~train:*' "$work"
acl publish '~publish:*' "$work"

# S3: one identity per role, with only the rights of its policy.
identities='' policies=''
for role in service train publish sweep; do
    access=AK$(random 9 | tr a-f A-F) secret=$(random 24)
    put "${role}_s3_access_key" "$access"
    put "${role}_s3_secret_key" "$secret"
    policy=$(tr -s ' \n' ' ' <"$here/iam/$role.json" | sed 's/"/\\"/g')
    identities="$identities${identities:+, }{\"name\": \"$role\", \"actions\": [], \"policyNames\": [\"$role\"],
        \"credentials\": [{\"accessKey\": \"$access\", \"secretKey\": \"$secret\"}]}"
    policies="$policies${policies:+, }{\"name\": \"$role\", \"content\": \"$policy\"}"
done
put s3_identities.json "{\"identities\": [$identities], \"policies\": [$policies]}"

# The parts of SeaweedFS authenticate to each other by this container's certificate and tokens made with these keys.
{
    printf '[grpc]\nca = "%s"\n' "$ca"
    for part in master volume filer s3 admin worker client; do
        printf '[grpc.%s]\ncert = "/run/secrets/s3.crt"\nkey = "/run/secrets/s3.key"\n' "$part"
    done
    for use in signing signing.read filer_signing filer_signing.read; do
        printf '[jwt.%s]\nkey = "%s"\n' "$use" "$(random 24)"
    done
} >"$new/s3_security.toml"

# The key of the records' fingerprints. If it is lost, no known record is recognised again.
put train_fingerprint_key "$(head -c 32 /dev/urandom | base64)"

# Uploads are encrypted for the first pair: the service has the public key, train the private one. Synthesizers are
# encrypted for the second: train has the public key, publish the private one. Without the private keys stored data
# cannot be decrypted.
rsa_pair() { # file of the private key, of the public one
    openssl genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:3072 -out "$new/$1" 2>/dev/null
    openssl pkey -in "$new/$1" -pubout -out "$new/$2"
}
rsa_pair train_upload_key service_upload_public_key
rsa_pair publish_synthesizer_key train_synthesizer_public_key

# The publisher signs releases with this key.
put publish_signing_key "$(head -c 32 /dev/urandom | base64)"

mkdir -p "$data/postgres" "$data/seaweedfs"
if [ "$(id -u)" = 0 ]; then
    chown -R "$uid:$gid" "$new"
    chown "$uid:$gid" "$data" "$data/postgres" "$data/seaweedfs"
fi
mv "$new" "$secrets"
trap - EXIT
echo "Secrets are in $secrets. Keep a copy where you keep your backups."
if [ "$uid" != 10001 ]; then
    echo "Put these two lines into .env beside docker-compose.yml:"
    echo "SLUICE_UID=$uid"
    echo "SLUICE_GID=$gid"
fi
