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

{{- define "kvpool.labels" -}}
{{- $root := index . 0 -}}
{{ include "kvpool.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
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

{{/* Addresses of the server, as clients take them. */}}
{{- define "kvpool.address" -}}
{{- $server := printf "%s-server" (include "kvpool.fullname" .) -}}
{{- if .Values.shard.enabled -}}
{{ printf "%s-0.%s:50051,%s-1.%s:50051" $server $server $server $server }}
{{- else -}}
{{ printf "%s:50051" $server }}
{{- end -}}
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

{{/* Options of the server. */}}
{{- define "kvpool.serverSettings" -}}
{{- $server := printf "%s-server" (include "kvpool.fullname" .) -}}
log_format: json
journal: /var/lib/kvpool/journal
{{- if .Values.tls.secretName }}
tls_cert: /etc/kvpool/tls/tls.crt
tls_key: /etc/kvpool/tls/tls.key
allow_plaintext: metrics
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
{{ include "kvpool.limits" . }}
{{- end -}}

{{/* A value of an option as a variable's: numbers without an exponent, lists separated by spaces. */}}
{{- define "kvpool.value" -}}
{{- if kindIs "slice" . }}{{ join " " . }}
{{- else if and (kindIs "float64" .) (eq (float64 (int64 .)) .) }}{{ int64 . }}
{{- else }}{{ . }}{{ end -}}
{{- end -}}

{{/* Refuses values that contradict each other. */}}
{{- define "kvpool.check" -}}
{{- if .Values.shard.enabled -}}
{{- if not .Values.shard.etcd }}{{ fail "shard.enabled needs shard.etcd, the addresses of your etcd" }}{{ end -}}
{{- if and .Values.tokens.secretName (not .Values.shard.standbyTokenSecret) -}}
{{ fail "shard.enabled with tokens needs shard.standbyTokenSecret" }}
{{- end -}}
{{- end -}}
{{- if .Values.vllm.enabled -}}
{{- if not .Values.vllm.model }}{{ fail "vllm.enabled needs vllm.model" }}{{ end -}}
{{- if and .Values.tokens.secretName (not .Values.vllm.tokenSecret) -}}
{{ fail "vllm.enabled with tokens needs vllm.tokenSecret" }}
{{- end -}}
{{- if and (eq .Values.vllm.device "cuda") (not .Values.vllm.resourceClaimTemplate) -}}
{{ fail "vllm.device cuda needs vllm.resourceClaimTemplate: the containers of a pod share their devices" }}
{{- end -}}
{{- end -}}
{{- end -}}
