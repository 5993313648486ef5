//! The files by which a claim arrives in a sandbox that runs already.
//!
//! The kubelet writes them, from annotations of the Pod, into a volume of the Pod's first
//! container. The controller writes the text of [`ENV`]; the shim and the sandbox runtime read it.

/// Path at which the container mounts the volume.
pub const DIRECTORY: &str = "/run/claim";
/// File of the claim's UID; empty until a claim has taken the Pod.
pub const UID: &str = "uid";
/// File of the claim's environment variables: lines `export NAME=VALUE` for a shell.
pub const ENV: &str = "env";
/// File that is not empty if the claim brings more files.
pub const FILES: &str = "files";
/// File among the files that the claim brings, with the claim's UID: they are all there.
pub const FILES_OF: &str = ".claim";
/// File of a token that the claim brings.
pub const TOKEN: &str = "token";
/// Most bytes of [`ENV`]. All annotations of an object together may have 256 KiB.
pub const MAX_ENV: usize = 64 * 1024;

/// Why variables cannot reach a sandbox that runs already.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{0:?} is not a name of a shell's variable")]
    Name(String),
    #[error("the value of variable {0:?} contains a NUL byte")]
    Value(String),
    #[error("the variables take {0} bytes; at most {MAX_ENV} are allowed")]
    TooLarge(usize),
}

/// Returns the text of [`ENV`] for variables, given as name and value.
pub fn write<'a>(variables: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<String, Error> {
    let mut text = String::new();
    for (name, value) in variables {
        if !is_name(name) {
            return Err(Error::Name(name.to_owned()));
        }
        let quoted = shlex::try_quote(value).map_err(|_| Error::Value(name.to_owned()))?;
        text.push_str("export ");
        text.push_str(name);
        text.push('=');
        text.push_str(&quoted);
        text.push('\n');
    }
    match text.len() {
        len if len > MAX_ENV => Err(Error::TooLarge(len)),
        _ => Ok(text),
    }
}

/// Returns the variables in the text of [`ENV`], as name and value. A text that [`write()`] did not
/// make has those that can be read.
pub fn read(text: &str) -> Vec<(String, String)> {
    let words = shlex::split(text).unwrap_or_default();
    words
        .into_iter()
        .filter_map(|word| {
            let (name, value) = word.split_once('=')?;
            is_name(name).then(|| (name.to_owned(), value.to_owned()))
        })
        .collect()
}

/// Reports whether the text is a name by POSIX, "Environment Variables": letters, digits and
/// underscores, without a digit in front.
fn is_name(text: &str) -> bool {
    let mut bytes = text.bytes();
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    bytes
        .next()
        .is_some_and(|first| is_word(first) && !first.is_ascii_digit())
        && bytes.all(is_word)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_shell_reads_the_variables_as_they_were_written() {
        let value = "it's \"$HOME\" `date` $(id)\n# not a comment \\ 'x'";
        let text = write([("A_1", value), ("EMPTY", "")]).unwrap();
        let script = format!("{text}printf '%s|%s' \"$A_1\" \"${{EMPTY-unset}}\"");
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(
            String::from_utf8(output.stdout).unwrap(),
            format!("{value}|")
        );
    }

    #[test]
    fn what_a_shell_could_run_is_refused() {
        for name in ["", "1A", "A B", "A;id", "A-B", "$(id)", "A=B", "\u{c4}"] {
            let refused = write([(name, "x")]);
            assert_eq!(refused, Err(Error::Name(name.to_owned())));
        }
        let nul = write([("A", "x\0y")]);
        assert_eq!(nul, Err(Error::Value("A".to_owned())));
        let large = "x".repeat(MAX_ENV);
        assert!(matches!(
            write([("A", large.as_str())]),
            Err(Error::TooLarge(_))
        ));
    }

    #[test]
    fn another_text_has_no_variables() {
        for text in ["", "\n", "export", "'", "export A B", "=x", "1=2"] {
            assert_eq!(read(text), [], "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn what_was_written_is_read(
            all in prop::collection::vec(("[A-Za-z_][A-Za-z0-9_]{0,8}", "[^\0]{0,40}"), 0..6)
        ) {
            let pairs = all.iter().map(|(name, value)| (name.as_str(), value.as_str()));
            let text = write(pairs).unwrap();
            prop_assert_eq!(read(&text), all);
        }
    }
}
