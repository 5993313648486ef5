//! `seal-keys`: prints the encryption keys of repositories for the Secret torpor-repository-keys,
//! sealed by a KMS.

use std::io::Write;

use anyhow::Context;
use torpor_repository::Kms;

use crate::args::SealKeysArgs;

/// Prints the lines once all of them are sealed. The KMS plug-in is asked for its state first.
pub(crate) fn run(args: &SealKeysArgs) -> anyhow::Result<()> {
    let socket = args.keys.repository_kms.as_deref();
    let socket =
        socket.context("--repository-kms is missing: it names the KMS plug-in's socket")?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let lines = runtime.block_on(async {
        let kms = Kms::at(socket);
        kms.check().await?;
        anyhow::Ok(args.keys.file().sealed(&kms, args.add.as_deref()).await?)
    })?;
    anyhow::ensure!(
        !lines.is_empty(),
        "{} has no keys: --add makes one",
        args.keys.repository_keys.display()
    );
    std::io::stdout().write_all(lines.as_bytes())?;
    Ok(())
}
