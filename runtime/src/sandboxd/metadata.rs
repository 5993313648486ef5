//! Selection of environment variables that clients may read. Pure.

use std::collections::BTreeMap;

/// Parts of the names of secrets, as in upstream.
const SECRET: [&str; 5] = ["TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "KEY"];

/// Returns the variables whose names begin with `prefix` and do not look like a secret.
pub fn visible(
    variables: impl IntoIterator<Item = (String, String)>,
    prefix: &str,
) -> BTreeMap<String, String> {
    let secret = |name: &str| {
        let name = name.to_uppercase();
        SECRET.iter().any(|marker| name.contains(marker))
    };
    variables
        .into_iter()
        .filter(|(name, _)| name.starts_with(prefix) && !secret(name))
        .collect()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("SANDBOX_ID", true)]
    #[case("SANDBOX_WORKSPACE", true)]
    #[case("SANDBOX_", true)]
    #[case("sandbox_id", false)]
    #[case("KUBERNETES_SERVICE_HOST", false)]
    #[case("MY_SANDBOX_ID", false)]
    #[case("SANDBOX_API_TOKEN", false)]
    #[case("SANDBOX_ssh_key", false)]
    #[case("SANDBOX_KEYBOARD", false)]
    #[case("SANDBOX_PASSWORD_FILE", false)]
    #[case("SANDBOX_CREDENTIALS", false)]
    #[case("SANDBOX_SECRET", false)]
    fn secrets_are_not_visible(#[case] name: &str, #[case] seen: bool) {
        let variables = [(name.to_owned(), "value".to_owned())];
        assert_eq!(visible(variables, "SANDBOX_").len(), usize::from(seen));
    }
}
