/** The parts that pages are made of. */

import { useEffect, useId, type ReactNode } from "react";
import { NavLink } from "react-router";

interface PageProps {
  title: string;
  lead?: ReactNode;
  crumbs?: ReactNode;
  /** Controls beside the title. */
  actions?: ReactNode;
  children: ReactNode;
}

/** A page: its title, which is the document's too, what can be done, and its parts. */
export function Page({ title, lead, crumbs, actions, children }: PageProps): ReactNode {
  useEffect(() => {
    document.title = `${title} · Loraplex`;
  }, [title]);
  return (
    <div className="page">
      <div className="page-head">
        <div>
          {crumbs && <nav className="crumbs" aria-label="Breadcrumb">{crumbs}</nav>}
          <h1>{title}</h1>
          {lead && <p className="lead">{lead}</p>}
        </div>
        {actions && <div className="row">{actions}</div>}
      </div>
      {children}
    </div>
  );
}

interface PanelProps {
  title?: string;
  note?: ReactNode;
  actions?: ReactNode;
  /** The content reaches the frame, as tables do. */
  flush?: boolean;
  children: ReactNode;
}

export function Panel({ title, note, actions, flush, children }: PanelProps): ReactNode {
  const heading = useId();
  return (
    <section className="panel" aria-labelledby={title ? heading : undefined}>
      {title && (
        <div className="panel-head">
          <div className="row">
            <h2 id={heading}>{title}</h2>
            {note && <span className="note">{note}</span>}
          </div>
          {actions && <div className="row">{actions}</div>}
        </div>
      )}
      <div className={flush ? "panel-body flush" : "panel-body"}>{children}</div>
    </section>
  );
}

export interface Figure {
  label: string;
  value: ReactNode;
  note?: ReactNode;
}

/** A row of figures that matter most. */
export function Figures({ figures }: { figures: Figure[] }): ReactNode {
  return (
    <dl className="figures">
      {figures.map(({ label, value, note }) => (
        <div key={label} className="figure">
          <dt>{label}</dt>
          <dd>{value}{note && <small>{note}</small>}</dd>
        </div>
      ))}
    </dl>
  );
}

/** Names and values, one pair a line. */
export function Facts({ facts }: { facts: [string, ReactNode][] }): ReactNode {
  return (
    <dl className="facts">
      {facts.map(([name, value]) => (
        <div key={name} style={{ display: "contents" }}><dt>{name}</dt><dd>{value}</dd></div>
      ))}
    </dl>
  );
}

/** Parts of a page that each have their own address. */
export function Tabs({ label, tabs }: { label: string; tabs: [string, string][] }): ReactNode {
  return (
    <nav className="tabs" aria-label={label}>
      {tabs.map(([to, text]) => <NavLink key={to} to={to} end>{text}</NavLink>)}
    </nav>
  );
}

interface SegmentsProps<T extends string> {
  label: string;
  options: readonly (readonly [T, string])[];
  value: T;
  onChange: (value: T) => void;
}

/** One of a few choices, all in sight. */
export function Segments<T extends string>(props: SegmentsProps<T>): ReactNode {
  const { label, options, value, onChange } = props;
  return (
    <div className="segments" role="group" aria-label={label}>
      {options.map(([option, text]) => (
        <button key={option} type="button" aria-pressed={option === value}
          onClick={() => onChange(option)}>{text}</button>
      ))}
    </div>
  );
}
