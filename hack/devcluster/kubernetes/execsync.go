package main

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
	noop "go.opentelemetry.io/otel/trace/noop"
	cri "k8s.io/cri-client/pkg"
)

// newExecSyncCommand is the call that the kubelet makes for an exec probe, timed: what the
// benchmark of a wake measures.
func newExecSyncCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "cri-execsync ENDPOINT CONTAINER-ID COMMAND...",
		Short: "Run a command in a container by CRI ExecSync; print the microseconds that the call took",
		Args:  cobra.MinimumNArgs(3),
		RunE: func(command *cobra.Command, arguments []string) error {
			context := command.Context()
			service, err := cri.NewRemoteRuntimeService(context, arguments[0], 10*time.Second, noop.NewTracerProvider(), false)
			if err != nil {
				return err
			}
			// The connection is made before the clock starts: the kubelet has one.
			if _, err := service.Version(context, ""); err != nil {
				return err
			}
			begin := time.Now()
			output, problems, err := service.ExecSync(context, arguments[1], arguments[2:], time.Minute)
			took := time.Since(begin)
			if err != nil {
				return err
			}
			os.Stderr.Write(problems)
			fmt.Printf("%d %s", took.Microseconds(), output)
			return nil
		},
	}
}
