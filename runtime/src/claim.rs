//! Environment variables of the claim that a sandbox serves. They arrive in a file, because the
//! runtime runs already when a claim takes its sandbox.

use std::path::Path;

use tokio::{
    fs::File,
    io::{self, AsyncReadExt as _},
};
use torpor_claim_env::{DIRECTORY, ENV, MAX_ENV, read};

/// Returns the variables, as name and value. A sandbox without a claim, or whose template does not
/// allow late binding, has none.
pub async fn variables() -> Vec<(String, String)> {
    let file = Path::new(DIRECTORY).join(ENV);
    variables_in(&file).await
}

async fn variables_in(file: &Path) -> Vec<(String, String)> {
    let text = async {
        let mut text = String::new();
        let file = File::open(file).await?;
        file.take(MAX_ENV as u64).read_to_string(&mut text).await?;
        io::Result::Ok(text)
    };
    text.await.map_or_else(|_| Vec::new(), |text| read(&text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_variables_are_those_of_the_file_as_it_is_now() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join(ENV);
        assert_eq!(variables_in(&file).await, []);
        std::fs::write(&file, "").expect("written");
        assert_eq!(variables_in(&file).await, []);
        std::fs::write(&file, "export A='b c'\n").expect("written");
        let pair = ("A".to_owned(), "b c".to_owned());
        assert_eq!(variables_in(&file).await, [pair]);
    }
}
