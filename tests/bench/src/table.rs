//! Rows of the results: what was measured, its figures, and beside each figure its ratio to the
//! base of the same run.

use crate::stats::Times;

/// Width of the words before the figures.
const WORDS: usize = 62;

/// Returns a row with p50 and p99, each with its ratio to the base's.
pub(crate) fn row(words: &str, times: &Times, base: &Times) -> String {
    figures(
        words,
        &[("p50", times.p50, base.p50), ("p99", times.p99, base.p99)],
    )
}

/// Returns a row as [`row`] with the longest time as well.
pub(crate) fn row_to_last(words: &str, times: &Times, base: &Times) -> String {
    let last = ("last", times.max, base.max);
    figures(
        words,
        &[
            ("p50", times.p50, base.p50),
            ("p99", times.p99, base.p99),
            last,
        ],
    )
}

fn figures(words: &str, figures: &[(&str, f64, f64)]) -> String {
    let figures = figures.iter().map(|(name, value, base)| {
        let ratio = value / base;
        format!("{name} {value:8.1} ms ({ratio:6.2} x)")
    });
    let figures: Vec<String> = figures.collect();
    format!("{words:<WORDS$} {}", figures.join("   "))
}

/// Returns a row with one figure and its unit; `base` is the figure's of the same run, if there is
/// one.
pub(crate) fn value(words: &str, figure: f64, unit: &str, base: Option<f64>) -> String {
    let ratio = base.map(|base| format!(" ({:.2} x)", figure / base));
    let decimals = if figure < 1.0 { 3 } else { 2 };
    format!(
        "{words:<WORDS$} {figure:8.decimals$} {unit}{}",
        ratio.unwrap_or_default()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(p50: f64, p99: f64, max: f64) -> Times {
        Times {
            p50,
            p99,
            max,
            ..Times::default()
        }
    }

    #[test]
    fn each_figure_has_its_ratio_to_the_same_figure_of_the_base() {
        let (slow, base) = (times(30.0, 80.0, 90.0), times(2.0, 4.0, 9.0));
        let expected = "p50     30.0 ms ( 15.00 x)   p99     80.0 ms ( 20.00 x)";
        assert_eq!(
            row("wake", &slow, &base),
            format!("{:<62} {expected}", "wake")
        );
        let last = "last     90.0 ms ( 10.00 x)";
        assert!(row_to_last("wake", &slow, &base).ends_with(&format!("{expected}   {last}")));
        assert!(row("base", &base, &base).contains("p99      4.0 ms (  1.00 x)"));
    }

    #[test]
    fn a_figure_without_base_has_no_ratio() {
        assert_eq!(
            value("memory", 28.0, "MiB", None),
            format!("{:<62}    28.00 MiB", "memory")
        );
        let small = value("share", 0.0625, "%", None);
        assert_eq!(small, format!("{:<62}    0.062 %", "share"));
        let halved = value("memory", 1.5, "MiB", Some(3.0));
        assert_eq!(halved, format!("{:<62}     1.50 MiB (0.50 x)", "memory"));
    }
}
