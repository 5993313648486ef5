{{/*
The chart has no objects of its own: crds/ and files/ are links to the kustomize base, and the templates
change its objects according to the values. Additions to the base are therefore in the chart, too.

torpor.objects: the objects of `files`, as a JSON list, with the images and the namespace of the values.
*/}}
{{- define "torpor.objects" -}}
{{- $root := .root -}}
{{- $namespace := include "torpor.namespace" $root -}}
{{- $objects := list -}}
{{- range $file := .files -}}
  {{- $text := $root.Files.Get (printf "files/%s" $file) -}}
  {{- range $image := list "controller" "agent" "router" "runtime" -}}
    {{- $text = replace (printf "torpor.invalid/%s:unset" $image) (include "torpor.image" (dict "root" $root "image" $image)) $text -}}
  {{- end -}}
  {{- range $document := splitList "\n---\n" $text -}}
    {{- $object := fromYaml $document -}}
    {{- if not $object.kind -}}
      {{- fail (printf "files/%s holds no object: %v" $file (default "it is missing" $object.Error)) -}}
    {{- end -}}
    {{- if hasKey $object.metadata "namespace" -}}
      {{- $_ := set $object.metadata "namespace" $namespace -}}
    {{- end -}}
    {{- range $subject := $object.subjects -}}
      {{- $_ := set $subject "namespace" $namespace -}}
    {{- end -}}
    {{- $objects = append $objects $object -}}
  {{- end -}}
{{- end -}}
{{- toJson $objects -}}
{{- end -}}

{{- define "torpor.namespace" -}}
{{- default .Release.Namespace .Values.namespace.name -}}
{{- end -}}

{{/*
torpor.image: reference of one of the images, by digest if one is given. An image without its own tag has the
controller's, which suits a registry with one tag for all four. The base names a registry that cannot exist
(RFC 2606), so a missing value never pulls a foreign image.
*/}}
{{- define "torpor.image" -}}
{{- $values := .root.Values -}}
{{- $value := ternary "image" (printf "%s.image" .image) (eq .image "controller") -}}
{{- $image := $values.image -}}
{{- if ne .image "controller" -}}
  {{- $image = (get $values .image).image -}}
{{- end -}}
{{- $repository := $image.repository -}}
{{- if hasPrefix "torpor.invalid/" $repository -}}
  {{- if not $values.image.registry -}}
    {{- fail (printf "image.registry is missing: set it to the registry of Torpor's images, or set %s.repository (`hack/release` makes the images and prints how to push them)" $value) -}}
  {{- end -}}
  {{- $repository = printf "%s/%s" (trimSuffix "/" $values.image.registry) (base $repository) -}}
{{- end -}}
{{- $tag := default $values.image.tag $image.tag -}}
{{- if $image.digest -}}
  {{- printf "%s@%s" $repository $image.digest -}}
{{- else if $tag -}}
  {{- printf "%s:%s" $repository $tag -}}
{{- else -}}
  {{- fail (printf "%s.digest is missing: set it or image.tag (`hack/release` and `hack/cluster build-torpor` make images)" $value) -}}
{{- end -}}
{{- end -}}

{{/* torpor.pod: sets the values of one component in a Pod's spec. Unset values keep those of the base. */}}
{{- define "torpor.pod" -}}
{{- $pod := .pod -}}
{{- $values := .values -}}
{{- range $field := list "nodeSelector" "tolerations" "affinity" -}}
  {{- with get $values $field -}}
    {{- $_ := set $pod $field . -}}
  {{- end -}}
{{- end -}}
{{- with get $values "podSecurityContext" -}}
  {{- $_ := set $pod "securityContext" . -}}
{{- end -}}
{{- with .root.Values.imagePullSecrets -}}
  {{- $_ := set $pod "imagePullSecrets" . -}}
{{- end -}}
{{- range $container := $pod.containers -}}
  {{- with get $values "resources" -}}
    {{- $_ := set $container "resources" . -}}
  {{- end -}}
  {{- with get $values "containerSecurityContext" -}}
    {{- $_ := set $container "securityContext" . -}}
  {{- end -}}
  {{- with get $values "extraArgs" -}}
    {{- $_ := set $container "args" (concat (default list $container.args) .) -}}
  {{- end -}}
{{- end -}}
{{- range $container := concat $pod.containers (default list $pod.initContainers) -}}
  {{- $_ := set $container "imagePullPolicy" $.root.Values.image.pullPolicy -}}
{{- end -}}
{{- end -}}

{{/*
torpor.kms: gives the Pod of the agent or the controller the socket of the node's KMS plug-in, as deploy/kms does.
*/}}
{{- define "torpor.kms" -}}
{{- $mount := dict "name" "kms" "mountPath" "/run/torpor-kms" "readOnly" true -}}
{{- $volume := dict "name" "kms" "hostPath" (dict "path" "/run/torpor-kms" "type" "DirectoryOrCreate") -}}
{{- $container := first .pod.containers -}}
{{- $_ := set $container "volumeMounts" (append $container.volumeMounts $mount) -}}
{{- $_ := set .pod "volumes" (append .pod.volumes $volume) -}}
{{- end -}}

{{/*
torpor.flags: `args` with the flags that `values` set, as a JSON list. A value's name is its flag's in camel case.
An existing flag gets the value; the others follow in alphabetical order.
*/}}
{{- define "torpor.flags" -}}
{{- $flags := dict -}}
{{- range $name, $value := omit .values "extraArgs" "env" -}}
  {{- if not (kindIs "invalid" $value) -}}
    {{- $text := ternary (toString $value) (toJson $value) (kindIs "string" $value) -}}
    {{- if $text -}}
      {{- $_ := set $flags (printf "--%s" (kebabcase $name)) $text -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- $args := list -}}
{{- range $arg := .args -}}
  {{- $flag := first (splitList "=" $arg) -}}
  {{- if hasKey $flags $flag -}}
    {{- $arg = printf "%s=%s" $flag (get $flags $flag) -}}
    {{- $_ := unset $flags $flag -}}
  {{- end -}}
  {{- $args = append $args $arg -}}
{{- end -}}
{{- range $flag := keys $flags | sortAlpha -}}
  {{- $args = append $args (printf "%s=%s" $flag (get $flags $flag)) -}}
{{- end -}}
{{- toJson $args -}}
{{- end -}}

{{/* torpor.rules: the rules about cluster-scoped kinds, or the others, as a JSON list. */}}
{{- define "torpor.rules" -}}
{{- $ofCluster := list "namespaces" "nodes" "runtimeclasses" "sandboxnodes" "snapshotclasses" -}}
{{- $rules := list -}}
{{- range $rule := .rules -}}
  {{- $count := 0 -}}
  {{- range $resource := $rule.resources -}}
    {{- if has $resource $ofCluster -}}
      {{- $count = add1 $count -}}
    {{- end -}}
  {{- end -}}
  {{- if and $count (ne (int $count) (len $rule.resources)) -}}
    {{- fail (printf "a rule of the controller mixes cluster-scoped and namespaced kinds: %v" $rule.resources) -}}
  {{- end -}}
  {{- if eq (gt (int $count) 0) $.cluster -}}
    {{- $rules = append $rules $rule -}}
  {{- end -}}
{{- end -}}
{{- toJson $rules -}}
{{- end -}}

{{/*
torpor.inNamespace: the Role or RoleBinding that replaces a ClusterRole or ClusterRoleBinding of the controller in a
namespace. Its name differs from that of the Role for the lease.
*/}}
{{- define "torpor.inNamespace" -}}
{{- $name := printf "%s-sandboxes" .object.metadata.name -}}
{{- $object := dict "apiVersion" .object.apiVersion "kind" (trimPrefix "Cluster" .object.kind) "metadata" (dict "name" $name "namespace" .namespace) -}}
{{- if eq .object.kind "ClusterRole" -}}
  {{- $_ := set $object "rules" (include "torpor.rules" (dict "rules" .object.rules "cluster" false) | fromJsonArray) -}}
{{- else -}}
  {{- $_ := set $object "roleRef" (dict "apiGroup" .object.roleRef.apiGroup "kind" "Role" "name" $name) -}}
  {{- $_ := set $object "subjects" .object.subjects -}}
{{- end -}}
{{- toYaml $object -}}
{{- end -}}
