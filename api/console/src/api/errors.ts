/** What went wrong, in words: the API's error envelope, or what kept an answer from coming. */

export interface ErrorBody {
  message: string;
  code: string;
  param?: string | null;
  request_id?: string;
}

export class ApiError extends Error {
  readonly status: number;
  readonly code: string;
  readonly param: string | null;
  readonly requestId: string | null;
  /** Seconds after which the same request may pass. */
  readonly retryAfter: number | null;

  constructor(status: number, body: ErrorBody, retryAfter: number | null = null) {
    super(body.message);
    this.name = "ApiError";
    this.status = status;
    this.code = body.code;
    this.param = body.param ?? null;
    this.requestId = body.request_id || null;
    this.retryAfter = retryAfter;
  }

  /** Asking again may help; a refusal stays one. */
  get isTransient(): boolean {
    return this.status === 0 || this.status >= 500 || this.status === 429;
  }
}

/** The error that an answer other than 2xx stands for, also when a proxy wrote it. */
export function errorOf(status: number, text: string, retryAfter: string | null): ApiError {
  const seconds = retryAfter === null ? Number.NaN : Number(retryAfter);
  return new ApiError(
    status,
    bodyOf(text) ?? { message: `The server answered with status ${status}.`, code: `http_${status}` },
    Number.isFinite(seconds) ? seconds : null,
  );
}

/** A request that got no answer at all. */
export function unreachable(): ApiError {
  return new ApiError(0, {
    message: "The server does not respond. Check that it is running and reachable.",
    code: "unreachable",
  });
}

/** What is to be changed is no longer what the page shows, as the server's own refusal says it. */
export function changedMeanwhile(): ApiError {
  return new ApiError(412, {
    message: "Someone else changed it in the meantime. Close this dialog and try again.",
    code: "etag_mismatch",
  });
}

function bodyOf(text: string): ErrorBody | null {
  try {
    const error = (JSON.parse(text) as { error?: Partial<ErrorBody> }).error;
    if (typeof error?.message === "string" && typeof error.code === "string") {
      return error as ErrorBody;
    }
  } catch {
    // Not JSON: somebody between us and the server has answered.
  }
  return null;
}

export function toApiError(error: unknown): ApiError {
  if (error instanceof ApiError) return error;
  return new ApiError(0, { message: String(error), code: "console_error" });
}
