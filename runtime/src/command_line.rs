//! Splitting of a command into words, as upstream does (Python's `shlex.split`): quotes and
//! backslashes, no shell, no comments. Pure.

/// Malformed command. The messages are upstream's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("No closing quotation")]
    Quotation,
    #[error("No escaped character")]
    Escape,
    #[error("the command is empty")]
    Empty,
    #[error("embedded null byte")]
    Nul,
}

/// Returns the words of a command; at least one.
pub fn split(command: &str) -> Result<Vec<String>, Error> {
    if command.contains('\0') {
        return Err(Error::Nul);
    }
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut rest = command.chars();
    while let Some(c) = rest.next() {
        match c {
            ' ' | '\t' | '\r' | '\n' => words.extend(word.take()),
            '\\' => {
                let escaped = rest.next().ok_or(Error::Escape)?;
                word.get_or_insert_default().push(escaped);
            }
            '\'' | '"' => quoted(c, &mut rest, word.get_or_insert_default())?,
            other => word.get_or_insert_default().push(other),
        }
    }
    words.extend(word);
    if words.is_empty() {
        return Err(Error::Empty);
    }
    Ok(words)
}

/// Appends a quoted text up to its closing quote to the word.
///
/// Between double quotes a backslash escapes a double quote and a backslash; before other
/// characters it stands for itself.
fn quoted(
    quote: char,
    rest: &mut impl Iterator<Item = char>,
    word: &mut String,
) -> Result<(), Error> {
    loop {
        match rest.next().ok_or(Error::Quotation)? {
            c if c == quote => return Ok(()),
            '\\' if quote == '"' => match rest.next().ok_or(Error::Escape)? {
                escaped @ ('\\' | '"') => word.push(escaped),
                other => word.extend(['\\', other]),
            },
            other => word.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("echo hello", &["echo", "hello"])]
    #[case("  a\tb\r\nc  ", &["a", "b", "c"])]
    #[case("echo 'a b' \"c d\"", &["echo", "a b", "c d"])]
    #[case("a'b'\"c\"d", &["abcd"])]
    #[case("echo ''", &["echo", ""])]
    #[case(r"a\ b \'", &["a b", "'"])]
    #[case(r#""a\"b\\c\$d\e""#, &[r#"a"b\c\$d\e"#])]
    #[case(r"'a\'b", &[r"a\b"])]
    #[case("echo # no comment", &["echo", "#", "no", "comment"])]
    #[case("a; b | c && d > e $HOME *", &["a;", "b", "|", "c", "&&", "d", ">", "e", "$HOME", "*"])]
    #[case("ä\u{a0}ö", &["ä\u{a0}ö"])]
    #[case("a\\\nb", &["a\nb"])]
    fn words_are_upstreams(#[case] command: &str, #[case] words: &[&str]) {
        assert_eq!(split(command).unwrap(), words);
    }

    #[rstest]
    #[case("echo 'a", Error::Quotation)]
    #[case("echo \"a", Error::Quotation)]
    #[case("echo a\\", Error::Escape)]
    #[case("\"a\\", Error::Escape)]
    #[case("", Error::Empty)]
    #[case(" \n", Error::Empty)]
    #[case("a\0b", Error::Nul)]
    fn a_malformed_command_is_refused(#[case] command: &str, #[case] error: Error) {
        assert_eq!(split(command), Err(error));
    }

    proptest::proptest! {
        #[test]
        fn a_word_in_single_quotes_comes_back(word in "[^'\0]*") {
            assert_eq!(split(&format!("'{word}'")).unwrap(), [word]);
        }
    }
}
