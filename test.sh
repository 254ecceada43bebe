#!/bin/sh
# Runs the tests of every module: ./test.sh [go test flags], such as ./test.sh -race
#
# They need a Postgres: the one that HOLDSEND_TEST_DATABASE names (a connection URL), else Postgres's server binaries and
# PgBouncer on this machine; the examples' tests need curl. Where those are missing, root on Debian or Ubuntu gets them
# installed; else Docker is used.
set -u
cd "$(dirname "$0")" || exit 1

fail() {
	echo "test.sh: $*" >&2
	exit 1
}

# is_installed PROGRAM looks where internal/pgtest does.
is_installed() {
	command -v "$1" >/dev/null && return
	for file in /usr/lib/postgresql/*/bin/"$1" /usr/pgsql-*/bin/"$1" /opt/homebrew/opt/postgresql*/bin/"$1" \
		/usr/local/opt/postgresql*/bin/"$1" /home/linuxbrew/.linuxbrew/opt/postgresql*/bin/"$1" \
		/Applications/Postgres.app/Contents/Versions/*/bin/"$1" /Library/PostgreSQL/*/bin/"$1" /usr/local/pgsql/bin/"$1" \
		/usr/sbin/"$1" /usr/local/bin/"$1" /opt/homebrew/bin/"$1" /home/linuxbrew/.linuxbrew/bin/"$1"; do
		[ -x "$file" ] && return
	done
	return 1
}

# apt_install installs the programs alone: no cluster is made, and no service started.
apt_install() (
	export DEBIAN_FRONTEND=noninteractive
	if [ ! -e /usr/sbin/policy-rc.d ]; then
		trap 'rm -f /usr/sbin/policy-rc.d' EXIT
		trap 'exit 1' INT TERM
		printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d && chmod +x /usr/sbin/policy-rc.d || exit
	fi
	apt-get update -q && apt-get install -qy --no-install-recommends postgresql-common &&
		sed -i 's/^#\{0,1\}create_main_cluster.*/create_main_cluster = false/' /etc/postgresql-common/createcluster.conf &&
		apt-get install -qy --no-install-recommends postgresql pgbouncer curl
)

command -v go >/dev/null || fail "Go is not installed or not on PATH: see https://go.dev/doc/install"

if [ -z "${HOLDSEND_TEST_DATABASE:-}" ] && ! { is_installed initdb && is_installed pgbouncer && is_installed curl; }; then
	if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
		echo "test.sh: installing Postgres, PgBouncer and curl"
		apt_install || fail "they could not be installed: install postgresql, pgbouncer and curl, or set HOLDSEND_TEST_DATABASE"
	elif docker info >/dev/null 2>&1; then
		# It starts a Postgres and runs this script again with HOLDSEND_TEST_DATABASE set.
		echo "test.sh: running on a Postgres in Docker"
		exec go -C internal/dockertest run . "$@"
	else
		fail "Postgres, PgBouncer or curl is missing. Install them (Debian and Ubuntu: apt-get install postgresql" \
			"pgbouncer curl; macOS: brew install postgresql@17 pgbouncer), or start Docker, or set" \
			"HOLDSEND_TEST_DATABASE to the connection URL of a database whose role may create schemas"
	fi
fi

passed='' failed=''
# internal/dockertest runs this script, and has no tests.
for file in $(find . -name go.mod -not -path '*/testdata/*' -not -path './internal/dockertest/*' | sort); do
	module=$(dirname "$file")
	echo "test.sh: module $module"
	# Each package has the machine to itself, for some are about what happens in time. Its tests wait for a server more
	# than they work.
	(cd "$module" && go test -p 1 -parallel 16 -timeout 15m "$@" ./...) && passed="$passed $module" || failed="$failed $module"
done
[ -z "$failed" ] || fail "FAILED in$failed"
echo "test.sh: all tests passed in$passed"
