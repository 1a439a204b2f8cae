{{- define "kvpool.fullname" -}}
{{- $name := .Release.Name -}}
{{- if not (contains "kvpool" $name) }}{{ $name = printf "%s-kvpool" $name }}{{ end -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels that select the pods of a component: (list . "server") */}}
{{- define "kvpool.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: kvpool
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Name and labels of an object of a component: (list . "server") */}}
{{- define "kvpool.metadata" -}}
{{- $root := index . 0 -}}
name: {{ include "kvpool.fullname" $root }}-{{ index . 1 }}
labels:
  {{- include "kvpool.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ $root.Release.Service }}
  helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end -}}

{{/* Keeps all pods of a component but one while nodes are drained: (list . "server") */}}
{{- define "kvpool.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "kvpool.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "kvpool.selector" . | nindent 6 }}
{{- end -}}

{{/* An image: (list . repository tag) */}}
{{- define "kvpool.image" -}}
{{- $root := index . 0 -}}
{{- with $root.Values.image.registry }}{{ . }}/{{ end -}}
{{ index . 1 }}:{{ index . 2 | default $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- end -}}

{{/* What a pod has in common with every other. */}}
{{- define "kvpool.pod" -}}
# Kubernetes would set variables named after services, which kvpool refuses as unknown settings.
enableServiceLinks: false
automountServiceAccountToken: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001 # may read the files of the Secrets and write to the volumes
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "kvpool.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: ["ALL"]}
{{- end -}}

{{/* Not empty if the release has the shared server. */}}
{{- define "kvpool.isShared" -}}
{{- if kindIs "bool" .Values.server.enabled }}{{ with .Values.server.enabled }}{{ . }}{{ end }}
{{- else if not .Values.vllm.enabled }}true{{ end -}}
{{- end -}}

{{/* Limits on clients, from the memory limit: "Memory of a pod" in docs/reference/limits.md. */}}
{{- define "kvpool.limits" -}}
{{- $mib := int64 .Values.server.memoryMiB -}}
max_message_bytes: 4194304
max_memory_bytes: {{ mul $mib 262144 }}
max_total_blocks: {{ mul $mib 256 }}
max_pool_blocks: {{ mul $mib 256 }}
max_event_bytes: {{ mul $mib 65536 }}
max_pools: {{ div $mib 128 }}
max_sessions: {{ div $mib 128 }}
max_watches: {{ div $mib 128 }}
max_calls: {{ div $mib 16 }}
max_connections: {{ div $mib 16 }}
max_waiting_steps: {{ div $mib 16 }}
max_waiting_bytes: {{ mul $mib 8192 }}
{{- end -}}

{{/* Options of the shared server. */}}
{{- define "kvpool.sharedSettings" -}}
{{- $server := printf "%s-server" (include "kvpool.fullname" .) -}}
{{- if .Values.tls.secretName }}
tls_cert: /etc/kvpool/tls/tls.crt
tls_key: /etc/kvpool/tls/tls.key
{{- else }}
allow_plaintext: grpc metrics{{ if .Values.shard.enabled }} replication{{ end }}
{{- end }}
{{- if .Values.tokens.secretName }}
tokens: /etc/kvpool/tokens/tokens.toml
{{- end }}
{{- if .Values.shard.enabled }}
cluster: {{ .Values.shard.etcd }}
advertise: $(POD_NAME).{{ $server }}:50051
replication_listen: 0.0.0.0:50060
replication_advertise: $(POD_NAME).{{ $server }}:50060
{{- if .Values.tls.secretName }}
replication_tls_ca: /etc/kvpool/tls/ca.crt
{{- end }}
{{- if .Values.tokens.secretName }}
replication_token_file: /etc/kvpool/standby/token
{{- end }}
{{- end }}
{{- end -}}

{{/* Variables of a server: (list . options ...). Of an option that is given twice the last value counts. */}}
{{- define "kvpool.serverVariables" -}}
{{- $all := dict "log_format" "json" "journal" "/var/lib/kvpool/journal" "allow_plaintext" "metrics" -}}
{{- range $options := prepend (rest .) (include "kvpool.limits" (first .) | fromYaml) -}}
{{- range $option, $value := $options }}{{ $_ := set $all $option $value }}{{ end -}}
{{- end -}}
{{- range $option, $value := $all }}
- {name: KVPOOL_SERVE_{{ upper $option }}, value: {{ include "kvpool.value" $value | quote }}}
{{- end }}
{{- end -}}

{{/*
Probes of a server or a lender: its port of metrics. Probes of type grpc do not support TLS, and a TCP probe is not enough:
connections are accepted even if the process hangs. /healthz of a server answers 503 if the event loop was busy for 5 s.
Not /readyz: a server that waits for another one, or for etcd, must not be killed.
*/}}
{{- define "kvpool.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: {{ . }}}
  periodSeconds: 2
  timeoutSeconds: 6
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /healthz, port: {{ . }}}
  periodSeconds: 10
  timeoutSeconds: 6
  failureThreshold: 6
{{- end -}}

{{/* Resources of a server; of a standby as of the primary: it executes every change. */}}
{{- define "kvpool.serverResources" -}}
resources:
  requests: {cpu: {{ .Values.server.cpu | quote }}, memory: {{ int64 .Values.server.requestedMemoryMiB }}Mi}
  limits: {memory: {{ int64 .Values.server.memoryMiB }}Mi}
{{- end -}}

{{/* The claim of the journal of the shared server, which outlives the pod. */}}
{{- define "kvpool.journalClaim" -}}
{{- $journal := .Values.server.journal -}}
- metadata:
    name: journal
    labels:
      {{- include "kvpool.selector" (list . "server") | nindent 6 }}
  spec:
    accessModes: [ReadWriteOnce]
{{- with $journal.storageClassName }}
    storageClassName: {{ . }}
{{- end }}
    resources:
      requests: {storage: {{ $journal.size }}}
{{- end -}}

{{/* A value of an option as a variable's: numbers without an exponent, lists separated by spaces. */}}
{{- define "kvpool.value" -}}
{{- if kindIs "slice" . }}{{ join " " . }}
{{- else if and (kindIs "float64" .) (eq (float64 (int64 .)) .) }}{{ int64 . }}
{{- else }}{{ . }}{{ end -}}
{{- end -}}

{{/* Refuses values that contradict each other. */}}
{{- define "kvpool.check" -}}
{{- if not (include "kvpool.isShared" .) -}}
{{- if not .Values.vllm.enabled }}{{ fail "server.enabled false without vllm.enabled starts nothing" }}{{ end -}}
{{- $server := .Values.server -}}
{{- $those := dict "server.settings" $server.settings "server.journal.claim" $server.journal.claim -}}
{{- $_ := set $those "shard.enabled" .Values.shard.enabled -}}
{{- $_ := set $those "tls.secretName" .Values.tls.secretName -}}
{{- $_ := set $those "tokens.secretName" .Values.tokens.secretName -}}
{{- range $name, $value := $those -}}
{{- if $value }}{{ fail (printf "%s needs server.enabled: it is for the shared server" $name) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if .Values.shard.enabled -}}
{{- if not .Values.shard.etcd }}{{ fail "shard.enabled needs shard.etcd, the addresses of your etcd" }}{{ end -}}
{{- if and .Values.tokens.secretName (not .Values.shard.standbyTokenSecret) -}}
{{ fail "shard.enabled with tokens needs shard.standbyTokenSecret" }}
{{- end -}}
{{- end -}}
{{- if .Values.vllm.enabled -}}
{{- if not .Values.vllm.model }}{{ fail "vllm.enabled needs vllm.model" }}{{ end -}}
{{- if and (eq .Values.vllm.device "cuda") (not .Values.vllm.resourceClaimTemplate) -}}
{{ fail "vllm.device cuda needs vllm.resourceClaimTemplate: the containers of a pod share their devices" }}
{{- end -}}
{{- if and .Values.vllm.hostMemoryMiB (has "--no-enable-prefix-caching" .Values.vllm.args) -}}
{{ fail "vllm.hostMemoryMiB needs prefix caching, which vllm.args turn off" }}
{{- end -}}
{{- end -}}
{{- end -}}
