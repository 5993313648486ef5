//! Requests over plain HTTP.

use http::Request;
use kube::{Client, Config};

/// Returns a client of a server's address, `HOST:PORT`.
pub(crate) fn client_of(address: &str) -> anyhow::Result<Client> {
    let config = Config::new(format!("http://{address}").parse()?);
    Ok(Client::try_from(config)?)
}

pub(crate) fn asked(path: &str) -> anyhow::Result<Request<Vec<u8>>> {
    Ok(Request::get(path).body(Vec::new())?)
}

/// Returns the body of an answer; an error unless the request succeeded.
pub(crate) async fn get(address: &str, path: &str) -> anyhow::Result<String> {
    Ok(client_of(address)?.request_text(asked(path)?).await?)
}
