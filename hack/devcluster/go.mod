module torpor.dev/hack/devcluster

go 1.26
