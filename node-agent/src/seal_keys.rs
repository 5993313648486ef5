//! `seal-keys`: seals the encryption keys of repositories by a KMS, for the Secret
//! torpor-repository-keys.

use std::io::{Read, Write};

use anyhow::Context;
use torpor_repository::Kms;

use crate::args::SealKeysArgs;

/// Most bytes of keys: the largest Secret.
const LARGEST: u64 = 1 << 20;

/// Reads lines of keys from standard input, and prints them once all of them are sealed. The KMS
/// plug-in is asked for its state first.
pub(crate) fn run(args: &SealKeysArgs) -> anyhow::Result<()> {
    let mut text = String::new();
    let read = std::io::stdin().take(LARGEST + 1).read_to_string(&mut text);
    read.context("cannot read the keys from standard input")?;
    // Lines that were cut off would be lost.
    anyhow::ensure!(
        text.len() as u64 <= LARGEST,
        "standard input has more than {LARGEST} bytes, which is more than a Secret"
    );
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let lines = runtime.block_on(async {
        let kms = Kms::at(&args.repository_kms);
        kms.check().await?;
        anyhow::Ok(torpor_repository::seal_keys(&text, &kms, args.add.as_deref()).await?)
    })?;
    anyhow::ensure!(
        !lines.is_empty(),
        "standard input has no keys: pass the lines of the Secret, or --add"
    );
    std::io::stdout().write_all(lines.as_bytes())?;
    Ok(())
}
