{{/*
The chart has no objects of its own: crds/ and files/ are links to the kustomize base, and the templates
change in its objects what the values say. What is added to the base is in the chart by that.

torpor.objects: the objects of `files`, as a JSON list, with the images and the namespace of the values.
*/}}
{{- define "torpor.objects" -}}
{{- $root := .root -}}
{{- $namespace := include "torpor.namespace" $root -}}
{{- $objects := list -}}
{{- range $file := .files -}}
  {{- $text := $root.Files.Get (printf "files/%s" $file) -}}
  {{- range $image := list "controller" "agent" "router" "runtime" -}}
    {{- $text = replace (printf "torpor.dev/%s:dev" $image) (include "torpor.image" (dict "root" $root "image" $image)) $text -}}
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

{{/* torpor.image: reference of one of the images. One without a tag of its own has the controller's: enough for who gives all four one tag. */}}
{{- define "torpor.image" -}}
{{- $values := .root.Values -}}
{{- $image := $values.image -}}
{{- if ne .image "controller" -}}
  {{- $image = (get $values .image).image -}}
{{- end -}}
{{- $tag := default $values.image.tag $image.tag -}}
{{- if not $tag -}}
  {{- fail (printf "image.tag is missing: which build of Torpor? (`hack/cluster build-torpor` makes images; or set %s)" (ternary "image.tag" (printf "%s.image.tag" .image) (eq .image "controller"))) -}}
{{- end -}}
{{- printf "%s:%s" $image.repository $tag -}}
{{- end -}}

{{/* torpor.pod: puts into a Pod's spec what values of one component say about it. What is not set stays as the base has it. */}}
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
torpor.flags: `args` with the flags that `values` set, as a JSON list. A value's name is its flag's in camel case.
A flag that is there already gets the value; the others follow in alphabetical order.
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
