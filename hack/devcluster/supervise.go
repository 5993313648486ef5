package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// component is one long-running program of the cluster.
type component struct {
	Name string   `json:"name"`
	Args []string `json:"args"` // Args[0] is the program
	Env  []string `json:"env,omitempty"`
	// After are addresses ("unix:PATH" or "tcp:HOST:PORT") that must accept connections, and files
	// ("file:PATH") that must exist before the first start: the programs would only fail and be
	// started again until then.
	After []string `json:"after,omitempty"`
}

// group is a set of components that one supervisor process keeps running.
type group struct {
	Name       string      `json:"name"`
	Components []component `json:"components"`
	// Nice is the priority of its programs, for measurements beside other work; 0 leaves it.
	Nice int `json:"nice,omitempty"`
	// Cgroup is that of its programs; empty is the one of the machine's programs.
	Cgroup string `json:"cgroup,omitempty"`
	// within is the command that starts the supervisor in other namespaces.
	within []string
}

func (g group) cgroup() string {
	if g.Cgroup == "" {
		return filepath.Join(cgroupName, "system")
	}
	return g.Cgroup
}

func (g group) runDir(p ...string) string {
	return runPath(append([]string{g.Name}, p...)...)
}
func (g group) pidfile(component string) string { return g.runDir(component + ".pid") }
func (g group) logfile(component string) string { return logPath(g.Name, component) }
func (g group) specFile() string                { return g.runDir("components.json") }

func logPath(group, component string) string {
	return statePath(group, "logs", component+".log")
}

// startGroup runs a supervisor for g in the background, unless one with the same components runs
// already.
func startGroup(g group) error {
	spec, err := json.MarshalIndent(g, "", "  ")
	if err != nil {
		return err
	}
	if superviserRuns(g.Name) {
		if old, err := os.ReadFile(g.specFile()); err == nil && string(old) == string(spec) {
			return nil
		}
		say("%s: its settings changed; starting its programs again", g.Name)
		if err := stopGroup(g.Name); err != nil {
			return err
		}
	}
	if err := writeFile(g.specFile(), spec, 0o600); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	args := slices.Concat(g.within, []string{self}, commandPrefix, []string{"supervise", g.specFile()})
	return startBackground(g.Name+" supervisor", exec.Command(args[0], args[1:]...), g.logfile("supervisor"), g.runDir("supervisor.lock"))
}

// startBackground starts this program as a process that stays, and returns when that has taken its
// lock.
func startBackground(what string, cmd *exec.Cmd, logfile, lock string) error {
	log, err := openLog(logfile)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Dir = "/"
	cmd.Env = clusterEnvironment()
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setsid = true
	if err := cmd.Start(); err != nil {
		return err
	}
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	return waitFor(what, 10*time.Second, func(context.Context) error {
		select {
		case err := <-exited:
			return permanentError{fmt.Errorf("it ended (%v); see %s", err, logfile)}
		default:
		}
		if !isLocked(lock) {
			return errors.New("it has not taken its lock")
		}
		return nil
	})
}

// clusterEnvironment is deliberately small: what the caller exports must not change how the cluster
// behaves.
func clusterEnvironment() []string {
	return []string{
		environMark(),
		"PATH=" + binDir() + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=/root",
	}
}

// superviserRuns tells whether a supervisor of the group holds its lock.
func superviserRuns(groupName string) bool { return isLocked(runPath(groupName, "supervisor.lock")) }

// isLocked tells whether a process holds a lock; unlike a pid, a lock cannot be another process's
// after a crash.
func isLocked(path string) bool {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil
}

// stopGroup asks the group's supervisor to end its programs and waits until it has.
func stopGroup(groupName string) error {
	if !superviserRuns(groupName) {
		return nil
	}
	content, err := os.ReadFile(runPath(groupName, "supervisor.pid"))
	if err != nil {
		return err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(content)))
	if err != nil {
		return err
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	return waitFor("stop of "+groupName, 20*time.Second, func(context.Context) error {
		if superviserRuns(groupName) {
			return errors.New("its supervisor still runs")
		}
		return nil
	})
}

// supervise is the background process of a group. It ends on SIGTERM, after its components.
func supervise(specFile string) error {
	content, err := os.ReadFile(specFile)
	if err != nil {
		return err
	}
	var g group
	if err := json.Unmarshal(content, &g); err != nil {
		return fmt.Errorf("%s: %w", specFile, err)
	}
	lock, err := os.OpenFile(g.runDir("supervisor.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	if err := writeFile(g.pidfile("supervisor"), fmt.Appendf(nil, "%d\n", os.Getpid()), 0o644); err != nil {
		return err
	}
	if err := joinCgroup(g.cgroup()); err != nil {
		return err
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return fmt.Errorf("another supervisor of %s runs", g.Name)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()

	// The last component is stopped first: those that depend on another come after it.
	stops := make([]context.CancelFunc, len(g.Components))
	dones := make([]sync.WaitGroup, len(g.Components))
	for i, c := range g.Components {
		var own context.Context
		own, stops[i] = context.WithCancel(context.Background())
		dones[i].Go(func() { keepRunning(own, g, c) })
	}
	<-ctx.Done()
	for i := range slices.Backward(g.Components) {
		stops[i]()
		dones[i].Wait()
	}
	return nil
}

// keepRunning starts the component again whenever it ends, at once the first time and then ever
// more slowly while it does not stay up for ten seconds.
func keepRunning(ctx context.Context, g group, c component) {
	for _, address := range c.After {
		for ctx.Err() == nil && !accepts(address) {
			pause(ctx, 50*time.Millisecond)
		}
	}
	const quickest, slowest = 20 * time.Millisecond, 5 * time.Second
	backoff := quickest
	for ctx.Err() == nil {
		begin := time.Now()
		err := runOnce(ctx, g, c)
		if ctx.Err() != nil {
			return
		}
		lived := time.Since(begin)
		if lived > 10*time.Second {
			backoff = quickest
		}
		fmt.Printf("%s %s ended after %s (%v); starting it again in %s\n", time.Now().Format(time.RFC3339), c.Name, lived.Round(time.Millisecond), err, backoff)
		pause(ctx, backoff)
		backoff = min(backoff*3, slowest)
	}
}

func runOnce(ctx context.Context, g group, c component) error {
	log, err := openLog(g.logfile(c.Name))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.CommandContext(ctx, c.Args[0], c.Args[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Dir = "/"
	cmd.Env = append(clusterEnvironment(), c.Env...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 8 * time.Second // then SIGKILL
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	if g.Nice != 0 {
		prioritise(cmd.Process.Pid, g.Nice)
	}
	if err := writeFile(g.pidfile(c.Name), fmt.Appendf(nil, "%d\n", cmd.Process.Pid), 0o644); err != nil {
		fmt.Println("pidfile:", err)
	}
	err = cmd.Wait()
	os.Remove(g.pidfile(c.Name))
	return err
}

// prioritise sets the priority of a process, and of its session where the kernel weighs sessions
// against one another (autogroup): there the priority of a process counts only within its session.
func prioritise(pid, nice int) {
	if err := syscall.Setpriority(syscall.PRIO_PROCESS, pid, nice); err != nil {
		fmt.Println("priority:", err)
	}
	err := os.WriteFile(fmt.Sprintf("/proc/%d/autogroup", pid), fmt.Appendf(nil, "%d", nice), 0)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		fmt.Println("priority of the session:", err)
	}
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// accepts tells whether something listens at "unix:PATH" or "tcp:HOST:PORT", or "file:PATH" exists.
func accepts(address string) bool {
	network, where, _ := strings.Cut(address, ":")
	if network == "file" {
		return fileExists(where)
	}
	conn, err := net.DialTimeout(network, where, time.Second)
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

// openLog appends to a log and begins it anew when it has grown beyond 64 MiB.
func openLog(path string) (*os.File, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	flags := os.O_CREATE | os.O_APPEND | os.O_WRONLY
	if info, err := os.Stat(path); err == nil && info.Size() > 64<<20 {
		flags |= os.O_TRUNC
	}
	return os.OpenFile(path, flags, 0o644)
}

// showLogs prints the log of a component, or the names of all of them, and goes on as it grows if
// follow.
func showLogs(name string, follow bool, lines int) error {
	files, err := filepath.Glob(logPath("*", "*"))
	if err != nil {
		return err
	}
	if name == "" {
		for _, f := range files {
			fmt.Printf("%-28s %s\n", strings.TrimSuffix(filepath.Base(f), ".log"), f)
		}
		return nil
	}
	var chosen []string
	for _, f := range files {
		component := strings.TrimSuffix(filepath.Base(f), ".log")
		group := filepath.Base(filepath.Dir(filepath.Dir(f)))
		if name == component || name == group+"/"+component {
			chosen = append(chosen, f)
		}
	}
	if len(chosen) == 0 {
		return fmt.Errorf("no log of %q; `hack/cluster logs` names them all", name)
	}
	args := []string{"-n", strconv.Itoa(lines)}
	if follow {
		args = append(args, "-F")
	}
	cmd := exec.Command("tail", append(args, chosen...)...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	return cmd.Run()
}

// tailOf returns the last bytes of a log, for error messages.
func tailOf(path string, size int64) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > size {
		f.Seek(-size, io.SeekEnd)
	}
	content, _ := io.ReadAll(f)
	return string(content)
}
