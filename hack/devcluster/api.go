package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"
)

// apiClient asks the apiserver as the cluster's administrator. It is for the few questions of `up`
// and `status`; everything else goes through kubectl.
func apiClient() (*http.Client, error) {
	pair, err := tls.LoadX509KeyPair(pkiPath("admin.crt"), pkiPath("admin.key"))
	if err != nil {
		return nil, err
	}
	ca, err := os.ReadFile(pkiPath("ca.crt"))
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	return &http.Client{
		Timeout:   scaled(10 * time.Second),
		Transport: &http.Transport{Proxy: nil, TLSClientConfig: &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair}}},
	}, nil
}

// get decodes the object at an API path into v, or only checks for status 200 if v is nil.
func get(ctx context.Context, path string, v any) error {
	client, err := apiClient()
	if err != nil {
		return err
	}
	defer client.CloseIdleConnections()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, apiserverURL()+path, nil)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		said, _ := io.ReadAll(io.LimitReader(response.Body, 300))
		return fmt.Errorf("%s: %s: %s", path, response.Status, said)
	}
	if v == nil {
		return nil
	}
	return json.NewDecoder(response.Body).Decode(v)
}

type condition struct {
	Type    string `json:"type"`
	Status  string `json:"status"`
	Message string `json:"message"`
	// LastHeartbeatTime is set in conditions of Nodes only.
	LastHeartbeatTime time.Time `json:"lastHeartbeatTime"`
}

type conditioned struct {
	Status struct {
		Conditions []condition `json:"conditions"`
	} `json:"status"`
}

// condition is the object's condition of this type; nil where it has none.
func (object conditioned) condition(kind string) *condition {
	for _, c := range object.Status.Conditions {
		if c.Type == kind {
			return &c
		}
	}
	return nil
}

// hasCondition is a check for waitFor: the object's condition must be True.
func hasCondition(path, kind string) func(context.Context) error {
	return hasConditionSince(path, kind, time.Time{})
}

// hasConditionSince also wants a heartbeat of the condition since a time, which the apiserver knows
// by the second.
func hasConditionSince(path, kind string, since time.Time) func(context.Context) error {
	return func(ctx context.Context) error {
		var object conditioned
		if err := get(ctx, path, &object); err != nil {
			return err
		}
		switch c := object.condition(kind); {
		case c == nil:
			return errors.New("no condition " + kind + " yet")
		case c.LastHeartbeatTime.Before(since.Truncate(time.Second)):
			return fmt.Errorf("%s is from %s", kind, c.LastHeartbeatTime.Format(time.RFC3339))
		case c.Status == "True":
			return nil
		default:
			return fmt.Errorf("%s is %s: %s", kind, c.Status, c.Message)
		}
	}
}

// jobComplete is a check for waitFor: the Job must be Complete. Its error names the Job's Pods, and
// ends the wait once the Job has failed.
func jobComplete(namespace, name string) func(context.Context) error {
	return func(ctx context.Context) error {
		var job conditioned
		if err := get(ctx, fmt.Sprintf("/apis/batch/v1/namespaces/%s/jobs/%s", namespace, name), &job); err != nil {
			return err
		}
		isTrue := func(kind string) bool {
			c := job.condition(kind)
			return c != nil && c.Status == "True"
		}
		if isTrue("Complete") {
			return nil
		}
		pods := podsOfJob(ctx, namespace, name)
		if isTrue("Failed") {
			return permanentError{fmt.Errorf("it has failed: %s", pods)}
		}
		return errors.New(pods)
	}
}

// podsOfJob says how far each Pod of a Job is.
func podsOfJob(ctx context.Context, namespace, name string) string {
	var list struct {
		Items []struct {
			Metadata struct{ Name string }
			Status   struct {
				Phase             string
				ContainerStatuses []struct {
					State struct {
						Waiting    *struct{ Reason, Message string }
						Terminated *struct {
							ExitCode int
							Message  string
						}
					}
				}
			}
		}
	}
	path := fmt.Sprintf("/api/v1/namespaces/%s/pods?labelSelector=job-name%%3D%s", namespace, name)
	if err := get(ctx, path, &list); err != nil {
		return err.Error()
	}
	var said []string
	for _, pod := range list.Items {
		words := fmt.Sprintf("Pod %s is %s", pod.Metadata.Name, pod.Status.Phase)
		for _, container := range pod.Status.ContainerStatuses {
			if waiting := container.State.Waiting; waiting != nil {
				words += fmt.Sprintf(", %s %s", waiting.Reason, waiting.Message)
			}
			if ended := container.State.Terminated; ended != nil {
				words += fmt.Sprintf(", exit code %d: %s", ended.ExitCode, lastLine(ended.Message))
			}
		}
		said = append(said, words)
	}
	if len(said) == 0 {
		return "it has no Pod yet"
	}
	return strings.Join(said, "; ")
}

func lastLine(text string) string {
	text = strings.TrimSpace(text)
	return text[strings.LastIndexByte(text, '\n')+1:]
}

func exists(path string) func(context.Context) error {
	return func(ctx context.Context) error { return get(ctx, path, nil) }
}

// deploymentReady is a check for waitFor: all replicas of the newest template must be ready. The
// condition Available would be True with one of one missing.
func deploymentReady(namespace, name string) func(context.Context) error {
	return func(ctx context.Context) error {
		var object struct {
			Metadata struct{ Generation int64 }
			Spec     struct{ Replicas int }
			Status   struct {
				ObservedGeneration             int64
				UpdatedReplicas, ReadyReplicas int
			}
		}
		if err := get(ctx, "/apis/apps/v1/namespaces/"+namespace+"/deployments/"+name, &object); err != nil {
			return err
		}
		if object.Status.ObservedGeneration < object.Metadata.Generation || object.Status.UpdatedReplicas < object.Spec.Replicas || object.Status.ReadyReplicas < object.Spec.Replicas {
			return fmt.Errorf("%d of %d replicas are ready", object.Status.ReadyReplicas, object.Spec.Replicas)
		}
		return nil
	}
}

// healthy is a check for waitFor: a plain HTTP health address must answer 200.
func healthy(url string) func(context.Context) error {
	return func(ctx context.Context) error {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		response, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(request)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s", url, response.Status)
		}
		return nil
	}
}
