{{- define "loraplex.fullname" -}}
{{- $name := .Release.Name -}}
{{- if not (contains .Chart.Name $name) }}{{ $name = printf "%s-%s" $name .Chart.Name }}{{ end -}}
{{- /* The names of pods are longer, and go into labels of at most 63 characters. */ -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "loraplex.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "loraplex.labels" -}}
{{ include "loraplex.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* Metadata of an object: (dict "root" $ "suffix" "-server"). */ -}}
{{- define "loraplex.metadata" -}}
name: {{ include "loraplex.fullname" .root }}{{ .suffix }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "loraplex.labels" .root | nindent 2 }}
{{- end -}}

{{- define "loraplex.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s-cpu" .Chart.AppVersion) }}
{{- end -}}

{{- define "loraplex.secret" -}}
{{ .Values.secret | default (include "loraplex.fullname" .) }}
{{- end -}}

{{- define "loraplex.serviceAccount" -}}
{{- $made := ternary (include "loraplex.fullname" .) "" .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default $made }}
{{- end -}}

{{- /* Where and how a pod runs: (dict "root" $ "pod" .Values.server). */ -}}
{{- define "loraplex.pod" -}}
automountServiceAccountToken: false
{{- with include "loraplex.serviceAccount" .root }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" }}
{{- with get $.pod $field }}
{{ $field }}: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "loraplex.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- /* Resources with the GPUs added to the limits: (dict "resources" … "gpus" 1). */ -}}
{{- define "loraplex.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if .gpus -}}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict "nvidia.com/gpu" (int .gpus))) -}}
{{- end -}}
{{ toYaml $resources }}
{{- end -}}

{{- define "loraplex.modelsVolume" -}}
{{- $claim := dict "persistentVolumeClaim" (dict "claimName" (printf "%s-models" (include "loraplex.fullname" .))) -}}
{{ toYaml (.Values.models.volume | default $claim) }}
{{- end -}}

{{- define "loraplex.settings" -}}
{{- $settings := deepCopy .Values.settings -}}
{{- if eq .Values.fleet.kind "agents" -}}
{{- $addresses := list -}}
{{- range $number := until (int .Values.agent.replicas) -}}
{{- $name := include "loraplex.fullname" $ -}}
{{- $addresses = append $addresses (printf "%s-agent-%d.%s-agents:7070" $name $number $name) -}}
{{- end -}}
{{- $settings = set $settings "LORAPLEX_REPLICA_ADDRESSES" (join "," $addresses) -}}
{{- end -}}
{{ toYaml $settings }}
{{- end -}}

{{- /* A variable of the settings, for a container that does not get all of them. */ -}}
{{- define "loraplex.setting" -}}
- name: {{ .name }}
  valueFrom: {configMapKeyRef: {name: {{ include "loraplex.fullname" .root }}, key: {{ .name }}}}
{{- end -}}
