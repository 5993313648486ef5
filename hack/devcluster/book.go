package main

import (
	"fmt"
	"os"
	"path/filepath"
)

// bookArtifact is the program that makes a book of docs/.
var bookArtifact = artifact{
	name: "mdbook", about: "2 min", crate: "mdbook@0.5.4 --no-default-features --features search", files: []string{"mdbook"},
}

// bookCommand makes target/book out of docs/. With --if-installed it does so only if mdbook was
// built before. mdbook fails for a page of SUMMARY.md that does not exist; hack/check-prose checks
// the links.
func bookCommand(args []string) error {
	ifInstalled := len(args) == 1 && args[0] == "--if-installed"
	if len(args) > 0 && !ifInstalled {
		return fmt.Errorf("%q: the only option is --if-installed", args)
	}
	tools, err := toolsOf([]artifact{bookArtifact}, !ifInstalled)
	if err != nil && ifInstalled {
		say("the book of docs/ is not made: mdbook is not installed; `hack/cluster book` installs it")
		return nil
	}
	if err != nil {
		return err
	}
	if err := runLoudly(os.Environ(), tools["mdbook"], "build", repoRoot); err != nil {
		return fmt.Errorf("mdbook cannot make the book of docs/ (see above): %w", err)
	}
	say("the book is %s", filepath.Join(repoRoot, "target", "book", "index.html"))
	return nil
}
