# Shell functions shared by the scripts in hack/: what must be there, steps with their times, messages.
# Source it; it changes no option of the caller's shell.

# Numbers have points everywhere: where the locale has commas, printf refuses what awk and curl say.
export LC_ALL=C.UTF-8
# Nor does CDPATH say which folder this is.
REPO_ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
MIN_GO=1.26
# The workspace says it itself, so that there is one place to change.
MIN_RUST=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$REPO_ROOT/Cargo.toml")
# rustup takes the toolchain of this very name, and no other of the same version.
PINNED_RUST=$(sed -n 's/^channel = "\(.*\)"/\1/p' "$REPO_ROOT/rust-toolchain.toml")

# past_the_proxy: a proxy that is set is not asked for what the development cluster has (its networks are those of hack/devcluster/layout.go).
past_the_proxy() {
	local own=127.0.0.1,localhost,10.245.0.0/24,10.246.0.0/16,10.96.0.0/16 others=${no_proxy:-${NO_PROXY:-}}
	[ -n "${http_proxy:-}${HTTP_PROXY:-}${https_proxy:-}${HTTPS_PROXY:-}${all_proxy:-}${ALL_PROXY:-}" ] || return 0
	case ,$others, in *,"$own",*) ;; *) others=${others:+$others,}$own ;; esac
	export no_proxy=$others NO_PROXY=$others
}
past_the_proxy
# without_proxy PROGRAM…: for our own clients of a cluster, which take a proxy from the environment and its exceptions not.
without_proxy() { env -u http_proxy -u HTTP_PROXY -u https_proxy -u HTTPS_PROXY -u all_proxy -u ALL_PROXY "$@"; }

say() { printf '[%6.1fs] %s\n' "$(elapsed)" "$*" >&2; }

# elapsed: seconds since the script began, with one decimal.
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

# step NAME COMMAND…: run a command as a named step. Its failure ends the script through `set -e` of the
# caller, with the name still in STEP_NOW for whoever reports it.
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

# print_steps: a table of the steps that were done and their times.
print_steps() {
	local i
	for i in "${!STEP_NAMES[@]}"; do
		printf '  %-40s %8.1f s\n' "${STEP_NAMES[$i]}" "$(awk -v t="${STEP_TIMES[$i]}" 'BEGIN { print t / 1000 }')" >&2
	done
}

# version_at_least HAVE WANT
version_at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

# missing_root, missing_go, missing_rust: print what is wrong and what to do; nothing if it is fine. They fetch and change nothing.
missing_root() {
	[ "$(id -u)" = 0 ] || echo "root is needed: sudo -E env \"PATH=\$PATH\" $0 (sudo alone would not find your Go and Rust)"
}

# lost_path: what else may be the matter where something is not found.
lost_path() {
	[ -z "${SUDO_USER:-}" ] || echo "; if $SUDO_USER has it, sudo took PATH away: sudo -E env \"PATH=\$PATH\" $0"
}

missing_go() {
	local have
	if ! command -v go >/dev/null; then
		echo "Go is missing: install Go $MIN_GO or newer (https://go.dev/dl) and put its bin folder into PATH$(lost_path)"
		return
	fi
	# An older Go may have a newer one in its cache and take it in this module; without a proxy it cannot fetch one meanwhile.
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
		# rustup would fetch what rust-toolchain.toml names, which may take minutes; it is named at once instead.
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

# complaint WORDS: the line of what a program said that tells what is wrong.
complaint() { grep -m 1 '^error' <<<"$1" || head -n 1 <<<"$1"; }

# need root go rust: end the script with everything that is missing, named at once.
need() {
	local thing found problems=
	for thing in "$@"; do
		found=$("missing_$thing")
		problems+=${found:+${problems:+$'\n'}$found}
	done
	[ -z "$problems" ] || die "$problems"
}

# need_torpor WHY: root, because it WHY, on a node of a development cluster where Torpor is installed.
need_torpor() {
	[ "$(id -u)" = 0 ] || die "must run as root: it $1"
	[ -x /opt/torpor/bin/torpor-oci ] || die "Torpor is not installed on this node: run hack/cluster install-torpor"
}

# install_missing PROGRAM=PACKAGES…: installs the Debian packages of the programs that are not there.
install_missing() {
	local pair packages=()
	for pair in "$@"; do
		# Blanks separate packages.
		# shellcheck disable=SC2206
		command -v "${pair%%=*}" >/dev/null || packages+=(${pair#*=})
	done
	[ ${#packages[@]} -gt 0 ] || return 0
	command -v apt-get >/dev/null ||
		die "missing on this machine: ${packages[*]} (names of Debian packages), and there is no apt-get to install them with; install them by hand"
	say "install Debian packages that are missing: ${packages[*]}"
	# The lock: a machine that has just booted may be installing updates.
	{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends "${packages[@]}"; } >&2 ||
		die "apt-get cannot install ${packages[*]} (see above); install them by hand"
}

# warn_of_space GIB: says at once where a build from nothing, which takes that much in all, may not find room. What is built needs little.
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
# space_of FOLDER: its device, and how many GiB are free there; nothing if there is no such folder.
space_of() { { stat -c %d -- "$1" && stat -f -c '%a %S' -- "$1"; } 2>/dev/null | awk 'NR == 1 { device = $1 } NR == 2 { printf "%d %d\n", device, $1 * $2 / 1073741824 }'; }
