package main

import (
	"fmt"
	"net/url"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/embed"
)

// newEtcdCommand is a single etcd member for a cluster that may lose its data: it does not wait for
// the disk. Its own main cannot be built by `go install` because its module has replace directives.
func newEtcdCommand() *cobra.Command {
	var dir, client, peer string
	cmd := &cobra.Command{
		Use:          "etcd",
		Short:        "one etcd member, without fsync",
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE: func(*cobra.Command, []string) error {
			return runEtcd(dir, client, peer)
		},
	}
	cmd.Flags().StringVar(&dir, "data-dir", "", "folder of the write-ahead log and snapshots")
	cmd.Flags().StringVar(&client, "client-url", "http://127.0.0.1:2379", "where clients are served")
	cmd.Flags().StringVar(&peer, "peer-url", "http://127.0.0.1:2380", "where peers would be served")
	if err := cmd.MarkFlagRequired("data-dir"); err != nil {
		panic(err)
	}
	return cmd
}

func runEtcd(dir, client, peer string) error {
	clientURL, err := url.Parse(client)
	if err != nil {
		return fmt.Errorf("--client-url: %w", err)
	}
	peerURL, err := url.Parse(peer)
	if err != nil {
		return fmt.Errorf("--peer-url: %w", err)
	}
	config := embed.NewConfig()
	config.Dir = dir
	config.ListenClientUrls = []url.URL{*clientURL}
	config.AdvertiseClientUrls = config.ListenClientUrls
	config.ListenPeerUrls = []url.URL{*peerURL}
	config.AdvertisePeerUrls = config.ListenPeerUrls
	config.InitialCluster = config.InitialClusterFromName(config.Name)
	config.UnsafeNoFsync = true
	config.LogLevel = "warn"
	// Only etcd's own command line sets it; without it every request is logged as a slow one.
	config.WarningUnaryRequestDuration = embed.DefaultWarningUnaryRequestDuration
	// A burst of Pods writes many revisions; without compaction the default quota of 2 GiB would
	// end it.
	config.AutoCompactionMode = "periodic"
	config.AutoCompactionRetention = "5m"
	config.QuotaBackendBytes = 8 << 30

	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGINT, syscall.SIGTERM)
	server, err := embed.StartEtcd(config)
	if err != nil {
		return err
	}
	defer server.Close()
	select {
	case <-stop:
		return nil
	case err := <-server.Err():
		return err
	}
}
