#!/usr/bin/env bash
# Measures the router beside a direct connection to the same sandbox and beside nginx as a proxy in front of it, in the same run on the same machine.
# usage: hack/bench-router.sh [SECONDS] [ROUNDS] [IDLE]     (default 8 s of load each, 3 rounds, 10000 idle connections)
#
# The sandbox, the router (5,000 sandboxes in its caches, no access log), nginx and wrk are processes of their own and share the
# machine's cores; only one proxy has load at a time. Installs wrk and nginx from Debian if they are missing. Prints a table; OUT
# (default target/bench-router) gets the same as router.json.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
need rust
cd "$REPO_ROOT"
seconds=${1:-8}
rounds=${2:-3}
idle=${3:-10000}
connections=50
target=${CARGO_TARGET_DIR:-$REPO_ROOT/target}
out=${OUT:-$target/bench-router}
# The router needs two descriptors for each WebSocket; client and sandbox, which are other processes, one each. The hard limit is
# raised only by who has CAP_SYS_RESOURCE. Where it is too low for idle WebSockets alone, the others are HTTP connections that wait
# for their client's next request: the router needs one for each. `spare` is for all else that it has open.
spare=200
tunnels=$idle
ulimit -n "$((idle * 2 + spare))" 2>/dev/null || ulimit -n "$(ulimit -Hn)"
files=$(ulimit -n)
if [ "$files" -lt "$((idle * 2 + spare))" ]; then
	tunnels=$((files - spare - idle))
	# Most are to be WebSockets: where they cannot be, there are fewer of all.
	if [ "$((tunnels * 2))" -lt "$idle" ]; then
		tunnels=$(((files - spare) / 2))
		idle=$tunnels
	fi
	say "one process may open $files files and no more: $idle idle connections, $tunnels of them WebSockets"
fi

for tool in wrk nginx; do
	command -v "$tool" >/dev/null || { apt-get update -qq && apt-get install -qq -y "$tool" >/dev/null; } || die "$tool is missing (Debian package $tool)"
done

built=$(cargo bench --locked --profile cluster -p torpor-router --bench serve --no-run --message-format=json |
	sed -n 's/.*"name":"serve".*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
[ -x "$built" ] || die "cargo did not say where it built the benchmark"

work=$(mktemp -d)
started=()
cleanup() {
	[ ${#started[@]} -eq 0 ] || kill "${started[@]}" 2>/dev/null || true
	rm -rf "$work"
}
trap cleanup EXIT

# serve NAME: starts a server and sets port.
serve() {
	"$built" "$1" >"$work/$1" 2>"$work/$1.log" &
	started+=($!)
	for _ in $(seq 300); do
		port=$(head -n 1 "$work/$1")
		[ -z "$port" ] || return 0
		sleep 0.1
	done
	die "$1 does not start: $(cat "$work/$1.log")"
}

# serve_nginx: nginx as a proxy with as many processes as cores and connections that are kept, and sets port.
serve_nginx() {
	port=$("$built" free-port)
	cat >"$work/nginx.conf" <<-CONF
		worker_processes auto;
		daemon off;
		pid $work/nginx.pid;
		error_log $work/nginx.log;
		events { worker_connections 1024; }
		http {
			access_log off;
			client_body_temp_path $work/body;
			proxy_temp_path $work/proxy;
			fastcgi_temp_path $work/fastcgi;
			uwsgi_temp_path $work/uwsgi;
			scgi_temp_path $work/scgi;
			keepalive_requests 100000000;
			upstream sandbox { server 127.0.0.1:$sandbox; keepalive 64; keepalive_requests 100000000; }
			server {
				listen 127.0.0.1:$port reuseport;
				location / {
					proxy_pass http://sandbox;
					proxy_http_version 1.1;
					proxy_set_header Connection "";
					proxy_set_header X-Forwarded-For \$remote_addr;
				}
			}
		}
	CONF
	nginx -c "$work/nginx.conf" 2>"$work/nginx.err" &
	started+=($!)
	for _ in $(seq 300); do
		if (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then return 0; fi
		sleep 0.1
	done
	die "nginx does not start: $(cat "$work/nginx.err")"
}

# cpu PID: ticks of processor time that a process and its children have used.
cpu() {
	local pid ticks=0
	for pid in "$1" $(cat "/proc/$1/task/$1/children"); do
		ticks=$((ticks + $(awk '{print $14 + $15}' "/proc/$pid/stat")))
	done
	echo "$ticks"
}

# load NAME PORT PID: appends requests per second, p50, p99 of wrk's report and processor time per request to $work/NAME.results.
load() {
	local before
	before=$(cpu "$3")
	wrk -t2 -c"$connections" -d"${seconds}s" --latency -H 'X-Sandbox-ID: s' -H 'X-Sandbox-Namespace: ns' \
		-H "X-Sandbox-Port: $sandbox" "http://127.0.0.1:$2/" >"$work/$1.wrk"
	if grep -E 'Non-2xx|Socket errors' "$work/$1.wrk" >&2; then die "$1: not all requests succeeded"; fi
	awk -v ticks="$(($(cpu "$3") - before))" -v hertz="$(getconf CLK_TCK)" '
		function ms(text) { return text ~ /us$/ ? text / 1000 : text ~ /ms$/ ? text + 0 : text * 1000 }
		/Requests\/sec/ {rate = $2} /requests in/ {count = $1} $1 == "50%" {p50 = ms($2)} $1 == "99%" {p99 = ms($2)}
		END {printf "%.0f %.2f %.2f %.1f\n", rate, p50, p99, ticks / hertz * 1e6 / count}' "$work/$1.wrk" >>"$work/$1.results"
}

# median NAME COLUMN: of the rounds.
median() { cut -d' ' -f"$2" "$work/$1.results" | sort -g | awk '{v[NR] = $1} END {print v[int((NR + 1) / 2)]}'; }

# objects: JSON of lines as load appends them.
objects() {
	awk '{printf "%s{\"requests_per_second\": %s, \"p50_ms\": %s, \"p99_ms\": %s, \"cpu_micros_per_request\": %s}", (NR > 1 ? ", " : ""), $1, $2, $3, $4}'
}

# report: all results as JSON. What the idle connections came to is an object already.
report() {
	local name comma=
	printf '{\n  "seconds": %s,\n  "connections": %s,\n  "load_average_before": "%s",\n  "load": {\n' "$seconds" "$connections" "$load_average"
	for name in direct nginx router; do
		printf '%s    "%s": {"median": %s, "rounds": [%s]}' "$comma" "$name" \
			"$(echo "$(median $name 1) $(median $name 2) $(median $name 3) $(median $name 4)" | objects)" "$(objects <"$work/$name.results")"
		comma=$',\n'
	done
	printf '\n  },\n  "router_resident_mib": %s,\n  "idle": %s\n}\n' "$loaded" "$(sed '2,$s/^/  /' "$work/idle.json")"
}

serve sandbox
sandbox=$port
sandbox_pid=${started[0]}
serve router
router=$port
router_pid=${started[1]}
serve_nginx
nginx=$port
nginx_pid=${started[2]}
load warm-up "$router" "$router_pid"
load_average=$(cut -d' ' -f1-3 /proc/loadavg)
say "load average $load_average before"
for _ in $(seq "$rounds"); do
	load direct "$sandbox" "$sandbox_pid"
	load nginx "$nginx" "$nginx_pid"
	load router "$router" "$router_pid"
done
rss() { awk '/VmRSS/ {printf "%.0f", $2 / 1024}' "/proc/$router_pid/status"; }
loaded=$(rss)
printf '%-8s %12s %10s %10s %14s %12s %8s\n' "$connections conns" 'requests/s' 'p50 ms' 'p99 ms' 'µs of CPU/req' 'p99/direct' 'of direct'
for name in direct nginx router; do
	while read -r rate p50 p99 micros; do
		printf '  %-6s %12s %10s %10s %14s\n' "$name" "$rate" "$p50" "$p99" "$micros"
	done <"$work/$name.results"
done
for name in direct nginx router; do
	awk -v name="$name" -v rate="$(median $name 1)" -v p50="$(median $name 2)" -v p99="$(median $name 3)" -v micros="$(median $name 4)" \
		-v direct="$(median direct 1)" -v direct99="$(median direct 3)" \
		'BEGIN {printf "%-8s %12s %10s %10s %14s %12.2f %8.2f\n", name, rate, p50, p99, micros, p99 / direct99, rate / direct}'
done
printf 'medians of %s rounds of %s s; processor time of direct is the sandbox'\''s\n' "$rounds" "$seconds"
printf 'router RSS after the load: %s MiB\n' "$loaded"
"$built" websockets "$router" "$sandbox" "$tunnels" "$((idle - tunnels))" "$router_pid" "$work/idle.json"
mkdir -p "$out"
report >"$out/router.json"
say "results: $out/router.json"
