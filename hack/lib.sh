# Shell functions shared by the scripts in hack/: toolchain checks, steps with their times, messages.
# Source it; it changes no option of the caller's shell.

REPO_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
MIN_GO=1.26
# The workspace says it itself, so that there is one place to change.
MIN_RUST=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$REPO_ROOT/Cargo.toml")

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

# missing_go, missing_rust: print what is wrong with a toolchain and what to do; nothing if it is fine.
missing_go() {
	local have
	if ! command -v go >/dev/null; then
		echo "Go is missing: install Go $MIN_GO or newer and put its bin folder into PATH"
		return
	fi
	have=$(cd "$REPO_ROOT/hack/devcluster" && go env GOVERSION 2>/dev/null) || have=$(go version | awk '{print $3}')
	have=${have#go}
	version_at_least "$have" "$MIN_GO" || echo "Go $have is too old: install Go $MIN_GO or newer (found $(command -v go))"
}

missing_rust() {
	local have
	if ! command -v cargo >/dev/null || ! command -v rustc >/dev/null; then
		echo "Rust is missing: install Rust $MIN_RUST or newer (with rustup: rustup toolchain install $MIN_RUST)"
		return
	fi
	if ! have=$(cd "$REPO_ROOT" && rustc --version 2>&1); then
		echo "rustc does not run: ${have%%$'\n'*}; if the toolchain of rust-toolchain.toml is missing: rustup toolchain install $MIN_RUST"
		return
	fi
	have=$(awk '{print $2}' <<<"$have")
	version_at_least "${have%%-*}" "$MIN_RUST" || echo "Rust $have is too old: install $MIN_RUST or newer (rustup toolchain install $MIN_RUST)"
}

# need go rust: end the script with everything that is missing, named at once.
need() {
	local tool found problems=
	for tool in "$@"; do
		found=$("missing_$tool")
		problems+=${found:+${problems:+$'\n'}$found}
	done
	[ -z "$problems" ] || die "$problems"
}
