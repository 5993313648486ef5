package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

var started = time.Now()

// say prints one progress line with the time since the command began.
func say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "[%6.1fs] %s\n", time.Since(started).Seconds(), fmt.Sprintf(format, args...))
}

// during runs work that may take long, telling every 15 s that it still goes on.
func during(what string, work func() error) error {
	begin := time.Now()
	done := make(chan struct{})
	go func() {
		tick := time.NewTicker(15 * time.Second)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
				say("%s: still going on, %.0f s so far", what, time.Since(begin).Seconds())
			}
		}
	}()
	err := work()
	close(done)
	return err
}

// timeScale is the factor by which this machine is slower than a usual one (an emulated one: 20).
const timeScale = "TORPOR_TIME_SCALE"

// scaled is a limit of time for this machine.
func scaled(limit time.Duration) time.Duration {
	factor, err := strconv.Atoi(os.Getenv(timeScale))
	if err != nil || factor < 1 {
		return limit
	}
	return limit * time.Duration(factor)
}

// waitFor polls check until it returns nil, and otherwise returns its last error. A permanentError
// of check, such as that of a dead process, ends the wait at once.
func waitFor(what string, limit time.Duration, check func(context.Context) error) error {
	limit = scaled(limit)
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	begin, told := time.Now(), time.Now()
	for {
		attempt, stop := context.WithTimeout(ctx, scaled(5*time.Second))
		err := check(attempt)
		stop()
		if err == nil {
			return nil
		}
		var hopeless permanentError
		if errors.As(err, &hopeless) {
			return fmt.Errorf("%s: %w", what, err)
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%s: not within %s: %w", what, limit, err)
		}
		if time.Since(told) > 10*time.Second {
			told = time.Now()
			say("%s: waiting for %.0f s (%v)", what, time.Since(begin).Seconds(), err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// permanentError ends a waitFor at once.
type permanentError struct{ error }

func (e permanentError) Unwrap() error { return e.error }

// output runs a command with a time limit and returns what it printed; its error carries standard
// error.
func output(limit time.Duration, name string, args ...string) (string, error) {
	return outputIn(limit, "", nil, nil, name, args...)
}

func outputIn(limit time.Duration, dir string, env []string, stdin []byte, name string, args ...string) (string, error) {
	limit = scaled(limit)
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	var out, errOut bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, &out, &errOut
	cmd.WaitDelay = 2 * time.Second // a grandchild that keeps the pipe open does not hold us
	if env != nil {
		cmd.Env = append(os.Environ(), env...)
	}
	if stdin != nil {
		cmd.Stdin = bytes.NewReader(stdin)
	}
	err := cmd.Run()
	if err == nil {
		return out.String(), nil
	}
	said := strings.TrimSpace(errOut.String() + out.String())
	if len(said) > 4000 {
		said = "…" + said[len(said)-4000:]
	}
	if ctx.Err() != nil {
		err = fmt.Errorf("not finished within %s", limit)
	}
	if said == "" {
		return out.String(), fmt.Errorf("%s: %w", commandLine(name, args), err)
	}
	return out.String(), fmt.Errorf("%s: %w: %s", commandLine(name, args), err, said)
}

func commandLine(name string, args []string) string {
	line := strings.Join(append([]string{name}, args...), " ")
	if len(line) > 200 {
		line = line[:200] + "…"
	}
	return line
}
