//! Writes the files that a claim brings into the Secret of its Sandbox. The controller has the
//! rights for that only where an operator grants them (deploy/late-binding).

use jiff::Timestamp;
use k8s_openapi::{
    ByteString,
    api::core::v1::{ConfigMap, Secret, ServiceAccount},
};
use kube::ResourceExt;
use serde_json::json;
use torpor_api::{Sandbox, annotations::ClaimFile};
use torpor_claim_env::{FILES_OF, TOKEN};

use super::files::{self, Files, Refused};
use crate::{
    calls::{self, Answer, Apiserver},
    merge_patch,
    sandbox::pod_spec::claim_volume::secret_name,
};

/// Failure to write a claim's files.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error(transparent)]
    Call(calls::Error),
}

/// Writes the files of these sources for a claim's Sandbox. Returns the time at which they are to
/// be written again, if one is a token.
///
/// The token is bound to the Secret: it is worthless once the Secret has gone with the Sandbox.
pub(super) async fn write(
    sandbox: &Sandbox,
    claim: &str,
    sources: &[ClaimFile],
    api: &Apiserver,
) -> Result<Option<Timestamp>, Failure> {
    let namespace = sandbox.namespace().unwrap_or_default();
    let call = |error| failed(error, &namespace);
    let (mut all, mut account) = (Files::new(), None);
    for source in sources {
        match source {
            ClaimFile::Secret(name) => {
                let found = api.get::<Secret>(&namespace, name).await.map_err(call)?;
                files::check(source, found.as_ref().map(Secret::labels))?;
                let data = found.and_then(|found| found.data);
                files::add(&mut all, source, data.unwrap_or_default())?;
            }
            ClaimFile::ConfigMap(name) => {
                let found = api.get::<ConfigMap>(&namespace, name).await.map_err(call)?;
                files::check(source, found.as_ref().map(ConfigMap::labels))?;
                files::add(&mut all, source, content(found.unwrap_or_default()))?;
            }
            ClaimFile::Token(name) => {
                let found = api.get::<ServiceAccount>(&namespace, name).await;
                let found = found.map_err(call)?;
                files::check(source, found.as_ref().map(ServiceAccount::labels))?;
                account = Some(name);
            }
        }
    }
    let secret = begin(sandbox, claim, api).await?.map_err(call)?;
    let renew = match account {
        Some(account) => {
            let (token, renew) = token(&secret, account, api).await?;
            all.insert(TOKEN.to_owned(), token);
            Some(renew)
        }
        None => None,
    };
    all.insert(FILES_OF.to_owned(), ByteString(claim.as_bytes().to_vec()));
    let before = json!(secret.data.clone().unwrap_or_default());
    if let Some(data) = merge_patch::difference(&before, &json!(all)) {
        let patch = json!({"metadata": {"uid": secret.uid()}, "data": data});
        let name = secret.name_any();
        let patched = api.patch::<Secret>(&namespace, &name, &patch).await;
        patched.map_err(call)?;
    }
    Ok(renew)
}

/// Result of a look at written files.
#[derive(Debug)]
pub(super) enum Kept {
    /// They are there.
    Whole,
    /// Their token is new, until this time.
    Renewed(Timestamp),
    /// The Secret is gone.
    Missing,
}

/// Looks at the written files of a claim's Sandbox, and renews their token. `account`: its
/// ServiceAccount, if it is to be renewed.
pub(super) async fn keep(
    sandbox: &Sandbox,
    claim: &str,
    account: Option<&str>,
    api: &Apiserver,
) -> Result<Kept, Failure> {
    let namespace = sandbox.namespace().unwrap_or_default();
    let call = |error| failed(error, &namespace);
    let name = secret_name(&sandbox.uid().unwrap_or_default());
    let found = api.get::<Secret>(&namespace, &name).await.map_err(call)?;
    let Some(secret) = found.filter(|found| files::is_of(found, sandbox, claim)) else {
        return Ok(Kept::Missing);
    };
    let Some(account) = account else {
        return Ok(Kept::Whole);
    };
    let source = ClaimFile::Token(account.to_owned());
    let found = api.get::<ServiceAccount>(&namespace, account).await;
    let found = found.map_err(call)?;
    files::check(&source, found.as_ref().map(ServiceAccount::labels))?;
    let (token, renew) = token(&secret, account, api).await?;
    let patch = json!({"metadata": {"uid": secret.uid()}, "data": {TOKEN: token}});
    let patched = api.patch::<Secret>(&namespace, &name, &patch).await;
    patched.map_err(call)?;
    Ok(Kept::Renewed(renew))
}

/// Returns a token of a ServiceAccount that is bound to a Secret, and the time at which it is to be
/// renewed.
async fn token(
    secret: &Secret,
    account: &str,
    api: &Apiserver,
) -> Result<(ByteString, Timestamp), Failure> {
    let namespace = secret.namespace().unwrap_or_default();
    let bound = (secret.name_any(), secret.uid().unwrap_or_default());
    let made = api.token(&namespace, account, &bound).await;
    let (token, expires) = made.map_err(|error| failed(error, &namespace))?;
    let renew = files::renew_at(expires, Timestamp::now());
    Ok((ByteString(token.into_bytes()), renew))
}

/// Returns the failure of a call. A quota refuses with the code of a missing right, and is none.
fn failed(error: calls::Error, namespace: &str) -> Failure {
    let right = error.forbidden();
    match right.filter(|message| !message.contains("exceeded quota")) {
        Some(message) => Failure::Refused(Refused::Forbidden {
            namespace: namespace.to_owned(),
            message,
        }),
        None => Failure::Call(error),
    }
}

/// Returns the Secret of the Sandbox, made without files if there is none.
async fn begin(
    sandbox: &Sandbox,
    claim: &str,
    api: &Apiserver,
) -> Result<Result<Secret, calls::Error>, Failure> {
    let namespace = sandbox.namespace().unwrap_or_default();
    let empty = files::secret(sandbox, claim, &Files::new());
    match api.create::<Secret>(&namespace, empty).await {
        Err(error) if error.answer() == Answer::AlreadyExists => {}
        created => return Ok(created),
    }
    let name = secret_name(&sandbox.uid().unwrap_or_default());
    match api.get::<Secret>(&namespace, &name).await {
        Ok(Some(found)) if files::is_of(&found, sandbox, claim) => Ok(Ok(found)),
        Ok(_) => Err(Refused::Taken(name).into()),
        Err(error) => Ok(Err(error)),
    }
}

/// Returns the files of a ConfigMap.
fn content(found: ConfigMap) -> Files {
    let text = found.data.unwrap_or_default().into_iter();
    let text = text.map(|(name, text)| (name, ByteString(text.into_bytes())));
    text.chain(found.binary_data.unwrap_or_default()).collect()
}
