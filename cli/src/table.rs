//! Tables in kubectl's style: columns as wide as their widest cell, three spaces apart.

/// Table in which each row has as many cells as there are headings.
#[derive(Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new(headings: &[&str]) -> Self {
        let headings = headings.iter().map(|heading| (*heading).to_owned());
        Self {
            rows: vec![headings.collect()],
        }
    }

    /// Returns a table of objects, with a first column for their namespaces and the columns `more`
    /// at the end where they are asked for.
    pub fn of_objects(headings: &[&str], with_namespaces: bool, more: Option<&[&str]>) -> Self {
        let namespace = with_namespaces.then_some("NAMESPACE");
        let headings = namespace.iter().chain(headings);
        let headings: Vec<&str> = headings.chain(more.unwrap_or_default()).copied().collect();
        Self::new(&headings)
    }

    /// Adds a row. An empty cell is printed as `-`.
    pub fn push(&mut self, row: Vec<String>) {
        let shown = row.into_iter().map(|cell| match cell.is_empty() {
            true => "-".to_owned(),
            false => printable(&cell),
        });
        self.rows.push(shown.collect());
    }

    /// Returns the table as text, one line a row.
    pub fn text(&self) -> String {
        let columns = self.rows.first().map_or(0, Vec::len);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for row in &self.rows {
            let padded: Vec<String> = row
                .iter()
                .zip(&widths)
                .map(|(cell, width)| format!("{cell:<width$}"))
                .collect();
            text.push_str(padded.join("   ").trim_end());
            text.push('\n');
        }
        text
    }
}

/// Returns the text with blanks in place of characters that control the terminal.
///
/// Messages contain text of programs in sandboxes, which is not trusted.
pub fn printable(text: &str) -> String {
    // Unicode's marks that change the direction of the text after them.
    let is_bidi = |c: char| matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let is_unsafe = |c: char| c.is_control() || is_bidi(c);
    text.chars()
        .map(|c| if is_unsafe(c) { ' ' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell_and_lines_have_no_trailing_blanks() {
        let mut table = Table::new(&["NAME", "STATE"]);
        table.push(vec!["a-long-name".to_owned(), String::new()]);
        table.push(vec!["b".to_owned(), "Awake".to_owned()]);
        assert_eq!(
            table.text(),
            "NAME          STATE\na-long-name   -\nb             Awake\n"
        );
    }

    #[test]
    fn a_cell_cannot_control_the_terminal() {
        let mut table = Table::new(&["MESSAGE"]);
        table.push(vec!["one\n\u{1b}[2Jtwo\u{202e}eno".to_owned()]);
        assert_eq!(table.text(), "MESSAGE\none  [2Jtwo eno\n");
    }
}
