//! `doctor`: checks a cluster. [`facts`] reads the objects; the checks are pure.

use serde::Serialize;

use crate::output::Render;
use crate::table::printable;

pub mod facts;
pub mod install;
pub mod nodes;
pub mod plain;
pub mod sandboxes;

use facts::{Facts, Unseen};

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Severity {
    /// A function of Torpor fails.
    Problem,
    /// A function works for now, or not everywhere.
    Warning,
    /// The objects of the check could not be read.
    Unseen,
}

/// Fault that a check found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub severity: Severity,
    /// Kind and name of the object, with its namespace: `Kind name`, `Kind namespace/name`.
    pub subject: String,
    pub text: String,
    pub remedy: String,
}

impl Finding {
    pub fn problem(
        subject: impl Into<String>,
        text: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            severity: Severity::Problem,
            subject: subject.into(),
            text: text.into(),
            remedy: remedy.into(),
        }
    }

    pub fn warning(
        subject: impl Into<String>,
        text: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            severity: Severity::Warning,
            ..Self::problem(subject, text, remedy)
        }
    }

    pub fn unseen(what: &str, why: &Unseen) -> Self {
        Self {
            severity: Severity::Unseen,
            ..Self::problem(what, &why.text, &why.remedy)
        }
    }
}

/// Check, with its findings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    pub name: &'static str,
    pub findings: Vec<Finding>,
}

/// Output of `doctor`.
#[derive(Debug, Serialize)]
pub struct Diagnosis {
    pub checks: Vec<Check>,
    pub problems: usize,
    pub warnings: usize,
    /// Number of findings of severity [`Severity::Unseen`].
    pub unseen: usize,
}

type CheckFn = fn(&Facts) -> Vec<Finding>;

/// Runs all checks.
pub fn diagnose(facts: &Facts) -> Diagnosis {
    let all: [(&'static str, CheckFn); 10] = [
        ("definitions", install::definitions),
        ("controller", install::controller),
        ("leader", install::leader),
        ("router", install::router),
        ("runtime class", install::runtime_class),
        ("agents", nodes::agents),
        ("nodes", nodes::abilities),
        ("snapshots", sandboxes::snapshots),
        ("sandboxes", sandboxes::sandboxes),
        ("runtimes", plain::plain),
    ];
    let checks: Vec<Check> = all
        .into_iter()
        .map(|(name, check)| {
            let mut findings = check(facts);
            findings.sort_by_key(|finding| finding.severity);
            Check { name, findings }
        })
        .collect();
    let count = |severity| {
        let findings = checks.iter().flat_map(|check| &check.findings);
        findings.filter(|f| f.severity == severity).count()
    };
    Diagnosis {
        problems: count(Severity::Problem),
        warnings: count(Severity::Warning),
        unseen: count(Severity::Unseen),
        checks,
    }
}

impl Render for Diagnosis {
    fn text(&self, _wide: bool) -> String {
        let mut text = String::new();
        for check in &self.checks {
            if check.findings.is_empty() {
                text.push_str(&format!("ok        {}\n", check.name));
            }
            for finding in &check.findings {
                let severity = match finding.severity {
                    Severity::Problem => "PROBLEM",
                    Severity::Warning => "warning",
                    Severity::Unseen => "unknown",
                };
                let line = printable(&finding.text);
                text.push_str(&format!("{severity:<8}  {}: {line}\n", finding.subject));
                text.push_str(&format!("          → {}\n", finding.remedy));
            }
        }
        let plural = |count: usize, what: &str| match count {
            1 => format!("1 {what}"),
            _ => format!("{count} {what}s"),
        };
        let (problems, warnings) = (
            plural(self.problems, "problem"),
            plural(self.warnings, "warning"),
        );
        let unseen = match self.unseen {
            0 => String::new(),
            count => format!(", {count} unknown"),
        };
        text.push_str(&format!("\n{problems}, {warnings}{unseen}\n"));
        text
    }

    fn names(&self) -> Vec<String> {
        let findings = self.checks.iter().flat_map(|check| &check.findings);
        findings.map(|finding| finding.subject.clone()).collect()
    }
}

#[cfg(test)]
mod tests;
