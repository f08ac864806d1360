import { useId, type InputHTMLAttributes, type ReactNode, type SelectHTMLAttributes } from "react";

interface FieldProps {
  label: string;
  hint?: ReactNode;
  problem?: string | null | undefined;
  /** Gets the attributes that tie the control to its label, hint and problem. */
  children: (control: {
    id: string;
    "aria-describedby": string | undefined;
    "aria-invalid": true | undefined;
  }) => ReactNode;
}

export function Field({ label, hint, problem, children }: FieldProps): ReactNode {
  const id = useId();
  const described = hint || problem ? `${id}-more` : undefined;
  return (
    <div className="field">
      <label htmlFor={id}>{label}</label>
      {children({ id, "aria-describedby": described, "aria-invalid": problem ? true : undefined })}
      {described && (
        <div id={described}>
          {problem && <div className="problem">{problem}</div>}
          {hint && <div className="hint">{hint}</div>}
        </div>
      )}
    </div>
  );
}

interface TextFieldProps extends InputHTMLAttributes<HTMLInputElement> {
  label: string;
  hint?: ReactNode;
  problem?: string | null | undefined;
}

export function TextField({ label, hint, problem, className, ...input }: TextFieldProps): ReactNode {
  return (
    <Field label={label} hint={hint} problem={problem}>
      {(control) => <input {...input} {...control} className={`input ${className ?? ""}`} />}
    </Field>
  );
}

interface SelectFieldProps extends SelectHTMLAttributes<HTMLSelectElement> {
  label: string;
  hint?: ReactNode;
  options: readonly (readonly [string, string])[];
}

export function SelectField({ label, hint, options, ...select }: SelectFieldProps): ReactNode {
  return (
    <Field label={label} hint={hint}>
      {(control) => (
        <select {...select} {...control} className="input">
          {options.map(([value, text]) => <option key={value} value={value}>{text}</option>)}
        </select>
      )}
    </Field>
  );
}

interface FilterProps {
  label: string;
  value: string;
  onChange: (value: string) => void;
  options: readonly (readonly [string, string])[];
}

/** A choice that narrows a list; its label is for screen readers. */
export function Filter({ label, value, onChange, options }: FilterProps): ReactNode {
  return (
    <select className="input inline" aria-label={label} value={value}
      onChange={(event) => onChange(event.target.value)}>
      {options.map(([option, text]) => <option key={option} value={option}>{text}</option>)}
    </select>
  );
}

/** A day, in UTC, that bounds a list. */
export function DateField({ label, value, onChange }: {
  label: string;
  value: string;
  onChange: (value: string) => void;
}): ReactNode {
  return (
    <label className="row tight soft">
      {label}
      <input type="date" className="input inline" value={value} onChange={(event) => onChange(event.target.value)} />
    </label>
  );
}

/** A search field; what it finds follows shortly after the typing. */
export function Search({ label, value, onChange }: {
  label: string;
  value: string;
  onChange: (value: string) => void;
}): ReactNode {
  return (
    <input type="search" className="input search" aria-label={label} placeholder={label} value={value}
      spellCheck={false} onChange={(event) => onChange(event.target.value)} />
  );
}
