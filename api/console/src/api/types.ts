/** The API's answers under short names. */

import type { components } from "./schema.ts";

type Schemas = components["schemas"];

export type AdapterSummary = Schemas["AdapterSummaryView"];
export type Adapter = Schemas["AdapterView"];
export type AdapterVersion = Schemas["VersionView"];
export type AliasCanary = Schemas["AliasCanaryView"];
export type CanaryLimits = Schemas["CanaryLimitsView"];
export type AliasChange = Schemas["AliasChangeView"];
export type ShadowView = Schemas["ShadowView"];
export type Deletion = Schemas["DeletionView"];
export type Sample = Schemas["SampleView"];
export type SampleContent = Schemas["SampleContentView"];
export type Sampling = Schemas["SamplingView"];
export type Readiness = Schemas["ReadinessView"];
export type Upload = Schemas["UploadView"];
export type Overview = Schemas["OverviewView"];
export type PlatformOverview = Schemas["PlatformOverviewView"];
export type TenantLoad = Schemas["TenantLoadView"];
export type ServerMemory = Schemas["ServerMemoryView"];
export type RankMemory = Schemas["RankView"];
export type Extent = Schemas["ExtentView"];
export type CachedAdapter = Schemas["CachedAdapterView"];
export type RequestRow = Schemas["RequestView"];
export type LiveRequest = Schemas["LiveRequestView"];
export type Explanation = Schemas["ExplanationView"];
export type Evaluation = Schemas["EvaluationView"];
export type GoldenSet = Schemas["GoldenSetView"];
export type TuningJob = Schemas["TuningJobView"];
