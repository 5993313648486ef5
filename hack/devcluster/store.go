package main

import (
	"errors"
	"fmt"
	"os"
	"time"

	"torpor.dev/hack/devcluster/oci"
)

// storeGroup is the name of the group with the S3 server.
const storeGroup = "store"

// Access to the S3 server: development values, which protect nothing.
const (
	storePort      = 17070
	storeBucket    = "torpor"
	storeRegion    = "us-east-1"
	storeAccessKey = "torpor-dev"
	storeSecretKey = "torpor-dev-secret"
	storeHealth    = "/health"
)

// storeArtifact is an S3 server that keeps each object in a file. Only `store up` builds it.
var storeArtifact = artifact{
	name: "versitygw", about: "2 min",
	packages: []string{"github.com/versity/versitygw/cmd/versitygw@v1.8.0"},
	ldflags:  "-X main.Version=v1.8.0",
	files:    []string{"versitygw"},
}

// kmsArtifact is the KMS plug-in of the tests. Only `store up` builds it.
var kmsArtifact = artifact{
	name: "kms", about: "20 s", module: "hack/devcluster/kms",
	files: []string{"kms"},
}

// kmsImage is what hack/kms.yaml runs.
const kmsImage = "torpor.dev/kms:dev"

// storeEndpoint is reached from the machine, and from Pods of all nodes.
func storeEndpoint() string { return fmt.Sprintf("http://%s:%d", machineAddress, storePort) }

// storeMark exists from `store up` to `store down`.
func storeMark() string { return statePath(storeGroup, "wanted") }

func storeCommand(args []string) error {
	if len(args) != 1 {
		return errors.New("usage: store up|down|status")
	}
	if args[0] == "status" {
		return storeStatus()
	}
	if err := needRoot("store " + args[0]); err != nil {
		return err
	}
	unlock, err := lockCluster()
	if err != nil {
		return err
	}
	defer unlock()
	switch args[0] {
	case "up":
		if !superviserRuns(controlPlane) {
			return errors.New("no cluster runs; run `hack/cluster up` first")
		}
		if err := writeFile(storeMark(), nil, 0o644); err != nil {
			return err
		}
		if err := startStore(); err != nil {
			return fmt.Errorf("%w\n%s", err, failingComponents())
		}
		if err := loadKMS(); err != nil {
			return err
		}
		return storeStatus()
	case "down":
		return stopStore()
	}
	return fmt.Errorf("no such command: store %s; usage: store up|down|status", args[0])
}

func storeComponents() group {
	return group{Name: storeGroup, Components: []component{{
		Name: "versitygw",
		Env:  []string{"ROOT_ACCESS_KEY=" + storeAccessKey, "ROOT_SECRET_KEY=" + storeSecretKey},
		Args: []string{
			// S3 keeps connections open too. The log would have a line for each chunk.
			binDir("versitygw"), "--keep-alive", "--quiet",
			fmt.Sprintf("--port=%s:%d", machineAddress, storePort), "--region=" + storeRegion, "--health=" + storeHealth,
			"posix", statePath(storeGroup, "data"),
		},
	}}}
}

// startStore builds the server if it is missing, and returns when it answers.
func startStore() error {
	tools, err := toolsOf([]artifact{storeArtifact}, true)
	if err != nil {
		return err
	}
	if err := linkTools(tools); err != nil {
		return err
	}
	// A folder of the data is a bucket of the root account.
	if err := os.MkdirAll(statePath(storeGroup, "data", storeBucket), 0o755); err != nil {
		return err
	}
	if err := startGroup(storeComponents()); err != nil {
		return err
	}
	return waitFor("S3 server", 30*time.Second, healthy(storeEndpoint()+storeHealth))
}

// loadKMS builds the KMS plug-in if it is missing, and gives the nodes its image.
func loadKMS() error {
	tools, err := toolsOf([]artifact{kmsArtifact}, true)
	if err != nil {
		return err
	}
	archive, err := fileImage(kmsImage, tools, "kms", oci.Config{Entrypoint: []string{"/kms"}})
	if err != nil {
		return err
	}
	return loadImages(archive)
}

// stopStore ends the server. Its data is kept.
func stopStore() error {
	os.Remove(storeMark())
	if err := stopGroup(storeGroup); err != nil {
		return err
	}
	return os.RemoveAll(runPath(storeGroup))
}

// storeStatus prints, as shell assignments, where the server is and who may use it.
func storeStatus() error {
	if !superviserRuns(storeGroup) {
		return errors.New("the S3 server does not run; `hack/cluster store up` starts it")
	}
	if err := waitFor("S3 server", 5*time.Second, healthy(storeEndpoint()+storeHealth)); err != nil {
		return err
	}
	fmt.Printf("S3_ENDPOINT=%s\nS3_BUCKET=%s\nAWS_REGION=%s\nAWS_ACCESS_KEY_ID=%s\nAWS_SECRET_ACCESS_KEY=%s\n",
		storeEndpoint(), storeBucket, storeRegion, storeAccessKey, storeSecretKey)
	return nil
}
