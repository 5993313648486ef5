# Shell functions of the scripts in hack/: required programs, steps with their times, messages.
# Source this file; it changes no shell options.

# Decimal points, which awk and curl print and printf would refuse in a locale with commas.
export LC_ALL=C.UTF-8
# CDPATH would change the folder that cd enters.
REPO_ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
MIN_GO=1.26
# The workspace's manifest has the version.
MIN_RUST=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$REPO_ROOT/Cargo.toml")
# rustup takes only a toolchain of this name.
PINNED_RUST=$(sed -n 's/^channel = "\(.*\)"/\1/p' "$REPO_ROOT/rust-toolchain.toml")

# past_the_proxy: exempts the development cluster's networks (hack/devcluster/layout.go) from a
# proxy in the environment.
past_the_proxy() {
	local own=127.0.0.1,localhost,10.245.0.0/24,10.246.0.0/16,10.96.0.0/16 others=${no_proxy:-${NO_PROXY:-}}
	[ -n "${http_proxy:-}${HTTP_PROXY:-}${https_proxy:-}${HTTPS_PROXY:-}${all_proxy:-}${ALL_PROXY:-}" ] || return 0
	case ,$others, in *,"$own",*) ;; *) others=${others:+$others,}$own ;; esac
	export no_proxy=$others NO_PROXY=$others
}
past_the_proxy
# without_proxy PROGRAM…: runs one of the repository's clients of a cluster, which would use a
# proxy of the environment but not its exceptions.
without_proxy() { env -u http_proxy -u HTTP_PROXY -u https_proxy -u HTTPS_PROXY -u all_proxy -u ALL_PROXY "$@"; }

say() { printf '[%6.1fs] %s\n' "$(elapsed)" "$*" >&2; }

# elapsed: prints the seconds since the script began, with one decimal.
elapsed() { awk -v s="$(script_age_ms)" 'BEGIN { printf "%.1f", s / 1000 }'; }
script_age_ms() { echo $(($(date +%s%3N) - LIB_BEGIN_MS)); }
LIB_BEGIN_MS=$(date +%s%3N)

die() {
	printf '%s: %s\n' "${0##*/}" "$*" >&2
	exit 1
}

STEP_NAMES=()
STEP_TIMES=()
STEP_NOW=

# step NAME COMMAND…: runs a command as a named step. A failure ends the script by the caller's `set
# -e`; STEP_NOW then has the name of the failed step.
step() {
	local name=$1 begin
	shift
	STEP_NOW=$name
	begin=$(date +%s%3N)
	say "== $name"
	"$@"
	local took=$(($(date +%s%3N) - begin))
	STEP_NAMES+=("$name")
	STEP_TIMES+=("$took")
	say "== $name: done in $(awk -v t="$took" 'BEGIN { printf "%.1f", t / 1000 }') s"
	STEP_NOW=
}

# print_steps: prints a table of the finished steps and their times.
print_steps() {
	local i
	for i in "${!STEP_NAMES[@]}"; do
		printf '  %-40s %8.1f s\n' "${STEP_NAMES[$i]}" "$(awk -v t="${STEP_TIMES[$i]}" 'BEGIN { print t / 1000 }')" >&2
	done
}

# version_at_least HAVE WANT
version_at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

# missing_root, missing_go, missing_rust: print the problem and its remedy, or nothing. They fetch
# and change nothing.
missing_root() {
	[ "$(id -u)" = 0 ] || echo "root is needed: sudo -E env \"PATH=\$PATH\" $0 (sudo alone would not find your Go and Rust)"
}

# lost_path: prints a further possible cause of a missing program.
lost_path() {
	[ -z "${SUDO_USER:-}" ] || echo "; if $SUDO_USER has it, sudo took PATH away: sudo -E env \"PATH=\$PATH\" $0"
}

missing_go() {
	local have
	if ! command -v go >/dev/null; then
		echo "Go is missing: install Go $MIN_GO or newer (https://go.dev/dl) and put its bin folder into PATH$(lost_path)"
		return
	fi
	# An older Go may run a newer one from its cache for this module. GOPROXY=off keeps it from
	# fetching one.
	have=$(cd "$REPO_ROOT/hack/devcluster" && GOPROXY=off go env GOVERSION 2>/dev/null) || have=$(GOTOOLCHAIN=local go version 2>&1) || true
	if ! [[ $have =~ go([0-9]+(\.[0-9]+)+) ]]; then
		echo "Go does not run ($(command -v go)): $(complaint "$have"); install Go $MIN_GO or newer (https://go.dev/dl)"
		return
	fi
	have=${BASH_REMATCH[1]}
	version_at_least "$have" "$MIN_GO" ||
		echo "Go $have is too old ($(command -v go)): install Go $MIN_GO or newer (https://go.dev/dl) and put its bin folder first in PATH"
}

missing_rust() {
	local have tool remedy="run \`rustup toolchain install $PINNED_RUST\`"
	command -v rustup >/dev/null || remedy="install rustup (https://rustup.rs), put its bin folder first in PATH, then $remedy"
	if ! command -v cargo >/dev/null || ! command -v rustc >/dev/null; then
		echo "Rust is missing (cargo and rustc $MIN_RUST or newer): $remedy$(lost_path)"
		return
	fi
	for tool in rustc cargo; do
		# rustup would fetch the toolchain of rust-toolchain.toml, which may take minutes.
		if ! have=$(cd "$REPO_ROOT" && RUSTUP_AUTO_INSTALL=0 "$tool" --version 2>&1) || ! [[ $have =~ (^|$'\n')$tool" "([0-9]+(\.[0-9]+)+) ]]; then
			echo "$tool does not run ($(command -v "$tool")): $(complaint "$have"); $remedy"
			return
		fi
		have=${BASH_REMATCH[2]}
		if ! version_at_least "$have" "$MIN_RUST"; then
			echo "$tool $have is too old ($(command -v "$tool")${RUSTUP_TOOLCHAIN:+; RUSTUP_TOOLCHAIN=$RUSTUP_TOOLCHAIN chooses it}): it must be $MIN_RUST or newer; $remedy"
			return
		fi
	done
}

# complaint TEXT: prints the line of a program's output that names the problem.
complaint() { grep -m 1 '^error' <<<"$1" || head -n 1 <<<"$1"; }

# need root go rust: ends the script with a list of everything that is missing.
need() {
	local thing found problems=
	for thing in "$@"; do
		found=$("missing_$thing")
		problems+=${found:+${problems:+$'\n'}$found}
	done
	[ -z "$problems" ] || die "$problems"
}

# need_torpor WHY: ends the script unless it runs as root, because it WHY, on a node where Torpor is
# installed.
need_torpor() {
	[ "$(id -u)" = 0 ] || die "must run as root: it $1"
	[ -x /opt/torpor/bin/containerd-shim-torpor-v1 ] || die "Torpor is not installed on this node: run hack/cluster install-torpor"
}

# install_missing PROGRAM=PACKAGES…: installs the Debian packages of missing programs.
install_missing() {
	local pair packages=()
	for pair in "$@"; do
		# A blank separates packages.
		# shellcheck disable=SC2206
		command -v "${pair%%=*}" >/dev/null || packages+=(${pair#*=})
	done
	[ ${#packages[@]} -gt 0 ] || return 0
	command -v apt-get >/dev/null ||
		die "missing on this machine: ${packages[*]} (names of Debian packages), and there is no apt-get to install them with; install them by hand"
	say "install Debian packages that are missing: ${packages[*]}"
	# A machine that has just booted may hold the lock while it installs updates.
	{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends "${packages[@]}"; } >&2 ||
		die "apt-get cannot install ${packages[*]} (see above); install them by hand"
}

# warn_of_space GIB: warns where a build from nothing, which takes that much, may not find room.
warn_of_space() {
	local folder want=3 free device told=
	[ -d "${CARGO_TARGET_DIR:-$REPO_ROOT/target}" ] && [ -d "${XDG_CACHE_HOME:-${HOME:-}/.cache}/torpor/bin" ] || want=$1
	for folder in "$REPO_ROOT" "${XDG_CACHE_HOME:-${HOME:-/}}" /var/lib "${TMPDIR:-/tmp}"; do
		read -r device free < <(space_of "$folder") || continue
		case $told in *" $device "*) continue ;; esac
		told+=" $device "
		[ "$free" -ge "$want" ] ||
			say "$free GiB are free where $folder is; what is built and run may take $want: make room, or put CARGO_TARGET_DIR, XDG_CACHE_HOME, GOCACHE, GOMODCACHE, TMPDIR elsewhere"
	done
}
# space_of FOLDER: prints its device and the free GiB there, or nothing if there is no such folder.
space_of() { { stat -c %d -- "$1" && stat -f -c '%a %S' -- "$1"; } 2>/dev/null | awk 'NR == 1 { device = $1 } NR == 2 { printf "%d %d\n", device, $1 * $2 / 1073741824 }'; }
